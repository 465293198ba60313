"""The batch triangle: global batch = micro-batch · accumulation steps · dp, without any rounding."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Related, Safety
from parcompile.resolve import Resolution

from .arithmetic import listed, nearest_multiples
from .registry import Finding, rule

_TOTAL = ("training", "global_batch_size")


@rule(
    "B001",
    "the global batch does not divide into micro-batches",
    """Every model copy runs the same whole number of micro-batches: global_batch_size = micro_batch_size · gradient_accumulation_steps · dp.
    DeepSpeed rounds down here and trains on a smaller batch; nothing is rounded in a plan.""",
    sources=("Megatron-LM num_microbatches_calculator.py", "DeepSpeed runtime/config.py; DeepSpeed#6914"),
)
def global_batch_divides(spec: Resolution) -> Iterator[Finding]:
    """Fires when the step count (or the micro-batch) that follows is not whole."""
    if not spec.given(*_TOTAL):
        return
    total, dp = int(spec.get(*_TOTAL)), spec.axis("dp")
    micro_given = spec.given("training", "micro_batch_size")
    steps_given = spec.given("training", "gradient_accumulation_steps")
    if micro_given and steps_given:
        return
    if steps_given:
        steps = spec.gradient_accumulation_steps
        divisor, terms, unknown = steps * dp, f"gradient_accumulation_steps {steps} · dp {dp}", "micro"
    else:
        micro = spec.micro_batch_size
        divisor, terms, unknown = micro * dp, f"micro {micro} · dp {dp}", "steps"
    if total % divisor == 0:
        return
    near = nearest_multiples(total, divisor)
    yield Finding(
        f"global_batch_size {total} ≠ {terms} · {unknown}: {total} / {divisor} is not whole; nearest: {listed(near)}",
        _TOTAL,
        help=f"write a multiple of {divisor}",
        fixes=tuple(
            Fix(f"set global_batch_size to {value}", Safety.CHANGES_NUMERICS, (Edit(_TOTAL, value),)) for value in near
        ),
    )


@rule(
    "B002",
    "the batch sizes contradict each other",
    """When all three sides of the triangle are given they have to agree: global_batch_size = micro_batch_size ·
    gradient_accumulation_steps · dp.""",
    sources=("DeepSpeed runtime/config.py",),
)
def batch_triangle_agrees(spec: Resolution) -> Iterator[Finding]:
    """Fires when global, micro and steps are given and do not multiply up."""
    names = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    if not all(spec.given("training", name) for name in names):
        return
    total, micro, steps = (int(spec.get("training", name)) for name in names)
    dp = spec.axis("dp")
    product = micro * steps * dp
    if total != product:
        yield Finding(
            f"global_batch_size {total} ≠ micro {micro} · steps {steps} · dp {dp} = {product}",
            _TOTAL,
            help=f"write global_batch_size {product}, or leave out gradient_accumulation_steps",
            fixes=(Fix(f"set global_batch_size to {product}", Safety.CHANGES_NUMERICS, (Edit(_TOTAL, product),)),),
            related=tuple(
                Related(f"{name} is set here", ("training", name))
                for name in ("micro_batch_size", "gradient_accumulation_steps")
            ),
        )
