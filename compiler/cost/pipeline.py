"""When each stage of a pipeline computes what: the schedule of a step, laid out in seconds.

1F1B (arXiv 2104.04473, section 2.2), interleaved where a rank holds several virtual stages. The order of a stage's
passes is fixed; each starts when the stage is free and what it needs has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .step import StepTime
from .workload import Workload

MOST_PASSES = 6000
"""Passes that are laid out one by one. Between the filling and the draining of the pipeline every micro-batch is like
the one before it, so that further ones lengthen the middle and nothing else."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward pass of a micro-batch through a virtual stage, in seconds from the start of the step."""

    stage: int
    forward: bool
    micro_batch: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """The passes of a step.

    `left_out` micro-batches of the middle are not laid out: what comes after `resumes` happens `left_out_seconds`
    later than it says. Gradients and the optimizer follow at `seconds`. `idle_share` is the part of all stages' time in
    which they compute nothing: the bubble, and what imbalance costs.
    """

    passes: tuple[Pass, ...]
    stages: int
    seconds: float
    idle_share: float
    left_out: int = 0
    left_out_seconds: float = 0.0
    resumes: float = 0.0


def stage_order(pp: int, virtual: int, micro_batches: int, stage: int, group: int) -> list[tuple[bool, int, int]]:
    """The passes of one stage in their order, as (forward, micro-batch, chunk).

    `group` micro-batches go through one chunk before the next one is taken up; it is pp in Megatron-LM unless
    `microbatch_group_size_per_virtual_pipeline_stage` says otherwise.
    """
    if virtual == 1:
        ahead = [(micro, 0) for micro in range(micro_batches)]
        back, held = ahead, min(pp - stage - 1, micro_batches)
    else:
        starts = range(0, micro_batches, group)
        ahead, back = (
            [
                (micro, chunk)
                for start in starts
                for chunk in chunks
                for micro in range(start, min(start + group, micro_batches))
            ]
            for chunks in (range(virtual), range(virtual - 1, -1, -1))
        )
        held = min((pp - stage - 1) * 2 + (virtual - 1) * group, len(ahead))
    forward, backward = [(True, *one) for one in ahead], [(False, *one) for one in back]
    steady = [one for pair in zip(forward[held:], backward, strict=False) for one in pair]
    return [*forward[:held], *steady, *backward[len(forward) - held :]]


def schedule(work: Workload, step: StepTime, group: int | None = None) -> Schedule:
    """The schedule of a step whose stages take the time of `step`; what stages exchange comes before each pass."""
    pp, virtual, group = work.pp, work.virtual_stages, group or work.pp
    laid = work.micro_batches
    if laid * pp * virtual * 2 > MOST_PASSES:
        fewer = max(4 * pp, MOST_PASSES // (2 * pp * virtual))
        laid = min(laid, fewer + (laid - fewer) % group)
    hop = step.exchange / (2 * virtual * (work.micro_batches + pp - 1))
    ahead = 1 / 4 if work.recompute == "full" else 1 / 3
    times = [(seconds * ahead / virtual + hop, seconds * (1 - ahead) / virtual + hop) for seconds in step.stages]
    passes = _laid_out(times, [stage_order(pp, virtual, laid, stage, group) for stage in range(pp)], virtual)
    seconds = max(one.stop for one in passes)
    left_out = work.micro_batches - laid
    longer = left_out * max(sum(pair) for pair in times) * virtual
    busy = work.micro_batches * virtual * sum(map(sum, times))
    return Schedule(
        passes=tuple(passes),
        stages=pp,
        seconds=seconds + longer,
        idle_share=1 - busy / ((seconds + longer) * pp),
        left_out=left_out,
        left_out_seconds=longer,
        resumes=seconds / 2 if left_out else 0.0,
    )


def _laid_out(
    times: Sequence[tuple[float, float]], orders: Sequence[Sequence[tuple[bool, int, int]]], virtual: int
) -> list[Pass]:
    pp = len(times)
    last = pp * virtual - 1
    done: dict[tuple[bool, int, int], float] = {}
    at, free = [0] * pp, [0.0] * pp
    found: list[Pass] = []
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                forward, micro, chunk = order[at[stage]]
                here = chunk * pp + stage
                if forward:
                    needs = (True, here - 1, micro) if here else None
                else:
                    needs = (False, here + 1, micro) if here < last else (True, here, micro)
                if needs is not None and needs not in done:
                    break
                start = max(free[stage], done[needs] if needs else 0.0)
                stop = start + times[stage][not forward]
                done[forward, here, micro] = free[stage] = stop
                found.append(Pass(stage, forward, micro, chunk, start, stop))
                at[stage] += 1
                moved = True
        assert moved, "a schedule whose passes wait for each other"
    return found
