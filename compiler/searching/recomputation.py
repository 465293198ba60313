"""Layouts between those that recompute nothing and those that recompute everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parcompile.cost.coefficients import Fit
from parcompile.cost.recomputation import fewest_stages

from .space import Candidate


def is_open(one: Candidate, judged: Iterable[tuple[Candidate, bool]]) -> bool:
    """Whether stages of a layout may recompute different things, and it fits where all recompute everything."""
    if one.work.pp == 1 or one.work.virtual_stages > 1:
        return False
    full = (other for other, fits in judged if fits and other.work.recompute == "full")
    return any(other.work.micro_batch == one.work.micro_batch for other in full)


def between(judged: Iterable[tuple[Candidate, bool]], memory: Fit | None) -> Iterator[Candidate]:
    """Of layouts that recompute nothing and do not fit, and all and do: those with the fewest first stages recomputed.

    `judged` are layouts that differ in the micro-batch and in what is recomputed, with whether each fits.
    """
    known = list(judged)
    for one, fits in known:
        if not fits and one.work.recompute == "none" and is_open(one, known):
            found = fewest_stages(one.work, memory)
            if found is not None:
                yield Candidate({**one.changes, "activation_checkpointing": list(found.recompute)}, found)
