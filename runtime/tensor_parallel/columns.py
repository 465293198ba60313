"""Column-parallel and row-parallel linear layers: output or input features are spread over the ranks.

Called one by one, column layers would each gather x, and reduce its gradient, for themselves; `column_parallel` does so
once for all.

Shapes: `…` any leading dims (batch, sequence), I input and O output features, tp ranks in the group.

| layer | weight of a rank | input | output |
|---|---|---|---|
| `ColumnParallelLinear` | [O/tp, I] | […, I], the same on every rank | […, O/tp] |
| `RowParallelLinear` | [O, I/tp] | […, I/tp] | […, O], the same on every rank |

A column layer followed by a row layer computes the product of both with one all-reduce in each direction (Megatron-LM,
arXiv 1909.08053, section 3). With `sequence_parallel` the replicated side is split along the sequence instead, and the
all-reduce becomes a reduce-scatter on one side and an all-gather on the other (arXiv 2205.05198, section 4.2.2).

Which slice a rank holds is decided by the plan and given as `ranges`; without it every rank holds an equal slice in
rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from parcompile.runtime.collectives import copy_to_group, cut_padding, pad_to_multiple, scatter_to_group
from parcompile.runtime.transport import Group, group_rank, group_size

from .matmul import column_matmul, row_matmul
from .partial import (
    Ranges,
    draw_slice,
    even_range,
    mark_shard,
    mark_summed,
    master_seed,
    slice_parameter,
    summing,
    uniform,
)


class ParallelLinear(nn.Module):
    """What both layers share: a slice of a full [O, I] weight, cut along `split_dim`.

    Args:
        in_features: I of the full layer.
        out_features: O of the full layer.
        bias: Whether there is a bias.
        group: The tensor-parallel ranks; None for this rank alone.
        ranges: The features along `split_dim` that this rank holds; without it an equal slice.
        replica_group: The ranks that hold the same slice (replicated kv heads): their weight gradients are summed.
        sequence_parallel: The replicated side is split along `sequence_dim`.
        sequence_dim: The dim of that side that is the sequence.
        device: Where the weight is made.
        dtype: The weight's type.

    Raises:
        ValueError: The features are not divisible by the number of ranks.
    """

    split_dim: int
    stored_transposed: bool = False
    """The weight is stored as [in, out], as GPT-2's `Conv1D` is."""

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        # A group of one is no group: its layers are plain linears.
        self.group = group if group_size(group) > 1 else None
        self.replica_group = replica_group if group_size(replica_group) > 1 else None
        self.sequence_parallel, self.sequence_dim = sequence_parallel and self.group is not None, sequence_dim
        size, what = ((out_features, "out_features"), (in_features, "in_features"))[self.split_dim]
        if ranges is None:
            ranges = (even_range(size, group_rank(group), group_size(group), what),)
        self.ranges = tuple((start, stop) for start, stop in ranges)
        shape = (self.local_size, in_features) if self.split_dim == 0 else (out_features, self.local_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self._mark()
        self.reset_parameters()

    @property
    def matrix(self) -> Tensor:
        """The slice as [out, in], whichever way it is stored."""
        return self.weight.t() if self.stored_transposed else self.weight

    @property
    def local_size(self) -> int:
        """Features of this rank's slice: of the output of a column layer, of the input of a row layer."""
        return sum(self.part_sizes)

    @property
    def part_sizes(self) -> list[int]:
        """Features of each of this rank's ranges: `y.split(layer.part_sizes, -1)` takes fused outputs apart."""
        return [stop - start for start, stop in self.ranges]

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, padded_out_features: int | None = None, **options: Any) -> Self:
        """Take this rank's part of a full layer.

        Device, dtype and `requires_grad` stay as they are unless `options` say otherwise.

        Args:
            linear: The full layer.
            padded_out_features: Continue a column layer with zero rows up to this O (a vocabulary that the ranks do not
                divide).
            options: Those of the constructor.
        """
        if padded_out_features is not None and cls.split_dim != 0:
            raise ValueError("only the output features of a column layer can be padded")
        features = linear.in_features, padded_out_features or linear.out_features
        return cls._of(linear, *features, padded_out_features, **options)

    @classmethod
    def from_conv1d(cls, conv: nn.Module, **options: Any) -> Self:
        """Take this rank's part of transformers' `Conv1D`, a linear that stores its weight as [in, out]."""
        return cls._of(conv, *conv.get_parameter("weight").shape, transposed=True, **options)

    @classmethod
    def _of(
        cls,
        whole: Any,
        in_features: int,
        out_features: int,
        padded: int | None = None,
        *,
        transposed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        layer = cls(in_features, out_features, whole.bias is not None, device="meta", **options)
        layer.stored_transposed = transposed
        dim = 1 - layer.split_dim if transposed else layer.split_dim
        layer.weight = slice_parameter(whole.weight, dim, layer.ranges, padded, device, dtype)
        if whole.bias is not None:
            layer.bias = slice_parameter(whole.bias, 0, layer._bias_ranges, padded, device, dtype)
        layer._mark()
        return layer.train(whole.training)

    @property
    def _bias_ranges(self) -> Ranges:
        return self.ranges if self.split_dim == 0 else ((0, self.out_features),)

    def reset_parameters(self) -> None:
        """Draw the full layer as `nn.Linear` does, alike on every rank, and keep the slice; meta tensors stay."""
        if self.weight.is_meta:
            return
        draw = uniform(self.in_features**-0.5)
        full_shape = (self.out_features, self.in_features)
        draw_slice(self.weight, full_shape, self.split_dim, self.ranges, draw, master_seed())
        if self.bias is not None:
            draw_slice(self.bias, (self.out_features,), 0, self._bias_ranges, draw, master_seed())

    def _mark(self) -> None:
        mark_shard(self.weight, self.replica_group)
        if self.split_dim == 0:
            mark_shard(self.bias, self.replica_group)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # `to_empty` and the like make new parameters, which know nothing of the old ones' marks.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self

    def extra_repr(self) -> str:
        """The full layer, and the slice of it that this rank holds."""
        dim = ("out", "in")[self.split_dim]
        held = ", ".join(f"{start}..{stop}" for start, stop in self.ranges)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{dim}[{held}], tp={group_size(self.group)}, sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(ParallelLinear):
    """y = x · Wᵀ + b with the *output* features spread over the ranks.

    Args:
        in_features: I of the full layer.
        out_features: O of the full layer.
        bias: Whether there is a bias; it is split like the output.
        input_is_ready: The input has passed `copy_to_group` or `gather_from_sequence` already, at the entry of the
            block, so that several layers (q, k and v; gate and up) share one collective.
        keep_gathered: With `sequence_parallel`, keep the gathered input for backward rather than gather it again there.
        sequence_length: With `sequence_parallel`, the tokens of the whole sequence when the ranks do not divide them:
            the output is cut to it, so that no padding is seen inside the region. A call can say otherwise.
        options: Those of `ParallelLinear`; `sequence_parallel` gathers the input first, `replica_group` needs `ranges`.

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
        input_is_ready: bool = False,
        keep_gathered: bool = False,
        sequence_length: int | None = None,
        **options: Any,
    ) -> None:
        if options.get("replica_group") is not None and options.get("ranges") is None:
            raise ValueError("replica_group needs ranges: ranks that hold the same slice must be told which one it is")
        super().__init__(in_features, out_features, bias, **options)
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


class RowParallelLinear(ParallelLinear):
    """y = x · Wᵀ + b with the *input* features spread over the ranks; the bias is added once, after the sum.

    Args:
        in_features: I of the full layer.
        out_features: O of the full layer.
        bias: Whether there is a bias; every rank holds all of it.
        input_is_parallel: The input is this rank's slice already; otherwise the full input is cut first (needs equal
            slices).
        pad_sequence: With `sequence_parallel`, continue a sequence that the ranks do not divide with zeros to the next
            multiple; otherwise it is refused. The column layers after it need its `sequence_length`.
        options: Those of `ParallelLinear` but `replica_group`; with `sequence_parallel` the output is split.

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
        input_is_parallel: bool = True,
        pad_sequence: bool = False,
        **options: Any,
    ) -> None:
        if not input_is_parallel and options.get("ranges") is not None:
            raise ValueError("input_is_parallel=False takes equal slices in rank order: leave ranges out")
        if "replica_group" in options:
            raise TypeError("RowParallelLinear takes no replica_group: every rank has input features of its own")
        super().__init__(in_features, out_features, bias, **options)
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
