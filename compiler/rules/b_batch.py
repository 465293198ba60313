"""The batch triangle: global batch = micro-batch · accumulation steps · dp, without any rounding."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.grid import Axis
from parcompile.spec import Origin
from parcompile.spec.resolve import Resolution

from .arithmetic import divisors, listed, nearest_multiples
from .places import also
from .registry import Finding, rule

_TOTAL = ("training", "global_batch_size")
_MICRO = ("training", "micro_batch_size")
_STEPS = ("training", "gradient_accumulation_steps")


@rule(
    "B001",
    "the global batch does not divide into micro-batches",
    """Every model copy runs the same whole number of micro-batches: global_batch_size = micro_batch_size ·
    gradient_accumulation_steps · dp. DeepSpeed rounds down here and trains on a smaller batch; nothing is rounded in a
    plan.""",
    wrong={"training": {"global_batch_size": 100, "micro_batch_size": 1}},
    right={"training": {"global_batch_size": 96, "micro_batch_size": 1}},
    sources=("Megatron-LM num_microbatches_calculator.py", "DeepSpeed runtime/config.py; DeepSpeed#6914"),
)
def global_batch_divides(spec: Resolution) -> Iterator[Finding]:
    """Fires when the step count (or the micro-batch) that follows is not whole."""
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
    fixes = [
        Fix(f"set global_batch_size to {value}", Safety.CHANGES_NUMERICS, (Edit(_TOTAL, value),)) for value in near
    ]
    if total % dp == 0:
        smaller = [size for size in divisors(total // dp) if size < factor]
        if smaller:
            fixes.insert(0, Fix(f"set {path[1]} to {smaller[-1]}", Safety.CHANGES_COST, (Edit(path, smaller[-1]),)))
    yield Finding(
        f"global_batch_size {total} ≠ {equation}: {total} / {divisor} is not whole; nearest: {listed(near)}",
        _TOTAL,
        help=f"write a multiple of {divisor}",
        fixes=tuple(fixes),
        related=also(spec, path, ("parallelism", "dp")),
    )


@rule(
    "B002",
    "the batch sizes contradict each other",
    """When all three sides of the triangle are given they have to agree: global_batch_size = micro_batch_size ·
    gradient_accumulation_steps · dp.""",
    wrong={"training": {"global_batch_size": 64, "micro_batch_size": 1, "gradient_accumulation_steps": 4}},
    right={"training": {"global_batch_size": 64, "micro_batch_size": 1, "gradient_accumulation_steps": 8}},
    sources=("DeepSpeed runtime/config.py",),
)
def batch_triangle_agrees(spec: Resolution) -> Iterator[Finding]:
    """Fires when global, micro and steps are given and do not multiply up."""
    if not all(spec.given(*path) for path in (_TOTAL, _MICRO, _STEPS)):
        return
    total, micro, steps = (int(spec.get(*path)) for path in (_TOTAL, _MICRO, _STEPS))
    dp = spec.axis(Axis.DP)
    product = micro * steps * dp
    if total == product:
        return
    fixes = [
        Fix(f"set {path[1]} to {total // factor}", Safety.CHANGES_COST, (Edit(path, total // factor),))
        for path, factor in ((_STEPS, micro * dp), (_MICRO, steps * dp))
        if total % factor == 0
    ]
    fixes.append(Fix(f"set global_batch_size to {product}", Safety.CHANGES_NUMERICS, (Edit(_TOTAL, product),)))
    yield Finding(
        f"global_batch_size {total} ≠ micro {micro} × steps {steps} × dp {dp} = {product}",
        _TOTAL,
        help=f"write global_batch_size {product}, or leave out gradient_accumulation_steps",
        fixes=tuple(fixes),
        related=also(spec, _MICRO, _STEPS, ("parallelism", "dp")),
    )


@rule(
    "B003",
    "fewer micro-batches than pipeline stages",
    """A pipeline with fewer micro-batches than stages is never full: some stages idle at every moment. The idle share,
    relative to the ideal time, is (pp − 1) / micro-batches.""",
    wrong={"parallelism": {"pp": 4}, "training": {"global_batch_size": 4, "gradient_accumulation_dtype": "fp32"}},
    right={"parallelism": {"pp": 4}, "training": {"global_batch_size": 64, "gradient_accumulation_dtype": "fp32"}},
    severity=Severity.WARNING,
    sources=("arXiv 2104.04473, section 2.2",),
)
def pipeline_is_filled(spec: Resolution) -> Iterator[Finding]:
    """Fires when gradient_accumulation_steps < pp."""
    pp, steps = spec.axis(Axis.PP), spec.gradient_accumulation_steps
    if steps < pp and pp > 1:
        bubble, equation = _bubble(spec)
        yield Finding(
            f"{steps} micro-batches < pp {pp}: the bubble {equation} is {bubble:.0%} of the ideal",
            ("parallelism", "pp"),
            help=f"use {pp} micro-batches or more: a larger global batch, a smaller micro-batch, or less pp",
            related=also(spec, _TOTAL, _MICRO, _STEPS),
        )


@rule(
    "B004",
    "the pipeline bubble",
    """While a pipeline fills and drains, stages wait: relative to the ideal time (pp − 1) / micro-batches; v virtual
    stages on each rank divide that by v.""",
    wrong={"parallelism": {"pp": 2}, "training": {"gradient_accumulation_dtype": "fp32"}},
    right={"parallelism": {"pp": 1}},
    severity=Severity.INFO,
    sources=("arXiv 2104.04473, section 2.2",),
)
def bubble_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Says the bubble of a pipeline that can be filled."""
    pp, steps = spec.axis(Axis.PP), spec.gradient_accumulation_steps
    if 1 < pp <= steps:
        bubble, equation = _bubble(spec)
        yield Finding(
            f"pipeline bubble {equation} micro-batches = {bubble:.1%} of the ideal time",
            ("parallelism", "pp"),
        )


def _bubble(spec: Resolution) -> tuple[float, str]:
    """The idle share of a pipeline relative to its ideal time, and the equation."""
    pp, steps, virtual = spec.axis(Axis.PP), spec.gradient_accumulation_steps, spec.virtual_stages
    divisor = f"({virtual} virtual · {steps})" if virtual > 1 else f"{steps}"
    return (pp - 1) / (virtual * steps), f"({pp} − 1) / {divisor}"


@rule(
    "B005",
    "a batch size follows from the others",
    """If one of global_batch_size, micro_batch_size and gradient_accumulation_steps is left out, it follows from the
    others. If nothing determines them, micro_batch_size and gradient_accumulation_steps are 1.""",
    wrong={"training": {"global_batch_size": 64, "micro_batch_size": 1}},
    right={"training": {"global_batch_size": 64, "micro_batch_size": 1, "gradient_accumulation_steps": 8}},
    severity=Severity.INFO,
)
def inferred_batch_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Says each size that was not given."""
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
