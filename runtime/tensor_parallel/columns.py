"""The column-parallel linear layer, and several of them on one input: q, k and v, or gate and up.

A model that is ours calls `column_parallel`. One that is not calls `q_proj(x)`, `k_proj(x)` and `v_proj(x)`, each of
which would gather x, and reduce its gradient, for itself: after `share_input` the first call computes all three, and
the others find their result waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parcompile.runtime.collectives import Group, copy_to_group, cut_padding, gather_from_group

from .linear import ParallelLinear
from .matmul import column_matmul
from .weights import Ranges

__all__ = ["ColumnParallelLinear", "column_outputs", "column_parallel", "share_input"]


class ColumnParallelLinear(ParallelLinear):
    """y = x · Wᵀ + b with the *output* features spread over the ranks.

    Args:
        in_features: I of the full layer.
        out_features: O of the full layer.
        bias: Whether there is a bias; it is split like the output.
        group: The tensor-parallel ranks; None for this rank alone.
        ranges: The output features that this rank holds; without it an equal slice.
        replica_group: The ranks that hold the same slice (replicated kv heads): their weight gradients are summed.
            Needs `ranges`.
        gather_output: Return the full […, O] on every rank. Needs equal slices.
        skip_bias_add: Return `(output without bias, bias)`, for a fused kernel that adds it later.
        sequence_parallel: The input is split along `sequence_dim` and is gathered first.
        sequence_dim: The dim of the input that is the sequence.
        input_is_ready: The input has passed `copy_to_group` or `gather_from_sequence` already, at the entry of the
            block, so that several layers (q, k and v; gate and up) share one collective.
        keep_gathered: With `sequence_parallel`, keep the gathered input for backward rather than gather it again there.
        sequence_length: With `sequence_parallel`, the tokens of the whole sequence when the ranks do not divide them:
            the output is cut to it, so that no padding is seen inside the region. A call can say otherwise.
        device: Where the weight is made.
        dtype: The weight's type.

    Raises:
        ValueError: O is not divisible by the number of ranks, or the arguments contradict each other.
    """

    split_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        ranges: Ranges | None = None,
        replica_group: Group = None,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        input_is_ready: bool = False,
        keep_gathered: bool = False,
        sequence_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if replica_group is not None and ranges is None:
            raise ValueError("replica_group needs ranges: ranks that hold the same slice must be told which one it is")
        if gather_output and ranges is not None:
            raise ValueError("gather_output needs equal slices in rank order: leave ranges and replica_group out")
        super().__init__(
            in_features,
            out_features,
            bias,
            group=group,
            ranges=ranges,
            replica_group=replica_group,
            skip_bias_add=skip_bias_add,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device=device,
            dtype=dtype,
        )
        self.gather_output, self.input_is_ready = gather_output, input_is_ready
        self.keep_gathered = keep_gathered
        self.sequence_length = sequence_length
        self.shared_forward: Callable[[ColumnParallelLinear, Tensor, int | None], Any] | None = None
        """Computes this layer with others on the same input: of `share_input`, or of an injected block."""

    def forward(self, x: Tensor, sequence_length: int | None = None) -> Any:
        """[…, I] to […, O/tp], or […, O] with `gather_output`.

        `sequence_length` is that of the constructor, for this call.

        Raises:
            ValueError: The input is not a slice of a sequence of `sequence_length` tokens.
        """
        if self.shared_forward is not None:
            return self.shared_forward(self, x, sequence_length)
        if self.group is None and not self.skip_bias_add:
            return F.linear(x, self.matrix, self.bias)
        return column_outputs(x, (self,), sequence_length)[0]


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
    weights = [copy_to_group(layer.matrix, layer.replica_group) for layer in layers]
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
        layer.shared_forward = waiting.take


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
