"""A step's time: its parts, what communication hides behind computation, and what each stage does when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from parcompile.cost.step import StepTime, forward_share
from parcompile.cost.table import time_bars, time_rows
from parcompile.cost.workload import Workload
from parcompile.layout.groups import Axis
from parcompile.layout.pipeline import Schedule
from parcompile.units import format_seconds

from . import AXIS_OF_GROUP, SMALL, Box, Picture, Sketch, Subject, Text, fitted, text_width
from .svg import COLOURS

ROLES: Mapping[str, str] = COLOURS["time"]
"""Of the parts of a step."""
LEAST_PASS = 5.0
"""Pixels of a pass below which the middle of a step is left out."""


def draw(subject: Subject, width: float) -> Picture:
    """The parts of the step in one bar, communication by group, and the lanes of the stages."""
    found = subject.estimate
    step, work = found.time.step, found.work
    sketch = Sketch(width)
    _parts(sketch, subject)
    _overlap(sketch, subject)
    _lanes(sketch, subject, timetable(work, step))
    low, high = map(format_seconds, found.time.interval_seconds)
    subtitle = (
        f"{format_seconds(step.seconds)}, 90 % interval {low} to {high}; {work.tokens_per_step:,} tokens, "
        f"{found.time.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, MFU {found.time.utilisation:.1%}"
    )
    parts = ", ".join(f"{name} {format_seconds(time)}" for name, time in step.parts.items() if time)
    return sketch.picture("One step", subtitle, f"A step takes {format_seconds(step.seconds)}: {parts}")


def _parts(sketch: Sketch, subject: Subject) -> None:
    step = subject.estimate.time.step
    sketch.caption("Where the time goes", strong=True)
    x, top = 0.0, sketch.y + 6
    for name, time in step.parts.items():
        if time:
            length = sketch.width * time / step.seconds
            text = f"{name}: {format_seconds(time)}, {time / step.seconds:.1%}"
            sketch.add(Box(x, top, length, 26, ROLES[name], text))
            share, ink = f"{time / step.seconds:.0%}", f"on:{ROLES[name]}"
            if length > text_width(share) + 10:
                sketch.add(Text(x + length / 2, top + 17.5, share, SMALL + 1, ink, "middle", strong=True))
            x += length
    sketch.y = top + 30
    sketch.legend([(ROLES[name], f"{name} {format_seconds(time)}") for name, time in step.parts.items() if time])


def _overlap(sketch: Sketch, subject: Subject) -> None:
    """For each group, the traffic that a step waits for and the traffic that computation hides."""
    found = subject.estimate
    times = {one.group: (found.exposed_seconds(one.group), found.hidden_seconds(one.group)) for one in found.traffic}
    times = {group: pair for group, pair in times.items() if sum(pair)}
    if not times:
        return
    sketch.y += 12
    sketch.caption("Communication: exposed (coloured) and overlapped with computation (grey)", strong=True)
    left, right = max(map(text_width, times)) + 10, 128.0 if sketch.narrow else 250.0
    longest = max(map(sum, times.values()))
    top = sketch.y + 4
    for group, (exposed, hidden) in times.items():
        room = (sketch.width - left - right) / longest
        sketch.add(Text(0, top + 14, group))
        sketch.add(Box(left, top + 3, max(exposed * room, 1.5 if exposed else 0), 14, AXIS_OF_GROUP.get(group, group)))
        sketch.add(Box(left + exposed * room, top + 3, hidden * room, 14, "hidden"))
        behind = "" if sketch.narrow else " overlapped"
        text = f"{format_seconds(exposed)} + {format_seconds(hidden)}{behind}" if hidden else format_seconds(exposed)
        text = f"all {format_seconds(hidden)} overlapped" if hidden and not exposed else text
        sketch.add(Text(sketch.width, top + 14, fitted(text, right - 8, SMALL + 1), SMALL + 1, "soft", "end"))
        top += 24
    sketch.y = top


def _lanes(sketch: Sketch, subject: Subject, laid: Timetable) -> None:
    step, work = subject.estimate.time.step, subject.estimate.work
    sketch.y += 12
    name = "1F1B" if work.virtual_stages == 1 else f"interleaved 1F1B, {work.virtual_stages} virtual stages"
    how = f"What a rank does when: {work.micro_batches} micro-batches"
    if work.pp > 1:
        how = f"What each stage does when: {work.micro_batches} micro-batches, {name}, "
        how += f"idle {laid.idle_share:.1%} of the pipeline's time"
    sketch.caption(how, strong=True)
    left = text_width(f"stage {laid.stages - 1}", SMALL) + 10
    room = sketch.width - left
    lane = 22.0 if laid.stages <= 16 else 12.0
    whole = laid.seconds + step.gradients + step.optimizer
    shortest = min(one.stop - one.start for one in laid.passes)
    windows = [(0.0, whole, left, room)]
    if shortest / whole * room < LEAST_PASS:
        # The filling, the steady state and the draining of the pipeline; what lies between is left out.
        third = (room - 60) / 3
        span = shortest * third / LEAST_PASS
        steady = max(laid.resumes - span if laid.left_out else (whole - span) / 2, span)
        starts = (0.0, steady, whole - span)
        windows = [(start, start + span, left + part * (third + 30), third) for part, start in enumerate(starts)]
    top = sketch.y + 6
    for stage in range(laid.stages):
        y = top + stage * lane
        sketch.add(Text(0, y + lane / 2 + 4, f"stage {stage}", SMALL, "soft"))
        for _, _, x, length in windows:
            sketch.add(Box(x, y + 1, length, lane - 3, "bubble"))
    bottom = top + laid.stages * lane
    for window in windows:
        _passes(sketch, laid, window, top, lane)
        _tail(sketch, laid, (step.gradients, step.optimizer), window, (top, laid.stages * lane))
        start, stop, x, length = window
        begins, ends = format_seconds(start) if start else "0 s", format_seconds(stop)
        if text_width(f"{begins}  {ends}", SMALL) < length:
            sketch.add(Text(x, bottom + 13, begins, SMALL, "soft"))
        sketch.add(Text(x + length, bottom + 13, ends, SMALL, "soft", "end"))
    if len(windows) > 1:
        for _, _, x, _ in windows[1:]:
            sketch.add(Text(x - 15, (top + bottom) / 2 + 4, "…", 18, "soft", "middle"))
    sketch.y = bottom + 18
    names = {"forward": "forward", "backward": "backward", "bubble": "idle", Axis.DP: "gradients"}
    sketch.legend([*names.items(), ("optimizer", "optimizer")])
    if len(windows) > 1:
        said = "The step begins and ends; what lies between is more of the same."
        if work.pp > 1:
            said = "The pipeline fills, runs in its steady state, and drains; the steady state is shown in part."
        sketch.caption(said, size=SMALL + 1)
    estimate = step.seconds - step.gradients - step.optimizer
    if abs(laid.seconds - estimate) > 0.005 * estimate:
        taken = f"Laid out pass by pass, these lanes take {format_seconds(laid.seconds)}"
        sketch.caption(f"{taken}; the estimate has {format_seconds(estimate)}.")


def _passes(
    sketch: Sketch, laid: Timetable, window: tuple[float, float, float, float], top: float, lane: float
) -> None:
    start, stop, left, room = window
    scale = room / (stop - start)
    for one in laid.passes:
        later = laid.left_out_seconds if laid.left_out and one.start >= laid.resumes else 0.0
        begin, end = max(one.start + later, start), min(one.stop + later, stop)
        if begin >= end:
            continue
        x, length = left + (begin - start) * scale, (end - begin) * scale
        y = top + one.stage * lane
        role = "forward" if one.forward else "backward"
        chunk = f", chunk {one.chunk}" if one.chunk else ""
        title = f"stage {one.stage}: {role} of micro-batch {one.micro_batch}{chunk}" if not later else ""
        sketch.add(Box(x, y + 1, max(length - 0.6, 0.6), lane - 3, role, title))
        number = str(one.micro_batch)
        if not later and lane > 14 and length > text_width(number, SMALL - 1) + 4:
            sketch.add(Text(x + length / 2 - 0.3, y + lane / 2 + 3.5, number, SMALL - 1, f"on:{role}", "middle"))


def _tail(
    sketch: Sketch,
    laid: Timetable,
    times: tuple[float, float],
    window: tuple[float, float, float, float],
    place: tuple[float, float],
) -> None:
    """Gradients, then the optimizer, over all lanes."""
    start, stop, left, room = window
    scale = room / (stop - start)
    begin = laid.seconds
    for role, title, time in ((Axis.DP, "gradients", times[0]), ("optimizer", "optimizer", times[1])):
        first, last = max(begin, start), min(begin + time, stop)
        if time and first < last:
            length = max((last - first) * scale, 1.5)
            x = min(left + (first - start) * scale, left + room - length)
            sketch.add(Box(x, place[0] + 1, length, place[1] - 3, role, f"{title}: {format_seconds(time)}"))
        begin += time


def lines(subject: Subject, *, unicode: bool = True) -> list[str]:
    """For a terminal: the parts, and the busy time of each stage."""
    step = subject.estimate.time.step
    return [*time_rows(step.parts, step.seconds), "", *time_bars(subject.estimate, unicode=unicode)]


def rows(subject: Subject) -> list[tuple[str, ...]]:
    """As a table."""
    step = subject.estimate.time.step
    parts = [(name, format_seconds(time), f"{time / step.seconds:.1%}") for name, time in step.parts.items() if time]
    return [("part of a step", "time", "share"), *parts, ("all", format_seconds(step.seconds), "100%")]


# When each stage of a pipeline computes what: the schedule of a step (`layout.pipeline`), laid out in seconds.

MOST_PASSES = 6000
"""Passes that are laid out one by one. Between the filling and the draining of the pipeline every micro-batch is like
the one before it, so that further ones lengthen the middle and nothing else."""


class TimedPass(NamedTuple):
    """One forward or backward pass of a micro-batch through a virtual stage, in seconds from the start of the step."""

    stage: int
    forward: bool
    micro_batch: int
    chunk: int
    start: float
    stop: float


class Timetable(NamedTuple):
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
        ahead = forward_share(work.of_stage(stage))
        times.append((seconds * ahead / virtual + hop, seconds * (1 - ahead) / virtual + hop))
    passes = laid_out(replace(work.schedule, micro_batches=laid), [[pair] * virtual for pair in times])
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


def laid_out(schedule: Schedule, times: Sequence[Sequence[tuple[float, float]]]) -> list[TimedPass]:
    """The passes of a schedule, each as soon as its stage is free and its input is there.

    `times` are the seconds of each rank and chunk, forward and backward.
    """
    pp = schedule.pp
    orders = [schedule.passes(rank) for rank in range(pp)]
    done: dict[tuple[bool, int, int], float] = {}
    at, free = [0] * pp, [0.0] * pp
    found: list[TimedPass] = []
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        before = len(found)
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                one = order[at[stage]]
                here = one.chunk * pp + stage
                # The pass of another (global) stage whose end it waits for.
                if one.forward:
                    needs = (True, here - 1, one.micro_batch) if here else None
                else:
                    needs = (here >= schedule.last_stage, min(here + 1, schedule.last_stage), one.micro_batch)
                if needs is not None and needs not in done:
                    break
                start = max(free[stage], done[needs] if needs else 0.0)
                stop = start + times[stage][one.chunk][not one.forward]
                done[one.forward, here, one.micro_batch] = free[stage] = stop
                found.append(TimedPass(stage, one.forward, one.micro_batch, one.chunk, start, stop))
                at[stage] += 1
        assert len(found) > before, "a schedule whose passes wait for each other"
    return found
