"""Megatron-LM arguments: what its parser refuses, and how their values fit together.

The values of a call of Megatron-LM as rules read them: what the file does not decide is unknown, and never 1.
"""

from __future__ import annotations

from typing import Any

from parcompile.backends.megatron.arguments import NVIDIA, Unknown, line
from parcompile.backends.megatron.file import Call
from parcompile.diagnostics import Related
from parcompile.lint.registry import NotSaidError, Settings


class MegatronSettings(Settings):
    """The values of one call.

    Args:
        call: the call; what its parser refuses counts as left out.
    """

    def __init__(self, call: Call) -> None:
        wrong = frozenset((one.name,) for one in call.arguments.problems if one.kind in ("type", "choice", "missing"))
        super().__init__(call.tree, wrong)
        self.is_open = call.arguments.is_open
        self.trains = call.trains
        self.project = call.arguments.project
        self.versions = call.arguments.versions
        self.is_command_line = call.is_command_line

    def get(self, *path: str | int, default: Any = None) -> Any:
        """The value at a path.

        Raises:
            NotSaidError: something else decides it, a variable for instance.
        """
        value = super().get(*path, default=default)
        if isinstance(value, Unknown) or (isinstance(value, list) and any(isinstance(one, Unknown) for one in value)):
            raise NotSaidError(str(path[0]))
        return value


def size(settings: Settings, name: str, default: int = 1) -> int:
    """A whole number of 1 or more; the default when it is left out or cannot be read.

    Raises:
        NotSaidError: the file does not decide it.
    """
    value = settings.number(name)
    return int(value) if value is not None and value >= 1 and value == int(value) else default


def flag(settings: Settings, name: str) -> bool:
    """Whether a flag is given.

    Raises:
        NotSaidError: it may stand among arguments that the file does not show.
    """
    value = settings.get(name)
    if value is None and is_open(settings):
        raise NotSaidError(name)
    return value is True


def is_open(settings: Settings) -> bool:
    """Whether there may be arguments that the file does not show."""
    return isinstance(settings, MegatronSettings) and settings.is_open


def trains(settings: Settings) -> bool:
    """Whether the program trains: an inference may leave out what only a training step asks for."""
    return not isinstance(settings, MegatronSettings) or settings.trains


def is_nvidias(settings: Settings) -> bool:
    """Whether Megatron-LM itself reads the arguments, and none of its forks."""
    return not isinstance(settings, MegatronSettings) or settings.project == NVIDIA


def fits(settings: Settings, last: str) -> bool:
    """Whether this version of Megatron-LM, or an older one, has all options that are given."""
    if not isinstance(settings, MegatronSettings):
        return False
    return bool(settings.versions) and min(settings.versions) <= line().versions.index(last)


def also(settings: Settings, *names: str) -> tuple[Related, ...]:
    """Where these arguments stand."""
    return tuple(
        Related(f"{name} {settings.tree[name]} is set here", (name,)) for name in names if settings.tree.get(name)
    )
