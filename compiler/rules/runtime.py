"""What the runtime executes today. Such a plan compiles, for other launchers and for planning, but the runtime refuses it."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Severity
from parcompile.resolve import Resolution

from .registry import Finding, rule

RUNTIME_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that the runtime injects."""


@rule(
    "X001",
    "the runtime does not run pipeline stages",
    """The runtime executes tp, cp, dp and ZeRO-1. A plan with pp > 1 compiles for other launchers.""",
    severity=Severity.WARNING,
    targets=("runtime",),
)
def runtime_has_no_pipeline(spec: Resolution) -> Iterator[Finding]:
    """Fires for pp > 1."""
    if spec.axis("pp") > 1:
        yield Finding(f"pp {spec.axis('pp')}: parcompile.runtime runs pp 1 only", ("parallelism", "pp"))


@rule(
    "X002",
    "the runtime does not run expert parallelism",
    """The runtime executes tp, cp, dp and ZeRO-1. A plan with ep > 1 compiles for other launchers.""",
    severity=Severity.WARNING,
    targets=("runtime",),
)
def runtime_has_no_expert_parallelism(spec: Resolution) -> Iterator[Finding]:
    """Fires for ep > 1."""
    if spec.axis("ep") > 1:
        yield Finding(f"ep {spec.axis('ep')}: parcompile.runtime runs ep 1 only", ("parallelism", "ep"))


@rule(
    "X003",
    "the runtime runs ZeRO stage 1",
    """The runtime shards the optimizer state over dp · cp. Other stages are planned and emitted, not executed.""",
    severity=Severity.WARNING,
    targets=("runtime",),
)
def runtime_needs_zero_1(spec: Resolution) -> Iterator[Finding]:
    """Fires for other stages."""
    if spec.zero_stage != 1:
        yield Finding(f"zero.stage {spec.zero_stage}: parcompile.runtime runs stage 1 only", ("zero", "stage"))


@rule(
    "X004",
    "the runtime cannot inject this model",
    """The runtime replaces the linears, the attention and the loss of a model; it knows how for some families.""",
    severity=Severity.WARNING,
    targets=("runtime",),
)
def runtime_knows_the_family(spec: Resolution) -> Iterator[Finding]:
    """Fires for families that are not injected yet."""
    family = spec.shape.model_type
    if family not in RUNTIME_FAMILIES:
        yield Finding(
            f"parcompile.runtime does not inject {family}", ("model",), help=f"it injects {', '.join(RUNTIME_FAMILIES)}"
        )


@rule(
    "X005",
    "the ring has no sliding window",
    """Ring attention computes full causal attention. A model with a sliding window shorter than the sequence would be trained with
    another mask than its own.""",
    severity=Severity.WARNING,
    targets=("runtime",),
)
def window_covers_the_sequence(spec: Resolution) -> Iterator[Finding]:
    """Fires when the window is shorter than the sequence."""
    window, length = spec.shape.sliding_window, spec.sequence_length
    if window is not None and window < length:
        yield Finding(
            f"sliding_window {window} < sequence_length {length}: parcompile.runtime attends to the whole sequence",
            ("training", "sequence_length"),
            help=f"use a sequence_length of {window} or less, or a config without a window",
        )
