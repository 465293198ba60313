"""The learning rate of each step: how it rises, where it stays and how it falls."""

from __future__ import annotations

import itertools

from parcompile.spec import learning_rate, weight_decay_of
from parcompile.spec.values import LrScheduler, Training

from . import Line, Picture, Plot, Sketch, Subject

_POINTS = 240
_SHORTEST = 10
"""Steps that are drawn of a training which does not say how many it has."""


def _of_run(training: Training, steps: int) -> int:
    """The step of the run with which so many of the schedule are done, which are whole batches where these grow."""
    ramp, full = training.rampup_batch_size, training.global_batch_size
    return steps if ramp is None else ramp.steps_until(steps * full, full)


def _end(training: Training, schedule: LrScheduler) -> int | None:
    return training.train_steps if schedule.total_steps is None else _of_run(training, schedule.total_steps)


def _last(training: Training) -> int:
    """The last step that is drawn: the end of the training or of the schedule."""
    schedule = training.lr_scheduler
    warmup, total = (0, None) if schedule is None else (schedule.warmup_steps, _end(training, schedule))
    return max(training.train_steps or 0, total or 0) or max(_SHORTEST, 4 * _of_run(training, warmup))


def _steps(training: Training, most: int) -> list[int]:
    """About so many steps, in order, with the first, the last and those between which the rate is a straight line."""
    last, schedule = _last(training), training.lr_scheduler
    found = {1, last, *(1 + index * (last - 1) // most for index in range(most))}
    if schedule is not None:
        end = _end(training, schedule)
        corners = [
            _of_run(training, schedule.warmup_steps) + 1,
            *([] if end is None else [end, end + 1, end - (schedule.decay_steps or 0)]),
        ]
        found |= {step for step in corners if 1 <= step <= last}
    return sorted(found)


def draw(subject: Subject, width: float) -> Picture:
    """Steps to the right, the rate upwards; a dashed line where the training ends before the schedule."""
    training = subject.plan.spec.training
    last, highest = _last(training), training.optimizer.lr
    sketch = Sketch(width)
    plot = Plot(sketch, 64.0, 180.0, sketch.y + 8, (1, 0.0), (max(1, last - 1), highest))
    for share in (0.0, 0.5, 1.0):
        plot.level(share * highest, f"{share * highest:g}")
    points = [plot.place(step, learning_rate(training, step)) for step in _steps(training, _POINTS)]
    for (x1, y1), (x2, y2) in itertools.pairwise(points):
        sketch.add(Line(x1, y1, x2, y2, "dp", 2))
    ends = training.train_steps
    if ends is not None and ends < last:
        x, _ = plot.place(ends, 0.0)
        sketch.add(Line(x, plot.top, x, plot.top + plot.height, "bad", 2.0, dashed=True))
    for step, anchor in ((1, "start"), (last, "end")):
        plot.mark(step, f"step {step:,}", anchor)
    described = "; ".join(f"step {step}: {rate}" for step, rate, *_ in rows(subject)[1:])
    return sketch.picture("Learning rate", verdict(training), described)


def verdict(training: Training) -> str:
    """The schedule in one sentence, and that of weight decay, where it changes, in another."""
    said, optimizer = _verdict(training), training.optimizer
    if optimizer.start_weight_decay is None:
        return said
    way = f"{optimizer.start_weight_decay:g} to {optimizer.weight_decay:g} ({optimizer.weight_decay_style})"
    return f"{said}. Weight decay goes from {way}"


def _verdict(training: Training) -> str:
    schedule, lr = training.lr_scheduler, training.optimizer.lr
    if schedule is None:
        return f"The rate is {lr:g} in every step"
    end = _end(training, schedule)
    falls = schedule.decay_type or schedule.type
    said = f"{_of_run(training, schedule.warmup_steps):,} steps of warm-up to {lr:g}, then {schedule.type}"
    if schedule.decay_steps is not None:
        said += f" with a fall ({falls}) in the last {schedule.decay_steps:,} steps"
    if schedule.type in ("linear", "cosine", "wsd") and end is not None:
        said += f", down to {schedule.min_lr:g} after step {end:,}"
        if training.train_steps is not None and training.train_steps != end:
            said += f"; the training ends after step {training.train_steps:,}"
    return said


def lines(subject: Subject, *, unicode: bool = True) -> list[str]:  # noqa: ARG001 -- plain anyway
    """For a terminal: the rates of a few steps."""
    shown = rows(subject)
    wide, second = (max(len(row[column]) for row in shown) for column in (0, 1))
    return ["  ".join([f"{row[0]:>{wide}}", f"{row[1]:<{second}}", *row[2:]]).rstrip() for row in shown]


def rows(subject: Subject) -> list[tuple[str, ...]]:
    """As a table: the rates of a few steps, and weight decay where it changes."""
    training = subject.plan.spec.training
    found: list[tuple[str, ...]] = [("step", "rate")]
    found += [(f"{step:,}", f"{learning_rate(training, step):.6g}") for step in _steps(training, 6)]
    if training.optimizer.start_weight_decay is None:
        return found
    decays = [f"{weight_decay_of(training, step):.6g}" for step in _steps(training, 6)]
    return [(*row, decay) for row, decay in zip(found, ["weight decay", *decays], strict=True)]
