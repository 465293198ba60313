"""Several column-parallel layers on one input: q, k and v, or gate and up, with one collective for all.

A model that is ours calls `column_parallel`. One that is not calls `q_proj(x)`, `k_proj(x)` and `v_proj(x)`, each of
which would gather x, and reduce its gradient, for itself: after `share_input` the first call computes all three, and
the others find their result waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parcompile.runtime.collectives import copy_to_group, cut_padding, gather_from_group

from .matmul import column_matmul

if TYPE_CHECKING:
    from .linear import ColumnParallelLinear

__all__ = ["column_outputs", "column_parallel", "share_input"]


def column_parallel(
    x: Tensor, layers: Sequence[ColumnParallelLinear], sequence_length: int | None = None
) -> tuple[Any, ...]:
    """What each of the column layers returns for one input: q, k and v, or gate and up, with one collective for all.

    Every layer keeps its own weight, bias, ranges and replicas. `sequence_length` is as in the layers, for this call.

    Raises:
        ValueError: The layers do not agree on how the input enters.
    """
    check_same_entry(layers)
    return column_outputs(x, layers, sequence_length)


def check_same_entry(layers: Sequence[ColumnParallelLinear]) -> None:
    """Refuse layers that cannot share their input.

    Raises:
        ValueError: They do not agree on how it enters.
    """
    names = ("group", "sequence_parallel", "sequence_dim", "input_is_ready", "keep_gathered", "sequence_length")
    for name in names:
        values = [getattr(layer, name) for layer in layers]
        if any(value != values[0] for value in values):
            raise ValueError(f"layers that share an input agree on {', '.join(names)}; these have {name} = {values}")


def column_outputs(
    x: Tensor,
    layers: Sequence[ColumnParallelLinear],
    sequence_length: int | None = None,
    *,
    input_is_ready: bool | None = None,
) -> tuple[Any, ...]:
    """`column_parallel` for layers that are known to agree; `input_is_ready` overrules theirs."""
    first = layers[0]
    weights = [copy_to_group(layer.weight, layer.replica_group) for layer in layers]
    biases = [None if layer.bias is None else copy_to_group(layer.bias, layer.replica_group) for layer in layers]
    added = [None if layer.skip_bias_add else bias for layer, bias in zip(layers, biases, strict=True)]
    ready = first.input_is_ready if input_is_ready is None else input_is_ready
    if ready or first.group is None:
        outs = tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, added, strict=True))
    else:
        dim = first.sequence_dim if first.sequence_parallel else None
        outs = column_matmul(x, weights, added, first.group, dim, first.keep_gathered)
        if dim is not None:
            length = sequence_length or first.sequence_length
            outs = tuple(cut_padding(y, dim, first.group, length) for y in outs)
    outs = tuple(
        gather_from_group(y, -1, layer.group) if layer.gather_output else y
        for y, layer in zip(outs, layers, strict=True)
    )
    return tuple((y, bias) if layer.skip_bias_add else y for y, bias, layer in zip(outs, biases, layers, strict=True))


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
        self.source: tuple[Tensor, int, int | None] | None = None
        self.results: dict[int, Any] = {}

    def take(self, layer: ColumnParallelLinear, x: Tensor, sequence_length: int | None) -> Any:
        if torch.compiler.is_compiling():
            return column_outputs(x, (layer,), sequence_length)[0]
        fresh = self.source is not None and self.source[0] is x and self.source[1:] == (x._version, sequence_length)
        if not fresh or id(layer) not in self.results:
            self.source = (x, x._version, sequence_length)
            outs = column_parallel(x, self.layers, sequence_length)
            self.results = {id(one): out for one, out in zip(self.layers, outs, strict=True)}
        out = self.results.pop(id(layer))
        if not self.results:
            self.source = None  # nothing is kept alive beyond the last call
        return out
