"""The names of the targets, and which are meant: what is known of them without what writes their files."""

from __future__ import annotations

from collections.abc import Sequence

from parcompile import entry_points

BUILT_IN = (
    *("deepspeed", "torchrun", "slurm", "kubernetes", "skypilot", "megatron", "torchtitan"),
    *("accelerate", "accelerate-deepspeed", "transformers"),
)
ALL = "all"
DEFAULT = ("deepspeed", "torchrun", "slurm")
"""Targets that are written when none is named."""
LAUNCHERS = (*DEFAULT, "kubernetes", "skypilot")
"""Targets whose files start a script under the runtime; the others are tools that train by themselves."""


def names() -> tuple[str, ...]:
    """Every target, those of plug-ins behind the others."""
    offered = entry_points.offers(entry_points.TARGETS)
    return (*BUILT_IN, *(name for name in offered if name not in BUILT_IN and name != ALL))


def chosen(given: Sequence[str]) -> tuple[str, ...]:
    """The targets that are meant, each once and in a fixed order: without names the default ones.

    "all" means the built-in ones. Those of plug-ins are named one by one, so that "all" is the same on every machine.

    Raises:
        ValueError: there is no target of that name.
    """
    if set(given) <= set(BUILT_IN):
        return tuple(name for name in BUILT_IN if name in (given or DEFAULT))
    known = names()
    for name in given:
        if name != ALL and name not in known:
            raise ValueError(f"there is no target {name!r}; there are {', '.join(known)}, and {ALL}")
    wanted = set(BUILT_IN if ALL in given else ()) | set(given)
    return tuple(name for name in known if name in wanted)
