"""Full recomputation in the first stages alone: in a 1F1B schedule these hold activations of the most micro-batches.

What a stage holds depends on what it recomputes itself. So it is enough to let the fewest of the first stages recompute
with which the layout fits: every further one would only take longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace

from parcompile.cost.coefficients import Fit
from parcompile.cost.footprint import footprint, is_safe
from parcompile.cost.workload import Workload

from .space import Candidate


def first_stages(none: Candidate, memory: Fit | None) -> Candidate | None:
    """A layout that recomputes nothing and does not fit, with the fewest first stages recomputed with which it fits.

    None where all but the last are too few, and with virtual stages, of which every rank has some of the first.
    """
    work = none.work
    if work.pp == 1 or work.virtual_stages > 1:
        return None
    counts = range(1, work.pp)
    index = bisect_left(counts, True, key=lambda count: is_safe(footprint(_recomputed(work, count), memory)))
    if index == len(counts):
        return None
    chosen = _recomputed(work, counts[index])
    assert not isinstance(chosen.recompute, str)
    return Candidate({**none.changes, "activation_checkpointing": list(chosen.recompute)}, chosen)


def _recomputed(work: Workload, stages: int) -> Workload:
    return replace(work, recompute=("full",) * stages + ("none",) * (work.pp - stages))


def between(judged: Iterable[tuple[Candidate, bool]], memory: Fit | None) -> Iterator[Candidate]:
    """The layouts between those that recompute nothing and do not fit, and those that recompute all and do.

    `judged` are layouts that differ in the micro-batch and in what is recomputed, with whether each fits.
    """
    known = list(judged)
    safe = {one.work.micro_batch for one, fits in known if fits and one.work.recompute == "full"}
    for one, fits in known:
        if not fits and one.work.recompute == "none" and one.work.micro_batch in safe:
            found = first_stages(one, memory)
            if found is not None:
                yield found
