"""What rules read of batches that grow, schedules, optimizers and biases of routers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parcompile.layout.groups import Axis, divisors
from parcompile.model.blocks.experts import router_biases
from parcompile.model.derived_rows import parameter_table
from parcompile.rules import listed
from parcompile.spec import OPTIMIZER_KEYS
from parcompile.spec.rampup import RampupBatchSize
from parcompile.spec.resolve import Resolution
from parcompile.spec.resolve.training import WARMUP_UNITS


def wrong_groups(spec: Resolution, steps: int | None = None) -> str | None:
    """Why so many micro-batches do not go through a pipeline in groups; None: they do, or there are no groups."""
    group, pp = spec.microbatch_group_size, spec.axis(Axis.PP)
    if group is None or pp == 1:
        return None
    steps = steps or spec.gradient_accumulation_steps
    if not pp <= group <= steps:
        return f"groups of {group} micro-batches: {group} is not between pp {pp} and the {steps} micro-batches"
    rest = steps % group
    if 0 < rest < pp:
        return f"{steps} micro-batches in groups of {group}: {steps} % {group} = {rest} is neither 0 nor pp {pp}"
    return None


def near_groups(spec: Resolution) -> list[int]:
    """Every divisor of the micro-batches that is no smaller than pp makes whole groups: the two that are next."""
    group, sizes = spec.microbatch_group_size or 0, divisors(spec.gradient_accumulation_steps)
    return sorted((one for one in sizes if one >= spec.axis(Axis.PP)), key=lambda one: (abs(one - group), one))[:2]


def whole_ramp(spec: Resolution) -> RampupBatchSize | None:
    """How the batch grows, where that is in whole increments."""
    ramp = spec.rampup_batch_size
    return ramp if ramp is not None and ramp.fits(spec.global_batch_size) else None


def end_of_warmup(spec: Resolution) -> int | None:
    """The step of a batch that grows after which the warm-up of the schedule is over."""
    ramp, schedule, full = whole_ramp(spec), spec.lr_scheduler, spec.global_batch_size
    return None if ramp is None or schedule is None else ramp.steps_until(schedule.warmup_steps * full, full)


def increments(spec: Resolution) -> str:
    """Increments with which a batch grows in whole steps."""
    every = divisors(spec.global_batch_size - (0 if spec.rampup_batch_size is None else spec.rampup_batch_size.start))
    whole = [one for one in every if one % (spec.micro_batch_size * spec.axis(Axis.DP)) == 0]
    return listed((whole or every)[:3])


def wrong_batch(spec: Resolution) -> tuple[str, str] | None:
    """What is wrong with the first batch of a ramp that ranks or pipelines cannot share, and what to write."""
    ramp, micro, dp = whole_ramp(spec), spec.micro_batch_size, spec.axis(Axis.DP)
    for _, samples, batch in ramp.sizes(spec.global_batch_size) if ramp else ():
        where = f"from sample {samples:,} on the batch is {batch}"
        if batch % (micro * dp):
            message = f"{where}: {batch} / (micro {micro} · dp {dp}) = {batch} / {micro * dp} is not whole"
            return message, f"write a start and an increment that are multiples of {micro * dp}"
        if (wrong := wrong_groups(spec, batch // (micro * dp))) is not None:
            whole = micro * dp * (spec.microbatch_group_size or 1)
            return f"{where}: {wrong}", f"use a start and an increment that are multiples of {whole}"
    return None


class _End(NamedTuple):
    """Where a schedule ends, as it counts steps, and what says so; and its warm-up, as it is given."""

    steps: int | None
    place: str
    said: str
    key: str
    warmup: str

    @property
    def shorter(self) -> int:
        """Steps of a warm-up that is over by then: DeepSpeed has two or more."""
        return max(2, (self.steps or 0) // 10)


def end_of_schedule(spec: Resolution) -> _End | None:
    """Where the schedule ends; None without one."""
    schedule, path = spec.lr_scheduler, ("training", "lr_scheduler")
    if schedule is None:
        return None
    steps, counted = schedule.end(spec.get("training", "train_steps")), schedule.total_steps is None
    place = "training.train_steps" if counted else "training.lr_scheduler.total_steps"
    full, said = spec.global_batch_size, f"{place.rpartition('.')[2]} {steps}"
    if (ramp := whole_ramp(spec)) is not None and steps is not None and counted:
        steps = ramp.samples_after(steps, full) // full  # as the schedule counts them
        said = f"the {steps} global batches of {said}"
    key = next((key for unit in WARMUP_UNITS if spec.given(*path, key := f"warmup_{unit}")), "warmup_steps")
    return _End(steps, place, said, key, "" if key == "warmup_steps" else f"{key} {spec.get(*path, key)}: ")


def settings_of_others(spec: Resolution) -> Iterator[tuple[str, str]]:
    """Settings that are given and that the optimizer does not have, with those that have them."""
    known = OPTIMIZER_KEYS[str(spec.get("training", "optimizer", "type"))]
    for key in dict.fromkeys(key for keys in OPTIMIZER_KEYS.values() for key in keys):
        if key not in known and spec.given("training", "optimizer", key):
            yield key, ", ".join(name for name, keys in OPTIMIZER_KEYS.items() if key in keys)


def sharded_biases(spec: Resolution) -> Iterator[str]:
    """Biases of routers that are parameters and that a plan moves, where ZeRO shards parameters."""
    if spec.zero_stage == 3 and spec.given("training", "router", "bias_update_rate"):
        yield from router_biases(row.name for row in parameter_table(spec.shape))
