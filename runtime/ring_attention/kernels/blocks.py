"""Runs a kernel tile by tile over one local block of keys, and joins what it returns to the rest.

Shapes: query [B, H, Q, D], key [B, K, S, D], value [B, K, S, E], log-sum-exp [B, H, Q]; H is a multiple of K (grouped
queries).

Joins the attention of one block of keys after another into the attention over all of them.

Shapes: B batch, H query heads, S query tokens, D head dim. Log-sum-exp is the natural logarithm; −inf says "no key was
seen".

KeySource: the online softmax of arXiv 1805.02867, in the form with normalised partial outputs (arXiv 2112.05682).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from . import FULL, Tile, spans
from .cpu_tiles import kept_memory
from .kernel import Kernel, PackingKernel, Terms, accumulation_dtype
from .packs import Launch, PackedTiles


def unseen_rows_to_infinity(lse: Tensor) -> Tensor:
    """Log-sum-exp for a backward kernel: `exp(score − lse)` must be 0, not NaN, in rows that saw no key."""
    return lse.masked_fill(lse == -math.inf, math.inf)


_CACHE_BYTES = 1 << 19
"""Merging on CPUs: so much of the fp32 sum at a time, which stays in the cache, as does what is made of the block."""


class RunningAttention:
    """Attention of queries over the keys seen so far.

    Blocks are merged in fp32 (fp64 for fp64), whatever the dtype of the output; a sum over all queries is held only
    from the third block on. The first block stays as the kernel gave it, and the last one joins the sum on its way into
    the output.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """Start with no key seen: `finish` fills `out` [B, H, S, D], and `lse` [B, H, S] in fp32 or fp64."""
        self.out, self.lse = out, lse
        self._first: Tensor | None = None
        self._sum: Tensor | None = None
        self._latest: tuple[slice, Tensor, Tensor] | None = None

    def add(self, rows: slice, block_out: Tensor, block_lse: Tensor) -> None:
        """Merge the attention of the queries `rows` over keys that were not seen before; the block is taken over."""
        self.settle()
        start, stop, _ = rows.indices(self.out.shape[2])
        if self._first is None and self._sum is None:
            if stop - start == self.out.shape[2]:
                self._first = block_out
                self.lse.copy_(block_lse)
                return
            self._total()
        lse = self.lse[:, :, start:stop]
        # new = old + weight · (block − old): one pass over the output, a convex combination whatever the magnitudes.
        weight = torch.sigmoid(block_lse - lse).masked_fill_(block_lse == -math.inf, 0.0)
        lse.copy_(torch.logaddexp(lse, block_lse))
        self._latest = slice(start, stop), block_out, weight.unsqueeze(-1)

    def settle(self) -> None:
        """Bring the latest block into the sum, so that its memory is free for the next one."""
        if self._latest is not None:
            self._join(self._total())

    def add_sinks(self, logits_H: Tensor) -> None:
        """Merge one more key for every query of a head, with this score and a value of 0."""
        self.settle()
        total = self._total()
        lse = torch.logaddexp(self.lse, logits_H.to(self.lse.dtype).view(1, -1, 1))
        total.mul_(torch.exp(self.lse - lse).unsqueeze(-1))
        self.lse.copy_(lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp; queries that saw no key have output 0 and log-sum-exp −inf."""
        held = self._total() if self._first is None else self._first
        rows = slice(0, 0) if self._latest is None else self._latest[0]
        self._join(held, self.out)
        if held is not self.out:
            for rest in (slice(0, rows.start), slice(rows.stop, None)):
                self.out[:, :, rest].copy_(held[:, :, rest])
        self._first, self._sum = None, self.out
        return self.out, self.lse

    def _total(self) -> Tensor:
        """The sum over all queries, in fp32 or fp64."""
        if self._sum is None:
            dtype = accumulation_dtype(self.out.dtype)
            self._sum = self.out if self.out.dtype is dtype else torch.empty_like(self.out, dtype=dtype)
            if self._first is None:
                self._sum.zero_()
                self.lse.fill_(-math.inf)
            else:
                self._sum.copy_(self._first)
                self._first = None
        return self._sum

    def _join(self, held: Tensor, into: Tensor | None = None) -> None:
        """Merge the latest block into what is held, and put its queries into `into`."""
        if self._latest is None:
            return
        (rows, block_out, weight), self._latest = self._latest, None
        dtype = self.lse.dtype
        for part in _slices(rows.stop - rows.start, held):
            here = slice(rows.start + part.start, rows.start + part.stop)
            merged = held[:, :, here].to(dtype).lerp_(block_out[:, :, part].to(dtype), weight[:, :, part])
            if into is not None and into is not held:
                into[:, :, here].copy_(merged)


def _slices(length: int, like: Tensor) -> Iterator[slice]:
    """Slices of so many rows; on a GPU all of them at once."""
    row_bytes = 4 * like[:, :, :1].numel()
    most = length if like.device.type != "cpu" else _CACHE_BYTES // max(row_bytes, 1)
    return spans(0, length, max(most, 1))


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
