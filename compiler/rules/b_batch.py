"""Batches: global batch = micro-batch · accumulation steps · dp without rounding, virtual stages, evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.groups import Axis, divisors
from parcompile.spec import Origin
from parcompile.spec.rampup import MOST_INCREMENTS
from parcompile.spec.resolve import Resolution

from . import Finding, also, listed, nearest_multiples, removable, rule

# The batch triangle: global batch = micro-batch · accumulation steps · dp, without any rounding.

_TOTAL = ("training", "global_batch_size")
_MICRO = ("training", "micro_batch_size")
_STEPS = ("training", "gradient_accumulation_steps")
_PP = ("parallelism", "pp")


@rule("B001")
def global_batch_divides(spec: Resolution) -> Iterator[Finding]:
    if not spec.given(*_TOTAL) or (spec.given(*_MICRO) and spec.given(*_STEPS)):
        return
    total, dp = int(spec.get(*_TOTAL)), spec.axis(Axis.DP)
    if spec.given(*_STEPS):
        steps = spec.gradient_accumulation_steps
        path, factor, divisor, equation = _STEPS, steps, steps * dp, f"micro × steps {steps} × dp {dp}"
    else:
        micro = spec.micro_batch_size
        path, factor, divisor, equation = _MICRO, micro, micro * dp, f"micro {micro} × steps × dp {dp}"
    if total % divisor == 0:
        return
    near = nearest_multiples(total, divisor)
    fixes = [Fix.setting(_TOTAL, value, Safety.CHANGES_NUMERICS) for value in near]
    if total % dp == 0:
        smaller = [size for size in divisors(total // dp) if size < factor]
        if smaller:
            fixes.insert(0, Fix.setting(path, smaller[-1], Safety.CHANGES_COST))
    yield Finding(
        f"global_batch_size {total} ≠ {equation}: {total} / {divisor} is not whole; nearest: {listed(near)}",
        _TOTAL,
        help=f"write a multiple of {divisor}",
        fixes=tuple(fixes),
        related=also(spec, path, ("parallelism", "dp")),
    )


@rule("B005", severity=Severity.INFO)
def inferred_batch_is_shown(spec: Resolution) -> Iterator[Finding]:
    sizes = (
        (_TOTAL, spec.global_batch_size),
        (_MICRO, spec.micro_batch_size),
        (_STEPS, spec.gradient_accumulation_steps),
    )
    for path, size in sizes:
        if not spec.given(*path):
            found = spec.provenance[".".join(path)]
            how = found.detail if found.origin is Origin.DERIVED else "the default"
            yield Finding(f"{path[1]} = {size}: {how}", path)


# The interleaved schedule: micro-batches go through a pipeline with virtual stages in groups.

_GROUP = ("parallelism", "microbatch_group_size_per_virtual_pipeline_stage")
_VIRTUAL = ("parallelism", "num_virtual_stages_per_pipeline_rank")


@rule("B006")
def groups_of_micro_batches_divide(spec: Resolution) -> Iterator[Finding]:
    group, pp, steps = spec.microbatch_group_size, spec.axis(Axis.PP), spec.gradient_accumulation_steps
    if group is None or pp == 1:
        return
    if (message := _wrong_groups(group, pp, steps)) is None:
        return
    # Every divisor of the micro-batches that is no smaller than pp makes whole groups.
    near = sorted((size for size in divisors(steps) if size >= pp), key=lambda size: (abs(size - group), size))[:2]
    fixes = [Fix.setting(_GROUP, size, Safety.CHANGES_COST) for size in near]
    fixes += _other_batches(spec)
    without = tuple(Edit(path, remove=True) for path in (_VIRTUAL, _GROUP) if spec.given(*path))
    fixes.append(Fix(f"remove {_VIRTUAL[-1]}", Safety.CHANGES_COST, without))
    yield Finding(
        message + (f"; nearest: {listed(near)}" if near else ""),
        _GROUP if spec.given(*_GROUP) else _VIRTUAL,
        help=f"use a number of micro-batches that is a multiple of pp {pp}, or another group",
        fixes=tuple(fixes),
        related=also(spec, _PP, _TOTAL, _STEPS),
    )


def _wrong_groups(group: int, pp: int, steps: int) -> str | None:
    """Why so many micro-batches do not go through a pipeline in groups; None: they do."""
    if not pp <= group <= steps:
        return f"groups of {group} micro-batches: {group} is not between pp {pp} and the {steps} micro-batches"
    rest = steps % group
    if 0 < rest < pp:
        return f"{steps} micro-batches in groups of {group}: {steps} % {group} = {rest} is neither 0 nor pp {pp}"
    return None


def _other_batches(spec: Resolution) -> list[Fix]:
    if not spec.given(*_TOTAL) or spec.given(*_STEPS):
        return []
    whole = spec.axis(Axis.PP) * spec.micro_batch_size * spec.axis(Axis.DP)
    near = [value for value in nearest_multiples(spec.global_batch_size, whole) if value != spec.global_batch_size]
    return [Fix.setting(_TOTAL, value, Safety.CHANGES_NUMERICS) for value in near]


# Batches of evaluation.

_EVAL_TOTAL = ("training", "eval_global_batch_size")
_EVAL_MICRO = ("training", "eval_micro_batch_size")


@rule("B008")
def evaluation_batch_divides(spec: Resolution) -> Iterator[Finding]:
    given = [path for path in (_EVAL_TOTAL, _EVAL_MICRO) if spec.given(*path)]
    if not given:
        return
    total = spec.eval_batch("global_batch_size", spec.global_batch_size)
    micro, dp = spec.eval_batch("micro_batch_size", spec.micro_batch_size), spec.axis(Axis.DP)
    if total % (micro * dp) == 0:
        return
    near = nearest_multiples(total, micro * dp)
    yield Finding(
        f"eval_global_batch_size {total} / (eval_micro_batch_size {micro} · dp {dp}) = {total} / {micro * dp} is not "
        f"whole; nearest: {listed(near)}",
        given[0],
        help=f"write a multiple of {micro * dp}",
        fixes=(
            *(Fix.setting(_EVAL_TOTAL, value, Safety.CHANGES_COST) for value in near),
            Fix("remove both", Safety.CHANGES_COST, tuple(Edit(path, remove=True) for path in given)),
        ),
        related=also(spec, *given[1:], ("training", "global_batch_size"), ("parallelism", "dp")),
    )


# A batch that grows.

_RAMP = ("training", "rampup_batch_size")


@rule("B010")
def batch_grows_in_whole_steps(spec: Resolution) -> Iterator[Finding]:
    if (ramp := spec.rampup_batch_size) is None:
        return
    full, near = spec.global_batch_size, also(spec, _TOTAL, _MICRO, ("parallelism", "dp"))
    way = full - ramp.start
    if not ramp.fits(full):
        equation = f"(global_batch_size {full} − start {ramp.start}) / increment {ramp.increment}"
        if way <= 0:
            message, path = f"start {ramp.start} ≥ global_batch_size {full}: the batch does not grow", "start"
            instead = f"use a start below {full}, or remove rampup_batch_size"
        elif way % ramp.increment:
            message, path = f"{equation} = {way} / {ramp.increment} is not whole", "increment"
            whole = [one for one in divisors(way) if one % (spec.micro_batch_size * spec.axis(Axis.DP)) == 0]
            instead = f"use an increment that divides {way}, such as {listed((whole or divisors(way))[:3])}"
        else:
            message = f"{equation} = {way // ramp.increment:,} increments are more than {MOST_INCREMENTS:,}"
            path, instead = "increment", f"use an increment of {-(-way // MOST_INCREMENTS):,} or more"
        removal = Fix.removing(_RAMP, Safety.CHANGES_NUMERICS)
        yield Finding(message, (*_RAMP, path), help=instead, fixes=(removal,), related=near)
        return
    micro, dp, pp = spec.micro_batch_size, spec.axis(Axis.DP), spec.axis(Axis.PP)
    group = spec.microbatch_group_size if pp > 1 else None
    for _, samples, batch in ramp.sizes(full):
        where = f"from sample {samples:,} on the batch is {batch}"
        if batch % (micro * dp):
            message = f"{where}: {batch} / (micro {micro} · dp {dp}) = {batch} / {micro * dp} is not whole"
            instead = f"write a start and an increment that are multiples of {micro * dp}"
        elif group is not None and (wrong := _wrong_groups(group, pp, batch // (micro * dp))) is not None:
            message = f"{where}: {wrong}"
            instead = f"use a start and an increment that are multiples of {micro * dp * group}"
        else:
            continue
        yield removable(_RAMP, message, instead, near, Safety.CHANGES_NUMERICS)
        return


@rule("B011", severity=Severity.INFO)
def ramp_is_shown(spec: Resolution) -> Iterator[Finding]:
    ramp, full = spec.rampup_batch_size, spec.global_batch_size
    if ramp is None or not ramp.fits(full):
        return
    steps, samples, _ = ramp.sizes(full)[-1]
    yield Finding(
        f"the batch grows from {ramp.start} to {full} sequences in {steps:,} steps, which take {samples:,} samples; "
        f"estimates, search and preflight are of the step with {full}",
        _RAMP,
    )
    if (schedule := spec.lr_scheduler) is not None:
        warmup = schedule.warmup_steps * full
        last = f": warmup_steps {schedule.warmup_steps} are over after step {ramp.steps_until(warmup, full):,}"
        yield Finding(
            f"a step of lr_scheduler is {full} samples where the batch grows{last if warmup else ''}",
            ("training", "lr_scheduler"),
            related=also(spec, _RAMP),
        )
