"""What is done to an engine's model outside of the engine: evaluation is right there, a backward pass is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.errors import RunError


def guard_backward(engine: Any) -> None:
    """Lets a backward pass of what `engine.module(…)` has returned say what to call, where it is not the engine's.

    Gradients of a rank are its part: the engine sums and scales them, and its optimizer takes them over.
    """
    if dist.get_world_size() > 1:
        _Guard(engine)


class _Guard:
    def __init__(self, engine: Any) -> None:
        self._forwards, self._backwards = 0, 0
        engine.forward = self._counting("_forwards", engine.forward)
        engine.backward = self._counting("_backwards", engine.backward)
        engine.module.register_forward_hook(self._leave)

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            try:
                return call(*args, **options)
            finally:
                setattr(self, name, getattr(self, name) - 1)

        return counted

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._forwards or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        found = (output, getattr(output, "loss", None), getattr(output, "logits", None))
        for tensor in found:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, _: Tensor) -> None:
        if not self._backwards:
            raise RunError(
                "backward() of what engine.module(…) has returned would leave each rank its part of the gradients, "
                "which no optimizer step takes: write loss = engine(**batch).loss and engine.backward(loss), or "
                "engine.train_batch(iterator). To evaluate, call engine.module(…) under torch.no_grad()",
                everywhere=True,
            )
