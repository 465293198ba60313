"""Attention over one local block of keys: which kernel computes it, and how its results join the rest.

A kernel returns the output *and the log-sum-exp* of a block, and its backward accepts the output and log-sum-exp over
*all* blocks: with these the gradients of blocks simply add up.

Shapes: query [B, H, Q, D], key [B, K, S, D], value [B, K, S, E], log-sum-exp [B, H, Q]; H is a multiple of K (grouped
queries).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from .cpu_products import kept_memory
from .cuda_flash import CudaFlashKernel, FlashAttnKernel, installed_flash_attn
from .fused import CpuFlashKernel, CudaEfficientKernel
from .gradients import Gradients, Queries
from .merge import RunningAttention
from .plain import PlainKernel
from .terms import Terms
from .tiles import FULL, Band, Tile

BACKWARD_ROWS = 1536
"""Query rows of one backward call of CPUs' fused kernel in bf16, which then has one query head for each key/value head.

It sums the gradients of keys and values in the dtype of its inputs, over rows and over the heads that share them.
Slices whose sums are added in fp32 cut the error of the key gradients in bf16 from 1.4e-2 to 0.4e-2 at 8k tokens with
four query heads for each, and take up to 7 % more time.
"""

BACKWARD_KEY_NUMBERS = 1 << 18
"""Numbers of one head's keys in one backward call of these: its results are in memory beside the sums."""

TILES_FROM = 384
"""Query rows of a block from which our own tiles are faster than CPUs' fused kernel forward, where they are at all."""


class Kernel(Protocol):
    """Attention of queries over one block of keys and values, none of them empty; each query sees a key."""

    @property
    def name(self) -> str:
        """For messages and benchmarks."""

    @property
    def backward_rows(self) -> int | None:
        """The most query rows of one backward call, None for any number."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the block."""

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None, into: Gradients
    ) -> None:
        """Add the gradients; `out` and `lse` cover all blocks, `lse` +inf in rows that saw no key."""


def select_kernel(
    query: Tensor,
    value: Tensor,
    *,
    banded: bool = False,
    softcap: float | None = None,
    added: bool = False,
    dropout: bool = False,
) -> Kernel:
    """The fastest kernel that is right for these tensors' device, dtype and head dims, and for this mask.

    `banded`: tiles may be other than full or causal squares. `added`: something is added to the scores. A slower kernel
    than the device has is announced once.
    """
    fused, why = _fused_kernel(query, softcap)
    if fused is not None:
        why = ""
        any_mask = isinstance(fused, CpuFlashKernel)
        if dropout:
            why = "the dropout of fused kernels depends on how the sequence is cut"
        elif softcap is not None and not isinstance(fused, FlashAttnKernel):
            why = f"{fused.name} has no soft-capping"
        elif query.shape[3] != value.shape[3] and not any_mask:
            why = f"the fused kernels want one head dim, not {query.shape[3]} for keys and {value.shape[3]} for values"
        elif banded and isinstance(fused, CudaEfficientKernel):
            why = f"{fused.name} has no sliding window between blocks"
        elif added and not any_mask:
            why = f"{fused.name} adds nothing to scores"
    if fused is None or why:
        _announce(f"ring attention takes the plain kernel, which is slower: {why}")
        return PlainKernel(softcap)
    return fused


def _fused_kernel(query: Tensor, softcap: float | None) -> tuple[Kernel | None, str]:
    """The fused kernel for a device, dtype and head dim, or why there is none."""
    head_dim, device, dtype = query.shape[3], query.device, query.dtype
    if device.type == "cpu" and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        if dtype is torch.bfloat16 and tiles_are_faster():
            return CpuFlashKernel(tiles_from=TILES_FROM), ""
        return CpuFlashKernel(BACKWARD_ROWS if dtype is torch.bfloat16 else None), ""
    if device.type == "cuda" and head_dim % 8 == 0 and dtype in (torch.float32, torch.bfloat16, torch.float16):
        recent = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
        if recent and dtype.itemsize == 2 and head_dim <= 256:
            functions = installed_flash_attn() if torch.version.hip is None else None
            return CudaFlashKernel() if functions is None else FlashAttnKernel(functions, softcap), ""
        if recent or dtype is not torch.bfloat16:
            return CudaEfficientKernel(), ""
    if device.type == "meta":
        # Nothing is computed there: the kernels of a GPU, whose results and work space have its shapes.
        return CudaFlashKernel() if dtype.itemsize == 2 and head_dim <= 256 else CpuFlashKernel(), ""
    return None, f"there is no fused kernel for {dtype} with head dim {head_dim} on {device.type}"


