"""The names of the targets, and which are meant: what is known of them without what writes their files."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = ("deepspeed", "torchrun", "slurm", "kubernetes", "megatron", "torchtitan", "accelerate")
ALL = "all"
DEFAULT = ("deepspeed", "torchrun", "slurm")
"""Targets that are written when none is named."""


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The targets that are meant, each once and in a fixed order: without names the default ones.

    Raises:
        ValueError: there is no target of that name.
    """
    for name in names:
        if name != ALL and name not in NAMES:
            raise ValueError(f"there is no target {name!r}; there are {', '.join(NAMES)}, and {ALL}")
    wanted = set(NAMES) if ALL in names else set(names or DEFAULT)
    return tuple(name for name in NAMES if name in wanted)
