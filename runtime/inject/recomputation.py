"""Full activation checkpointing of injected models: layers are computed again in backward, their attention is kept.

Attention keeps its output because recomputing it would send keys and values around the ring a second time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from parcompile.plan import Plan
from parcompile.runtime.drawing import Redrawn
from parcompile.runtime.micro_batch import recompute_context


def recompute_as_planned(model: nn.Module, plan: Plan, rank: int) -> None:
    """Makes the layers of a rank recompute in backward where the plan says `activation_checkpointing` "full"."""
    kind = plan.spec.training.activation_checkpointing
    if not isinstance(kind, str):
        kind = kind[plan.groups.grid.coordinates(rank)["pp"]]
    if kind != "full":
        return
    rules = plan.spec.model.shape.user_module
    if rules is not None:
        _recompute_layers(model, rules.prefix.rstrip("."))
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        _recompute_layers(model, plan.parameters.layer[0].name.partition(".{layer}")[0])
        return
    # transformers 5 warns of the older name.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable: Any = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False, "context_fn": _contexts})


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of activation checkpointing: the micro-batch and the random numbers of the forward pass."""
    keeping, taking = recompute_context()
    return keeping, _Both(taking, Redrawn())


class _Both:
    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _recompute_layers(module: nn.Module, path: str) -> None:
    """Of a module that cannot do so by itself; `path` is the name of its list of layers."""
    for layer in module.get_submodule(path).children():
        forward = layer.forward

        def recomputed(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)

        layer.forward = recomputed
