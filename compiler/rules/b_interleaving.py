"""The interleaved schedule: micro-batches go through a pipeline with virtual stages in groups."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.grid import Axis
from parcompile.spec.resolve import Resolution

from .arithmetic import divisors, listed, nearest_multiples
from .places import also
from .registry import Finding, rule

_GROUP = ("parallelism", "microbatch_group_size_per_virtual_pipeline_stage")
_VIRTUAL = ("parallelism", "num_virtual_stages_per_pipeline_rank")
_PP = ("parallelism", "pp")
_TOTAL = ("training", "global_batch_size")
_INTERLEAVED = {"pp": 4, "num_virtual_stages_per_pipeline_rank": 2}
_FP32_SUMS = {"gradient_accumulation_dtype": "fp32"}


@rule(
    "B006",
    "the micro-batches do not divide into groups",
    """With virtual stages a rank runs a group of N consecutive micro-batches (pp unless
    microbatch_group_size_per_virtual_pipeline_stage is given) on one virtual stage before it goes to the next. N is at
    least pp and at most the number of micro-batches, and the last group is either whole or has pp micro-batches or
    more: micro-batches % N is 0 or at least pp.""",
    wrong={"parallelism": _INTERLEAVED, "training": {"global_batch_size": 12, **_FP32_SUMS}},
    right={"parallelism": _INTERLEAVED, "training": {"global_batch_size": 16, **_FP32_SUMS}},
    sources=("Megatron-Core pipeline_parallel/schedules.py",),
)
def groups_of_micro_batches_divide(spec: Resolution) -> Iterator[Finding]:
    """Fires when N is outside [pp, micro-batches], or the last group is too small."""
    group, pp, steps = spec.microbatch_group_size, spec.axis(Axis.PP), spec.gradient_accumulation_steps
    if group is None or pp == 1:
        return
    rest = steps % group
    if pp <= group <= steps and not 0 < rest < pp:
        return
    if not pp <= group <= steps:
        message = f"groups of {group} micro-batches: {group} is not between pp {pp} and the {steps} micro-batches"
    else:
        message = f"{steps} micro-batches in groups of {group}: {steps} % {group} = {rest} is neither 0 nor pp {pp}"
    # Every divisor of the micro-batches that is no smaller than pp makes whole groups.
    near = sorted((size for size in divisors(steps) if size >= pp), key=lambda size: (abs(size - group), size))[:2]
    fixes = [Fix(f"set {_GROUP[-1]} to {size}", Safety.CHANGES_COST, (Edit(_GROUP, size),)) for size in near]
    fixes += _other_batches(spec)
    fixes.append(Fix(f"remove {_VIRTUAL[-1]}", Safety.CHANGES_COST, _without(spec)))
    yield Finding(
        message + (f"; nearest: {listed(near)}" if near else ""),
        _GROUP if spec.given(*_GROUP) else _VIRTUAL,
        help=f"use a number of micro-batches that is a multiple of pp {pp}, or another group",
        fixes=tuple(fixes),
        related=also(spec, _PP, _TOTAL, ("training", "gradient_accumulation_steps")),
    )


def _other_batches(spec: Resolution) -> list[Fix]:
    if not spec.given(*_TOTAL) or spec.given("training", "gradient_accumulation_steps"):
        return []
    whole = spec.axis(Axis.PP) * spec.micro_batch_size * spec.axis(Axis.DP)
    near = [value for value in nearest_multiples(spec.global_batch_size, whole) if value != spec.global_batch_size]
    return [Fix(f"set global_batch_size to {value}", Safety.CHANGES_NUMERICS, (Edit(_TOTAL, value),)) for value in near]


def _without(spec: Resolution) -> tuple[Edit, ...]:
    return tuple(Edit(path, remove=True) for path in (_VIRTUAL, _GROUP) if spec.given(*path))


@rule(
    "B007",
    "a group of micro-batches without virtual stages",
    """microbatch_group_size_per_virtual_pipeline_stage concerns the interleaved schedule, which has virtual stages.""",
    wrong={"parallelism": {"microbatch_group_size_per_virtual_pipeline_stage": 8}},
    right={
        "parallelism": {**_INTERLEAVED, "microbatch_group_size_per_virtual_pipeline_stage": 8},
        "training": _FP32_SUMS,
    },
    severity=Severity.WARNING,
    sources=("Megatron-Core model_parallel_config.py",),
)
def group_has_an_effect(spec: Resolution) -> Iterator[Finding]:
    """Fires for the key without virtual stages."""
    if spec.given(*_GROUP) and spec.virtual_stages == 1:
        yield Finding(
            f"{_GROUP[-1]} has no effect with {_VIRTUAL[-1]} 1",
            _GROUP,
            help=f"remove it, or set {_VIRTUAL[-1]}",
            fixes=(Fix(f"remove {_GROUP[-1]}", Safety.SAFE, (Edit(_GROUP, remove=True),)),),
            related=also(spec, _VIRTUAL),
        )
