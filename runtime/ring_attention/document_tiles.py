"""The tiles of packed documents, computed for all documents at once.

A rank's tokens are in the order of the sequence, whatever the layout: those of one document lie side by side, and so
do the keys that they see of any other rank. So each document has at most one tile in each step of the ring.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from parcompile.layout.sequence import Block, CpLayout, Mask, chunk_ids, ring_schedule

from .kernels.packs import UNBOUNDED, Numbers, PackedTiles


@functools.lru_cache(maxsize=64)
def document_tiles(
    layout: CpLayout,
    size: int,
    rank: int,
    source: int,
    local_length: int,
    documents: tuple[int, ...],
    *,
    causal: bool,
    per_document: bool,
) -> PackedTiles:
    """What `rank` computes on the keys of `source`, a tile for each document that has something there.

    Args:
        layout: how the sequence, or with `per_document` each document, is dealt to the ranks.
        size: ranks of the ring.
        rank: whose queries.
        source: whose keys.
        local_length: tokens of a rank.
        documents: where documents begin in the sequence, and its length.
        causal: a query sees no later key.
        per_document: see `layout`.
    """
    blocks = ring_schedule(layout, size, rank, causal=causal)[(rank - source) % size].blocks
    nothing = np.zeros(0, dtype=np.int64)
    if not blocks:
        return PackedTiles(nothing, nothing, nothing, nothing, nothing)
    (block,) = blocks  # chunks are in order on both sides
    sides = []
    for holder, first, last in ((rank, block.q_start, block.q_stop), (source, block.kv_start, block.kv_stop)):
        if per_document:
            starts = _numbers(documents)[:-1] // size
            chunks = (_numbers(documents)[1:] // size - starts) // layout.chunks_per_rank
            sides.append((starts + first * chunks, starts + last * chunks))
        else:
            chunk = local_length // layout.chunks_per_rank
            before = _tokens_before(layout, size, holder, local_length, documents)
            before = np.minimum(np.maximum(before, first * chunk), last * chunk)
            sides.append((before[:-1], before[1:]))
    return _trimmed(block, *sides, per_document=per_document)


def some_rank_computes(
    layout: CpLayout, size: int, sources: list[int], local_length: int, documents: tuple[int, ...], *, causal: bool
) -> bool:
    """Whether any rank has a tile on the keys of its entry of `sources`; for a sequence that is dealt as a whole."""
    if not local_length:
        return False
    if layout is CpLayout.STRIPED:
        longest = int(np.diff(_numbers(documents)).max())
        # Each rank then has a query in the second half of a document, and each other one a key in the first.
        return longest >= 2 * size or any(
            len(document_tiles(layout, size, rank, source, local_length, documents, causal=causal, per_document=False))
            for rank, source in enumerate(sources)
        )
    seen = _chunks_that_meet(layout, size, local_length, documents, causal)
    return any(
        seen[query, key]
        for rank, source in enumerate(sources)
        for query in chunk_ids(layout, size, rank)
        for key in chunk_ids(layout, size, source)
    )


@functools.lru_cache(maxsize=4)
def _chunks_that_meet(
    layout: CpLayout, size: int, local_length: int, documents: tuple[int, ...], causal: bool
) -> npt.NDArray[np.bool_]:
    """For each two chunks [query, key] whether a token of the first sees one of the second.

    Chunks that hold the same document have nothing else between them: the later one begins with it, and the earlier
    one ends with it.
    """
    chunk = local_length // layout.chunks_per_rank
    ids = np.arange(size * layout.chunks_per_rank)
    first, last = (np.searchsorted(_numbers(documents), ids * chunk + each, side="right") for each in (0, chunk - 1))
    meet = (first[:, None] == last[None, :]) & (ids[:, None] > ids[None, :])
    if not causal:
        meet |= meet.T
    return np.asarray(meet | (ids[:, None] == ids[None, :]))


@functools.lru_cache(maxsize=8)
def _tokens_before(layout: CpLayout, size: int, rank: int, local_length: int, documents: tuple[int, ...]) -> Numbers:
    """For each border how many tokens of the rank lie before it."""
    borders = _numbers(documents)
    if layout is CpLayout.STRIPED:
        return np.minimum(np.maximum(-((rank - borders) // size), 0), local_length)
    chunk = local_length // layout.chunks_per_rank
    found = np.zeros_like(borders)
    for number in chunk_ids(layout, size, rank):
        found += np.minimum(np.maximum(borders - number * chunk, 0), chunk)
    return found


@functools.lru_cache(maxsize=4)
def _numbers(documents: tuple[int, ...]) -> Numbers:
    return np.asarray(documents, dtype=np.int64)


def _trimmed(
    block: Block, query_sides: tuple[Numbers, Numbers], key_sides: tuple[Numbers, Numbers], *, per_document: bool
) -> PackedTiles:
    """`Tile.trimmed` of what each document has in a block of the schedule."""
    (first, last), (start, stop) = query_sides, key_sides
    present = (last > first) & (stop > start)
    first, last, start, stop = (side[present] for side in (first, last, start, stop))
    if block.mask is Mask.FULL:
        return PackedTiles(first, last, start, stop, np.full_like(first, UNBOUNDED))
    # Query i sees key j of the block if j ≤ i + upper: said from the corner of each tile.
    upper = np.full_like(first, 0 if block.mask is Mask.CAUSAL else -1)
    if not per_document:
        upper += first - start
    cut = np.maximum(0, -upper)
    first, upper = first + cut, upper + cut
    stop = np.minimum(stop, start + (last - first) + upper)
    present = (last > first) & (stop > start)
    first, last, start, stop, upper = (side[present] for side in (first, last, start, stop, upper))
    # Where the first query sees the last key, nothing is cut off.
    return PackedTiles(first, last, start, stop, np.where(upper < stop - start - 1, upper, UNBOUNDED))
