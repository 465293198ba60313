"""When each stage of a pipeline computes what: the schedule of a step (`layout.pipeline`), laid out in seconds.

The order of a stage's passes is fixed; each starts when the stage is free and what it needs has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parcompile.layout.pipeline import Pass, Schedule

from .step import StepTime
from .workload import Workload

MOST_PASSES = 6000
"""Passes that are laid out one by one. Between the filling and the draining of the pipeline every micro-batch is like
the one before it, so that further ones lengthen the middle and nothing else."""


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One forward or backward pass of a micro-batch through a virtual stage, in seconds from the start of the step."""

    stage: int
    forward: bool
    micro_batch: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """The passes of a step.

    `left_out` micro-batches of the middle are not laid out: what comes after `resumes` happens `left_out_seconds`
    later than it says. Gradients and the optimizer follow at `seconds`. `idle_share` is the part of all stages' time in
    which they compute nothing: the bubble, and what imbalance costs.
    """

    passes: tuple[TimedPass, ...]
    stages: int
    seconds: float
    idle_share: float
    left_out: int = 0
    left_out_seconds: float = 0.0
    resumes: float = 0.0


def timetable(work: Workload, step: StepTime) -> Timetable:
    """The schedule of a step whose stages take the time of `step`; what stages exchange comes before each pass."""
    pp, virtual, group = work.pp, work.virtual_stages, work.schedule.group_size
    laid = work.micro_batches
    if laid * pp * virtual * 2 > MOST_PASSES:
        fewer = max(4 * pp, MOST_PASSES // (2 * pp * virtual))
        laid = min(laid, fewer + (laid - fewer) % group)
    hop = step.exchange / (2 * virtual * (work.micro_batches + pp - 1))
    times = []
    for stage, seconds in zip(work.stages, step.stages, strict=True):
        ahead = 1 / 4 if work.of_stage(stage).recomputes_layers else 1 / 3
        times.append((seconds * ahead / virtual + hop, seconds * (1 - ahead) / virtual + hop))
    passes = _laid_out(times, replace(work.schedule, micro_batches=laid))
    seconds = max(one.stop for one in passes)
    left_out = work.micro_batches - laid
    longer = left_out * max(sum(pair) for pair in times) * virtual
    busy = work.micro_batches * virtual * sum(map(sum, times))
    return Timetable(
        passes=tuple(passes),
        stages=pp,
        seconds=seconds + longer,
        idle_share=1 - busy / ((seconds + longer) * pp),
        left_out=left_out,
        left_out_seconds=longer,
        resumes=seconds / 2 if left_out else 0.0,
    )


def _laid_out(times: Sequence[tuple[float, float]], schedule: Schedule) -> list[TimedPass]:
    pp = schedule.pp
    orders = [schedule.passes(rank) for rank in range(pp)]
    done: dict[tuple[bool, int, int], float] = {}
    at, free = [0] * pp, [0.0] * pp
    found: list[TimedPass] = []
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                one = order[at[stage]]
                here = one.chunk * pp + stage
                needs = _needs(one, here, schedule.last_stage)
                if needs is not None and needs not in done:
                    break
                start = max(free[stage], done[needs] if needs else 0.0)
                stop = start + times[stage][not one.forward]
                done[one.forward, here, one.micro_batch] = free[stage] = stop
                found.append(TimedPass(stage, one.forward, one.micro_batch, one.chunk, start, stop))
                at[stage] += 1
                moved = True
        assert moved, "a schedule whose passes wait for each other"
    return found


def _needs(one: Pass, stage: int, last: int) -> tuple[bool, int, int] | None:
    """The pass of another (global) stage whose end a pass waits for, as (forward, stage, micro-batch)."""
    if one.forward:
        return (True, stage - 1, one.micro_batch) if stage else None
    return (False, stage + 1, one.micro_batch) if stage < last else (True, stage, one.micro_batch)
