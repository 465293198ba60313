"""Linear layers whose weight is spread over the ranks of a tensor-parallel group.

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

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from parcompile.runtime.transport import Group, group_rank, group_size

from .partial import draw_slice, mark_shard, master_seed, uniform
from .weights import Ranges, even_range, slice_parameter


class ParallelLinear(nn.Module):
    """What both layers share: a slice of a full [O, I] weight, cut along `split_dim`."""

    split_dim: int
    stored_transposed: bool = False
    """The weight is stored as [in, out], as GPT-2's `Conv1D` is."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        group: Group,
        ranges: Ranges | None,
        replica_group: Group,
        sequence_parallel: bool,
        sequence_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
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
        device, dtype = options.pop("device", None), options.pop("dtype", None)
        if padded_out_features is not None and cls.split_dim != 0:
            raise ValueError("only the output features of a column layer can be padded")
        out_features = padded_out_features or linear.out_features
        layer = cls(linear.in_features, out_features, linear.bias is not None, device="meta", **options)
        layer.weight = slice_parameter(linear.weight, layer.split_dim, layer.ranges, padded_out_features, device, dtype)
        if linear.bias is not None:
            bias_ranges = layer.ranges if layer.split_dim == 0 else ((0, out_features),)
            layer.bias = slice_parameter(linear.bias, 0, bias_ranges, padded_out_features, device, dtype)
        layer._mark()
        return layer.train(linear.training)

    @classmethod
    def from_conv1d(cls, conv: nn.Module, **options: Any) -> Self:
        """Take this rank's part of transformers' `Conv1D`, a linear that stores its weight as [in, out]."""
        whole: Any = conv
        in_features, out_features = whole.weight.shape
        layer = cls(in_features, out_features, whole.bias is not None, device="meta", **options)
        layer.stored_transposed = True
        layer.weight = slice_parameter(whole.weight, 1 - layer.split_dim, layer.ranges, None, None, None)
        if whole.bias is not None:
            bias_ranges = layer.ranges if layer.split_dim == 0 else ((0, out_features),)
            layer.bias = slice_parameter(whole.bias, 0, bias_ranges, None, None, None)
        layer._mark()
        return layer.train(conv.training)

    def reset_parameters(self) -> None:
        """Draw the full layer as `nn.Linear` does, alike on every rank, and keep the slice; meta tensors stay."""
        if self.weight.is_meta:
            return
        draw = uniform(self.in_features**-0.5)
        full_shape = (self.out_features, self.in_features)
        draw_slice(self.weight, full_shape, self.split_dim, self.ranges, draw, master_seed())
        if self.bias is not None:
            bias_ranges = self.ranges if self.split_dim == 0 else ((0, self.out_features),)
            draw_slice(self.bias, (self.out_features,), 0, bias_ranges, draw, master_seed())

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
