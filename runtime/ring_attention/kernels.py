"""Attention over one local block of keys: which kernel computes it, and how its results join the rest.

A kernel returns the output *and the log-sum-exp* of a block, and its backward accepts the output and log-sum-exp over
*all* blocks: with these the gradients of blocks simply add up.

Shapes: query [B, H, Q, D], key [B, K, S, D], value [B, K, S, E], log-sum-exp [B, H, Q]; H is a multiple of K (grouped
queries).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .fused import CpuFlashKernel, CudaEfficientKernel, CudaFlashKernel
from .merge import RunningAttention
from .plain import PlainKernel

BACKWARD_ROWS = 1024
"""Query rows of one backward call on CPUs in 16 bit.

The CPU kernel sums the gradients of keys and values in the dtype of its inputs. Slices whose sums are added in fp32 cut
the error of the key gradients in bf16 from 1.9e-2 to 5.2e-3 at 16k tokens, for 2.4 % more time (512 rows: 36 % more).
"""


class Kernel(Protocol):
    """Attention of queries over one block of keys and values. A causal block has its diagonal at the top left."""

    @property
    def name(self) -> str:
        """For messages and benchmarks."""

    @property
    def backward_rows(self) -> int | None:
        """The most query rows of one backward call, None for any number."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the block; every side holds at least one token."""

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `out` and `lse` cover all blocks, `lse` +inf in rows that saw no key."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Local queries × keys of the source at hand, in tokens; a causal tile is square."""

    queries: slice
    keys: slice
    causal: bool

    @property
    def is_empty(self) -> bool:
        """No query or no key: fused kernels crash on such blocks."""
        return bool(self.queries.start >= self.queries.stop or self.keys.start >= self.keys.stop)


@dataclass(frozen=True, slots=True)
class Queries:
    """The query side of backward: `out` and `lse` cover all keys, and `lse` is +inf in rows that saw none."""

    query: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Gradients:
    """Sums of gradients over blocks, in fp32 or fp64, shaped as query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor


def select_kernel(query: Tensor, value: Tensor) -> Kernel:
    """The fastest kernel that is right for these tensors' device, dtype and head dims."""
    head_dim, device, dtype = query.shape[3], query.device, query.dtype
    if head_dim != value.shape[3]:
        return PlainKernel()
    if device.type == "cpu" and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return CpuFlashKernel(BACKWARD_ROWS if dtype.itemsize == 2 else None)
    if device.type == "cuda" and head_dim % 8 == 0 and dtype in (torch.float32, torch.bfloat16, torch.float16):
        recent = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
        if recent and dtype.itemsize == 2 and head_dim <= 256:
            return CudaFlashKernel()
        if recent or dtype is not torch.bfloat16:
            return CudaEfficientKernel()
    return PlainKernel()


def attend(
    kernel: Kernel, tile: Tile, query: Tensor, key: Tensor, value: Tensor, running: RunningAttention, scale: float
) -> None:
    """Merge the attention of one tile into `running`."""
    if tile.is_empty or query.numel() == 0:
        return
    rows, keys = query[:, :, tile.queries], tile.keys
    out, lse = kernel.forward(rows, key[:, :, keys], value[:, :, keys], causal=tile.causal, scale=scale)
    running.add(tile.queries, out, lse)


def add_gradients(kernel: Kernel, tile: Tile, queries: Queries, key: Tensor, value: Tensor, into: Gradients) -> None:
    """Add the gradients of one tile to the sums."""
    for part in _backward_parts(tile, kernel.backward_rows):
        if part.is_empty or queries.query.numel() == 0:
            continue
        rows, keys = part.queries, part.keys
        grad_query, grad_key, grad_value = kernel.backward(
            queries.grad_out[:, :, rows],
            queries.query[:, :, rows],
            key[:, :, keys],
            value[:, :, keys],
            queries.out[:, :, rows],
            queries.lse[:, :, rows],
            causal=part.causal,
            scale=queries.scale,
        )
        into.query[:, :, rows] += grad_query
        into.key[:, :, keys] += grad_key
        into.value[:, :, keys] += grad_value


def _backward_parts(tile: Tile, most_rows: int | None) -> list[Tile]:
    """Cut a tile into slices of query rows; a causal slice is a rectangle and, after it, a smaller causal square."""
    first, last = tile.queries.start, tile.queries.stop
    if most_rows is None or last - first <= most_rows:
        return [tile]
    parts: list[Tile] = []
    for start in range(first, last, most_rows):
        rows = slice(start, min(start + most_rows, last))
        if not tile.causal:
            parts.append(Tile(rows, tile.keys, causal=False))
            continue
        diagonal = tile.keys.start + (rows.start - first)
        parts.append(Tile(rows, slice(tile.keys.start, diagonal), causal=False))
        parts.append(Tile(rows, slice(diagonal, diagonal + rows.stop - rows.start), causal=True))
    return parts
