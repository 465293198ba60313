"""Lets column layers that a model calls one after the other share the collectives of their common input.

A model that is not ours calls `q_proj(x)`, `k_proj(x)`, `v_proj(x)`: three layers, each of which would gather x, and
reduce its gradient, for itself. With `share_input` the first call computes all three with one `column_parallel`, and
the others find their result waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .linear import ColumnParallelLinear, check_same_entry, column_parallel

__all__ = ["share_input"]


def share_input(layers: Sequence[ColumnParallelLinear]) -> None:
    """Compute these layers together whenever they are called with the same tensor.

    What decides is that it is the same tensor, unchanged since, which cannot be known under torch.compile: there, and
    when a layer is called with another tensor, each layer computes for itself, which is correct and only slower.

    Raises:
        ValueError: The layers do not agree on how the input enters.
    """
    check_same_entry(layers)
    waiting = _Waiting(tuple(layers))
    for layer in layers:
        layer.together = waiting.take


class _Waiting:
    """The results of one call that have not been asked for yet."""

    def __init__(self, layers: tuple[ColumnParallelLinear, ...]) -> None:
        self.layers = layers
        self.source: tuple[Tensor, int] | None = None
        self.results: dict[int, Any] = {}

    def take(self, layer: ColumnParallelLinear, x: Tensor) -> Any:
        fresh = self.source is not None and self.source[0] is x and self.source[1] == x._version
        if not fresh or id(layer) not in self.results:
            self.source = (x, x._version)
            self.results = {id(one): out for one, out in zip(self.layers, column_parallel(x, self.layers), strict=True)}
        out = self.results.pop(id(layer))
        if not self.results:
            self.source = None  # nothing is kept alive beyond the last call
        return out
