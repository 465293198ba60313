"""Runs a kernel tile by tile over one local block of keys, and joins what it returns to the rest.

Shapes: query [B, H, Q, D], key [B, K, S, D], value [B, K, S, E], log-sum-exp [B, H, Q]; H is a multiple of K (grouped
queries).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from . import FULL, Tile
from .cpu_tiles import kept_memory
from .kernel import Kernel, PackingKernel, Terms
from .merge import RunningAttention
from .packs import Launch, PackedTiles

BACKWARD_KEY_NUMBERS = 1 << 18
"""Numbers of one head's keys in one backward call of these: its results are in memory beside the sums."""


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
    if terms is None and isinstance(kernel, PackingKernel):
        for launch in (launches := _launches(tiles, query, key)):
            running.settle()
            running.add(slice(None), *kernel.forward_packed(query, key, value, launch=launch, scale=scale))
        if launches:
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
    if terms is None and isinstance(kernel, PackingKernel):
        every = slice(None)
        for launch in (launches := _launches(tiles, queries.query, key)):
            kernel.backward_packed(queries.part(every, every), key, value, launch=launch, into=into)
        if launches:
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


def _launches(tiles: Iterable[Tile], query: Tensor, key: Tensor) -> tuple[Launch, ...]:
    """Those that compute the tiles together; none where there are as few tiles as launches, which skip other rows."""
    if not isinstance(tiles, PackedTiles) or len(tiles) < 2:
        return ()
    launches = tiles.launches(query.shape[2], key.shape[2], query.device)
    return launches if len(launches) * query.shape[0] < len(tiles) else ()


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
