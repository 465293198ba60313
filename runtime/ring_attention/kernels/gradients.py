"""What backward kernels read of the queries, and where they add what they find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Queries(NamedTuple):
    """The query side of backward: `out` and `lse` cover all keys, and `lse` is +inf in rows that saw none."""

    query: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor
    scale: float

    def part(self, heads: slice, rows: slice) -> Queries:
        """Only some query heads and some rows."""
        here = slice(None), heads, rows
        return Queries(self.query[here], self.grad_out[here], self.out[here], self.lse[here], self.scale)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Sums of gradients over blocks, in fp32 or fp64, shaped as query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor

    def part(self, heads: slice, rows: slice, keys: slice) -> Gradients:
        """Only some query heads, some rows and some keys; sums of the whole are added to."""
        return Gradients(self.query[:, heads, rows], self.key[:, :, keys], self.value[:, :, keys])

    def add(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Add the gradients of a block."""
        self.query.add_(query)
        self.key.add_(key)
        self.value.add_(value)
