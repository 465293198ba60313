"""Full recomputation in the first stages alone: in a 1F1B schedule these hold activations of the most micro-batches.

What a stage holds depends on what it recomputes itself. So it is enough to let the fewest of the first stages recompute
with which the layout fits: every further one would only take longer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from .coefficients import Fit
from .footprint import footprint, is_safe
from .workload import Workload


def fewest_stages(work: Workload, memory: Fit | None = None) -> Workload | None:
    """The layout with the fewest first stages recomputed, and nothing else, with which it fits.

    None where all but the last are too few, and where only one word can be said for all: with one stage, and with
    virtual stages, of which every rank has some of the first.
    """
    if work.pp == 1 or work.virtual_stages > 1:
        return None
    counts = range(1, work.pp)
    index = bisect_left(
        counts, True, key=lambda count: is_safe(footprint(_recomputed(work, count), memory, fullest=True))
    )
    return None if index == len(counts) else _recomputed(work, counts[index])


def _recomputed(work: Workload, stages: int) -> Workload:
    return replace(work, recompute=("full",) * stages + ("none",) * (work.pp - stages))
