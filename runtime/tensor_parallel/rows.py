"""The row-parallel linear layer: its input features are spread over the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from parcompile.runtime.collectives import Group, pad_to_multiple, scatter_to_group

from .linear import ParallelLinear
from .matmul import row_matmul
from .partial import mark_summed, summing
from .weights import Ranges

__all__ = ["RowParallelLinear"]


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
            raise ValueError("input_is_parallel=False cuts equal slices in rank order: leave ranges out")
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
