"""Where a stage's graph ends: backward begins there with the gradient that the next stage has sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Boundary:
    """What left a stage in forward, and the scalar from which its backward starts.

    An engine divides losses by accumulation steps and multiplies them with a loss scale; what the next stage sends has
    been through both, so that the scalar's own gradient is not looked at.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._gradients: list[Tensor] = []
        self.root: Tensor = _Boundary.apply(self._gradients, *outputs)  # type: ignore[no-untyped-call]

    def arrive(self, gradients: Sequence[Tensor]) -> None:
        """The gradients of the outputs, for the one backward pass."""
        self._gradients[:] = gradients


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given
