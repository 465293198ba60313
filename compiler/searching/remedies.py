"""What would fit where no layout does that a spec leaves open: more nodes, recomputation, another ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parcompile.cost.changes import Change, changes_that_fit
from parcompile.units import format_bytes, format_seconds

from .space import Candidate, Space
from .variant import variant

MOST = 3
ZERO_STAGES_TRIED = (2, 3)
"""Where stage 1 does not fit."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the spec, on top of a layout that does not fit, after which it does and every rule allows it."""

    candidate: Candidate
    change: Change

    def __str__(self) -> str:
        known = {**self.change.settings}
        if isinstance(known.get("activation_checkpointing"), list):
            known["activation_checkpointing"] = self.change.work.recompute_text
        settings = ", ".join(f"{_NAMES.get(name, name)} {value}" for name, value in known.items())
        peak, seconds = format_bytes(self.change.memory.peak.total_bytes), format_seconds(self.change.seconds)
        chance = self.change.memory.probability or 0.0
        return f"{settings}: peak {peak}, fits with probability {chance:.0%}, step {seconds}"


_NAMES = {"stage": "zero.stage", "activation_checkpointing": "recomputation"}


def remedies(space: Space, smallest: Candidate) -> Iterator[Remedy]:
    """Up to `MOST` changes of the layout that needs least, the smallest first."""
    found = 0
    # Only the runtime recomputes some stages and not others.
    for change in changes_that_fit(smallest.work, by_stage=space.executable):
        changes = {**smallest.changes, **change.settings}
        if "dp" in smallest.changes:
            changes["dp"] = change.work.dp
        if variant(space.tree, changes, space.folder, executable=False).work is not None:
            yield Remedy(smallest, change)
            found += 1
        if found == MOST:
            return
