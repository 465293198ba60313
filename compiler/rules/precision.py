"""Precision and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.resolve import Resolution
from parcompile.spec import Precision

from .registry import Finding, rule


@rule(
    "P003",
    "loss scaling without fp16",
    """Only fp16 needs its loss scaled: fp32 and bf16 have the range. DeepSpeed refuses the key in its bf16 section.""",
    sources=("DeepSpeed runtime/precision_config.py",),
)
def loss_scale_needs_fp16(spec: Resolution) -> Iterator[Finding]:
    """Fires when a loss scale is given with another precision."""
    path = ("training", "loss_scale")
    if spec.given(*path) and spec.precision is not Precision.FP16:
        yield Finding(
            f"loss_scale {spec.get(*path)} with precision {spec.precision.value}: only fp16 is scaled",
            path,
            help="remove loss_scale, or set precision to fp16",
            fixes=(Fix("remove loss_scale", Safety.SAFE, (Edit(path, remove=True),)),),
        )


@rule(
    "P001",
    "gradients are summed in a narrower type than they have",
    """Gradients are summed over micro-batches in the type of the weights or in fp32; a narrower or merely different 16-bit type loses
    what the weights' type keeps.""",
)
def accumulation_is_not_narrower(spec: Resolution) -> Iterator[Finding]:
    """Fires when gradient_accumulation_dtype is neither fp32 nor the precision."""
    path = ("training", "gradient_accumulation_dtype")
    sums, weights = spec.gradient_accumulation_dtype, spec.precision
    if sums not in (Precision.FP32, weights):
        yield Finding(
            f"gradient_accumulation_dtype {sums.value} with precision {weights.value}",
            path,
            help=f"write {weights.value} or fp32",
        )


@rule(
    "P002",
    "fp32 accumulation keeps a whole fp32 gradient on every rank",
    """With bf16 weights, ZeRO-1 and fp32 accumulation DeepSpeed uses its BF16_Optimizer, which holds an unpartitioned fp32 gradient: 4 bytes
    more for each parameter of the rank.""",
    severity=Severity.INFO,
    sources=("DeepSpeed runtime/bf16_optimizer.py",),
    targets=("deepspeed",),
)
def fp32_accumulation_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Says what fp32 accumulation costs."""
    if spec.precision is Precision.BF16 and spec.gradient_accumulation_dtype is Precision.FP32:
        yield Finding(
            "gradients are summed in fp32: 4 bytes more per parameter on every rank",
            ("training", "gradient_accumulation_dtype"),
        )


@rule(
    "P004",
    "bf16 with ZeRO-1 and pipeline stages needs fp32 accumulation",
    """DeepSpeed's pipeline engine runs bf16 with ZeRO-1 only through its BF16_Optimizer, which is chosen by accumulating in fp32.""",
    sources=("DeepSpeed runtime/engine.py; DeepSpeed#1835",),
    targets=("deepspeed",),
)
def pipelined_bf16_accumulates_in_fp32(spec: Resolution) -> Iterator[Finding]:
    """Fires for pp > 1, bf16, ZeRO-1 without fp32 accumulation."""
    pp = spec.axis("pp")
    wrong = spec.gradient_accumulation_dtype is not Precision.FP32
    if pp > 1 and spec.precision is Precision.BF16 and spec.zero_stage == 1 and wrong:
        path = ("training", "gradient_accumulation_dtype")
        yield Finding(
            f"pp {pp} with precision bf16 and ZeRO stage 1 accumulates in {spec.gradient_accumulation_dtype.value}",
            path if spec.given(*path) else ("training", "precision"),
            help='set "gradient_accumulation_dtype": "fp32"',
            fixes=(Fix("accumulate in fp32", Safety.CHANGES_NUMERICS, (Edit(path, "fp32"),)),),
        )
