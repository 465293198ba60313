"""Column-parallel and row-parallel linear layers: output or input features are spread over the ranks.

Called one by one, each would gather x, and reduce its gradient, for itself; `column_parallel` does so once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parcompile.runtime.collectives import copy_to_group, cut_padding, pad_to_multiple, scatter_to_group
from parcompile.runtime.transport import Group

from .linear import ParallelLinear
from .matmul import column_matmul, row_matmul
from .partial import mark_summed, summing
from .weights import Ranges

# The column-parallel linear layer, and several of them on one input: q, k and v, or gate and up.


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
        super().__init__(
            in_features,
            out_features,
            bias,
            group=group,
            ranges=ranges,
            replica_group=replica_group,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device=device,
            dtype=dtype,
        )
        self.input_is_ready, self.keep_gathered = input_is_ready, keep_gathered
        self.sequence_length = sequence_length
        self.shared_forward: Callable[[ColumnParallelLinear, Tensor, int | None], Any] | None = None
        """Computes this layer with others on the same input: of an injected block."""

    def forward(self, x: Tensor, sequence_length: int | None = None) -> Any:
        """[…, I] to […, O/tp].

        `sequence_length` is that of the constructor, for this call.

        Raises:
            ValueError: The input is not a slice of a sequence of `sequence_length` tokens.
        """
        if self.shared_forward is not None:
            return self.shared_forward(self, x, sequence_length)
        if self.group is None:
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
    ready = first.input_is_ready if input_is_ready is None else input_is_ready
    if ready or first.group is None:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    dim = first.sequence_dim if first.sequence_parallel else None
    outs = column_matmul(x, weights, biases, first.group, dim, first.keep_gathered)
    if dim is None:
        return outs
    length = sequence_length or first.sequence_length
    return tuple(cut_padding(y, dim, first.group, length) for y in outs)


# The row-parallel linear layer: its input features are spread over the ranks.


class RowParallelLinear(ParallelLinear):
    """y = x · Wᵀ + b with the *input* features spread over the ranks; the bias is added once, after the sum.

    Args:
        in_features: I of the full layer.
        out_features: O of the full layer.
        bias: Whether there is a bias; every rank holds all of it.
        group: The tensor-parallel ranks; None for this rank alone.
        ranges: The input features that this rank holds; without it an equal slice.
        input_is_parallel: The input is this rank's slice already; otherwise the full input is cut first (needs equal
            slices).
        sequence_parallel: Return the output split along `sequence_dim`.
        sequence_dim: The dim of the output that is the sequence.
        pad_sequence: With `sequence_parallel`, continue a sequence that the ranks do not divide with zeros to the next
            multiple; otherwise it is refused. The column layers after it need its `sequence_length`.
        device: Where the weight is made.
        dtype: The weight's type.

    Raises:
        ValueError: I is not divisible by the number of ranks, or the arguments contradict each other.
    """

    split_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        ranges: Ranges | None = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        pad_sequence: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not input_is_parallel and ranges is not None:
            raise ValueError("input_is_parallel=False takes equal slices in rank order: leave ranges out")
        super().__init__(
            in_features,
            out_features,
            bias,
            group=group,
            ranges=ranges,
            replica_group=None,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device=device,
            dtype=dtype,
        )
        self.input_is_parallel, self.pad_sequence = input_is_parallel, pad_sequence

    def forward(self, x: Tensor) -> Tensor:
        """[…, I/tp] to […, O]; the sequence of the output is split with `sequence_parallel`.

        Raises:
            ValueError: The ranks do not divide the sequence, and `pad_sequence` is not set.
        """
        if self.group is None:
            return F.linear(x, self.matrix, self.bias)
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.group)
        if self.sequence_parallel and self.pad_sequence:
            x = pad_to_multiple(x, self.sequence_dim, self.group)
        bias: Tensor | None = self.bias
        y = row_matmul(x, self.matrix, self.group, self.sequence_dim if self.sequence_parallel else None)
        if self.sequence_parallel:
            # Each rank adds the bias to its own tokens, so each has only a part of the bias's gradient.
            bias = None if bias is None else summing(bias, self.group)
        return y if bias is None else y + bias

    def _mark(self) -> None:
        super()._mark()
        if self.sequence_parallel and self.bias is not None:
            mark_summed(self.bias, self.group)