def tiles_are_faster() -> bool:
    """Whether bf16 on this CPU goes to our own tiles.

    torch's fused kernel spreads heads over threads, and makes use of a matrix unit.
    """
    return torch.get_num_threads() == 1 and has_bf16_products_alone()


@functools.lru_cache
def has_bf16_products_alone() -> bool:
    """This CPU has dot products of bf16 vectors, but no matrix unit."""
    vectors, matrices = (
        bool(getattr(torch.cpu, f"_is_{name}_supported", lambda: False)()) for name in ("avx512_bf16", "amx_tile")
    )
    return vectors and not matrices


@functools.lru_cache
def _announce(message: str) -> None:
    """Warn once for each message."""
    warnings.warn(message, stacklevel=2)


def attend(
    kernel: Kernel,
    tiles: Iterable[Tile],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    running: RunningAttention,
    scale: float,
    terms: Terms | None = None,
) -> None:
    """Merge the attention of tiles into `running`."""
    if query.numel() == 0:
        return
    with kept_memory():
        for tile in tiles:
            rows, keys = tile.queries, tile.keys
            here = None if terms is None else terms.part(rows, keys)
            running.settle()
            out, lse = kernel.forward(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], band=tile.band, scale=scale, terms=here
            )
            running.add(rows, out, lse)


def add_gradients(
    kernel: Kernel,
    tiles: Iterable[Tile],
    queries: Queries,
    key: Tensor,
    value: Tensor,
    into: Gradients,
    terms: Terms | None = None,
) -> None:
    """Add the gradients of tiles to the sums."""
    if queries.query.numel() == 0:
        return
    parts = (part for tile in tiles for part in _parts(kernel, tile, key.shape[3]))
    with kept_memory():
        for part, heads in itertools.product(parts, _heads_at_once(kernel, queries.query, key)):
            rows, keys = part.queries, part.keys
            kernel.backward(
                queries.part(heads, rows),
                key[:, :, keys],
                value[:, :, keys],
                band=part.band,
                terms=None if terms is None else terms.part(rows, keys).of_pass(slice(None), heads),
                into=into.part(heads, rows, keys),
            )


def _heads_at_once(kernel: Kernel, query: Tensor, key: Tensor) -> list[slice]:
    """Query heads of one backward call: all of them, or where rows are cut too, one for each key/value head."""
    share = query.shape[1] // key.shape[1]
    return [slice(None)] if kernel.backward_rows is None else [slice(first, None, share) for first in range(share)]


def _parts(kernel: Kernel, tile: Tile, head_dim: int) -> list[Tile]:
    """What backward is called on: slices of the tile with no more rows than the kernel may see at once.

    Where all queries see all keys, slices have not more than `BACKWARD_KEY_NUMBERS` of these.
    """
    if kernel.backward_rows is None or tile.queries.stop - tile.queries.start <= kernel.backward_rows:
        return [tile]
    most = BACKWARD_KEY_NUMBERS // head_dim
    cut = tile.cut(kernel.backward_rows)
    return [cell for part in cut for cell in (_columns(part, most) if part.band == FULL else [part])]


def _columns(tile: Tile, most: int) -> list[Tile]:
    """Parts with no more keys than that."""
    starts = range(tile.keys.start, tile.keys.stop, max(most, 1))
    cells = (tile.part(tile.queries, slice(start, min(start + most, tile.keys.stop))) for start in starts)
    return [cell for cell in cells if cell is not None]
