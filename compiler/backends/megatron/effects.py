"""What an option of Megatron-LM does that has no place in a spec: by its group, or by its name.

Every option is classified, so that an import can say of each what it means that it is not carried. One that nobody has
classified counts as lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from parcompile.backends.reading import Account, Effect, Outcome
from parcompile.user_files import shipped

from .arguments import line
from .write import ROWS

_STORED: Mapping[str, Mapping[str, list[str]]] = shipped(__package__, "effects.json")


def _by_name(listed: Mapping[str, list[str]]) -> Mapping[str, Effect]:
    return MappingProxyType({name: Effect[effect.upper()] for effect, names in listed.items() for name in names})


_GROUPS = _by_name(_STORED["groups"])
"""What all options of a group do, unless their name stands below."""
_OF_NAMES = _by_name(_STORED["options"])
"""What single options do, where their group does not say it or says something else."""

CARRIED = frozenset(name for row in ROWS for name in (row.options if hasattr(row, "options") else (row.option,)))
"""Options that the table speaks of."""


def effect(name: str) -> Effect | None:
    """What an option does; None for one that nobody has classified."""
    if name in _OF_NAMES:
        return _OF_NAMES[name]
    option = line().options.get(name)
    return None if option is None else _GROUPS.get(option.newest.group)


_UNCHANGED = frozenset(("recompute_granularity", "recompute_method", "recompute_num_layers", "sequence_parallel"))


def changes(name: str) -> bool:
    """Whether another value of an option of the table gives other numbers."""
    return name not in _UNCHANGED and effect(name) in (None, Effect.NUMBERS, Effect.OTHER_MODEL)


def fate(name: str, value: object) -> Account | None:
    """What there is to say of an option that the table does not speak of; None for one that no version has."""
    option = line().options.get(name)
    if option is None:
        return None
    found = effect(name)
    if found is None:
        return Account(name, Outcome.LOST, "a spec has no such key")
    if value == option.default and type(value) is type(option.default):
        return Account(name, Outcome.NO_EFFECT, "it is Megatron-LM's own default")
    return found.account(name)
