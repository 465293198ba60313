"""Layouts between those that recompute nothing and those that recompute everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parcompile.cost.coefficients import Fit
from parcompile.cost.recomputation import fewest_stages

from .space import Candidate


def between(judged: Iterable[tuple[Candidate, bool]], memory: Fit | None) -> Iterator[Candidate]:
    """Of layouts that recompute nothing and do not fit, and all and do: those with the fewest first stages recomputed.

    `judged` are layouts that differ in the micro-batch and in what is recomputed, with whether each fits.
    """
    known = list(judged)
    safe = {one.work.micro_batch for one, fits in known if fits and one.work.recompute == "full"}
    for one, fits in known:
        if not fits and one.work.recompute == "none" and one.work.micro_batch in safe:
            found = fewest_stages(one.work, memory)
            if found is not None:
                yield Candidate({**one.changes, "activation_checkpointing": list(found.recompute)}, found)
