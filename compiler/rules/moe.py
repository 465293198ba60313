"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.resolve import Resolution

from .registry import Finding, rule

_EP = ("parallelism", "ep")


@rule(
    "M001",
    "the experts do not divide over ep",
    """Expert parallelism gives each rank the same number of routed experts: the model needs experts, and their number % ep = 0.""",
    sources=("Megatron-LM arguments.py",),
)
def experts_divide(spec: Resolution) -> Iterator[Finding]:
    """Fires for ep > 1 without experts, or when they do not divide."""
    ep, moe = spec.axis("ep"), spec.shape.moe
    if ep > 1 and moe is None:
        yield Finding(f"ep {ep}, but {spec.shape.model_type} has no experts", _EP, help="remove ep")
    elif moe is not None and moe.num_experts % ep:
        yield Finding(f"{moe.num_experts} experts on ep {ep}: {moe.num_experts} / {ep} is not whole", _EP)


@rule(
    "M002",
    "more experts per token than experts",
    """A token visits num_experts_per_tok different experts, so there have to be as many.""",
    sources=("Megatron-Core transformer_config.py",),
)
def enough_experts(spec: Resolution) -> Iterator[Finding]:
    """Fires when top-k exceeds the number of experts."""
    moe = spec.shape.moe
    if moe is not None and moe.num_experts_per_token > moe.num_experts:
        yield Finding(
            f"num_experts_per_tok {moe.num_experts_per_token} > {moe.num_experts} experts",
            ("model", "num_experts_per_tok"),
        )
