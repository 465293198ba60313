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


class QueriesOfPass(Queries):
    """The same for all tiles of a pass: what several of them read is laid out for the kernel once.

    FlashAttention reads the output, its gradient and the log-sum-exp without strides, and torch's operator would copy
    them in each call.
    """

    _parts: dict[tuple[slice | int | None, ...], Queries]

    def part(self, heads: slice, rows: slice) -> Queries:
        """As `Queries`."""
        if self.query.device.type == "cpu":
            return super().part(heads, rows)
        if not hasattr(self, "_parts"):
            self._parts = {}
        length = self.query.shape[2]
        name = heads.start, heads.stop, heads.step, *rows.indices(length)
        found = self._parts.get(name)
        if found is None:
            query, grad_out, out, lse, scale = super().part(heads, rows)
            found = Queries(query, _dense_tokens(grad_out), _dense_tokens(out), lse.contiguous(), scale)
            self._parts[name] = found
        return found


def _dense_tokens(x_BHQD: Tensor) -> Tensor:
    """The same tensor with a memory layout of [B, Q, H, D]."""
    return x_BHQD.transpose(1, 2).contiguous().transpose(1, 2)


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
        """Add the gradients of a block; what a kernel gives beyond the width of these is padding."""
        for total, found in ((self.query, query), (self.key, key), (self.value, value)):
            total.add_(found[..., : total.shape[-1]])
