"""Full activation checkpointing of injected models: layers are computed again in backward, their attention is kept.

Attention keeps its output because recomputing it would send keys and values around the ring a second time.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from parcompile.model.user_module import UserModule
from parcompile.plan import Plan
from parcompile.runtime.micro_batch import recompute_context


def recompute_as_planned(model: nn.Module, plan: Plan) -> None:
    """Makes layers recompute in backward where the plan says `activation_checkpointing` "full"."""
    if plan.spec.training.activation_checkpointing != "full":
        return
    rules = plan.spec.model.shape.user_module
    if rules is not None:
        _recompute_layers(model, rules)
        return
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_context})  # type: ignore[operator]


def _recompute_layers(module: nn.Module, rules: UserModule) -> None:
    for layer in module.get_submodule(rules.prefix.rstrip(".")).children():
        forward = layer.forward

        def recomputed(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=recompute_context, **kwargs)

        layer.forward = recomputed
