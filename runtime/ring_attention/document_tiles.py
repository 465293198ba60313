"""The tiles of packed documents, computed for all documents at once.

A rank's tokens are in the order of the sequence, whatever the layout: those of one document lie side by side, and so
do the keys that they see of any other rank. So each document has at most one tile in each step of the ring.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parcompile.layout.sequence import CpLayout, Mask, blocks_between, chunk_ids

from .kernels import Tile
from .kernels.packs import UNBOUNDED, Numbers, PackedTiles


@dataclass(frozen=True, slots=True)
class Masking:
    """Who may see whom, over the whole sequence; equal on all ranks.

    `window`: a query sees keys less than this many tokens away. `documents`: where documents begin, and the length of
    the sequence, as in `cu_seqlens`; nobody sees another document. `per_document`: the layout deals each document on
    its own.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    per_document: bool = False

    @property
    def deals_documents(self) -> bool:
        """There are documents, and the layout deals each on its own."""
        return self.per_document and self.documents is not None

    def borders(self, length: int) -> tuple[int, ...]:
        """Those of the documents, or of a sequence of so many tokens that is one."""
        return self.documents or (0, length)

    def has_bands(self, layout: CpLayout) -> bool:
        """Tiles may be other than rectangles in which all see all and causal squares.

        A document may have more stripes on one rank than on another, so that its diagonal misses the corners.
        """
        cut_stripes = layout is CpLayout.STRIPED and self.documents is not None and not self.per_document
        return self.window is not None or cut_stripes


def source_tiles(
    layout: CpLayout, size: int, rank: int, source: int, local_length: int, masking: Masking
) -> Sequence[Tile]:
    """What the schedule and the masks leave to compute for `rank` on the keys of `source`."""
    if masking.window is None and masking.deals_documents and source != rank:
        # Of all earlier ranks the same tiles, and of all later ones.
        source = 0 if source < rank else size - 1
    find = document_tiles if masking.window is None else windowed_tiles
    tiles = find(layout, size, rank, source, local_length, masking)
    return tuple(tiles) if masking.documents is None else tiles


@functools.lru_cache(maxsize=64)
def document_tiles(
    layout: CpLayout, size: int, rank: int, source: int, local_length: int, masking: Masking
) -> PackedTiles:
    """What `rank` computes on the keys of `source`, a tile for each document that has something there.

    Args:
        layout: how the sequence, or each document, is dealt to the ranks.
        size: ranks of the ring.
        rank: whose queries.
        source: whose keys.
        local_length: tokens of a rank.
        masking: without a window.
    """
    documents = masking.borders(local_length * size)
    blocks = blocks_between(layout, size, rank, source, causal=masking.causal)
    if not blocks:
        return _joined([])
    (block,) = blocks  # chunks are in order on both sides
    sides = []
    for holder, first, last in ((rank, block.q_start, block.q_stop), (source, block.kv_start, block.kv_stop)):
        if masking.deals_documents:
            starts = _numbers(documents)[:-1] // size
            chunks = (_numbers(documents)[1:] // size - starts) // layout.chunks_per_rank
            sides.append((starts + first * chunks, starts + last * chunks))
        else:
            chunk = local_length // layout.chunks_per_rank
            before = _tokens_before(layout, size, holder, local_length, documents)
            before = np.minimum(np.maximum(before, first * chunk), last * chunk)
            sides.append((before[:-1], before[1:]))
    (query_starts, query_stops), (key_starts, key_stops) = sides
    # Query i sees key j of the block if j ≤ i + upper: said from the corner of each tile.
    upper = key_stops - key_starts
    if block.mask is not Mask.FULL:
        upper = np.full_like(upper, 0 if block.mask is Mask.CAUSAL else -1)
        if not masking.deals_documents:
            upper += query_starts - key_starts
    lower = query_starts - query_stops  # nothing is hidden below
    return _joined([_within_bands(query_starts, query_stops, key_starts, key_stops, lower, upper)])


@functools.lru_cache(maxsize=64)
def windowed_tiles(
    layout: CpLayout, size: int, rank: int, source: int, local_length: int, masking: Masking
) -> PackedTiles:
    """As `document_tiles`, where a query sees keys less than a window away: a tile for each pair of chunks."""
    assert masking.window is not None
    blocks = blocks_between(layout, size, rank, source, causal=masking.causal)
    stride, reach = layout.stride(size), masking.window - 1
    starts, stops = _filled(masking.borders(local_length * size))
    found = []
    for block in blocks:
        for query in range(block.q_start, block.q_stop):
            for key in range(block.kv_start, block.kv_stop):
                ids = chunk_ids(layout, size, rank)[query], chunk_ids(layout, size, source)[key]
                if masking.deals_documents:
                    length = (stops - starts) // size // layout.chunks_per_rank
                    places = [starts // size + index * length for index in (query, key)]
                    sides = [(place, place + length) for place in places]
                    ahead = (ids[0] - ids[1]) * (np.ones_like(length) if stride > 1 else length)
                    corner = np.zeros_like(length)
                else:
                    whole = local_length // layout.chunks_per_rank
                    firsts = ids if stride > 1 else (ids[0] * whole, ids[1] * whole)
                    inside = [
                        [np.clip(-((first - border) // stride), 0, whole) for border in (starts, stops)]
                        for first in firsts
                    ]
                    sides = [
                        (index * whole + begin, index * whole + end)
                        for index, (begin, end) in zip((query, key), inside, strict=True)
                    ]
                    ahead = np.full_like(starts, firsts[0] - firsts[1])
                    corner = inside[1][0] - inside[0][0]
                lower = -((reach - ahead) // stride) - corner
                upper = ((0 if masking.causal else reach) + ahead) // stride - corner
                found.append(_within_bands(*sides[0], *sides[1], lower, upper))
    return _joined(found)


def _joined(found: list[tuple[Numbers, ...]]) -> PackedTiles:
    """What is left of the tiles that `_within_bands` gave."""
    if not found:
        return PackedTiles(*(np.zeros(0, dtype=np.int64) for _ in range(6)))
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    present = columns.pop().astype(bool)
    return PackedTiles(*(column[present] for column in columns))


def _within_bands(
    first: Numbers, last: Numbers, start: Numbers, stop: Numbers, lower: Numbers, upper: Numbers
) -> tuple[Numbers, ...]:
    """`Tile.trimmed` of many tiles: their columns as `PackedTiles` has them, and whether anything is left of each."""
    rows, columns = last - first, stop - start
    first_row, last_row = np.maximum(0, -upper), np.minimum(rows - 1, columns - 1 - lower)
    first_column, last_column = np.maximum(0, first_row + lower), np.minimum(columns - 1, last_row + upper)
    present = (rows > 0) & (columns > 0) & (first_row <= last_row) & (first_column <= last_column) & (lower <= upper)
    shift = first_row - first_column
    lower, upper = lower + shift, upper + shift
    return (
        first + first_row,
        first + last_row + 1,
        start + first_column,
        start + last_column + 1,
        np.where(upper < last_column - first_column, upper, UNBOUNDED),
        np.where(lower > first_row - last_row, lower, UNBOUNDED),
        present,
    )


def some_rank_sees(layout: CpLayout, size: int, sources: list[int], local_length: int, masking: Masking) -> bool:
    """Whether any rank has a tile on the keys of its entry of `sources`, where a window hides what is further away."""
    assert masking.window is not None
    window = masking.window
    starts, stops = _filled(masking.borders(local_length * size))
    if not len(starts):
        return False
    if layout is CpLayout.STRIPED:
        away = [(rank - source) % size for rank, source in enumerate(sources)]
        nearest = [(rank, each) for rank, each in enumerate(away)]
        nearest += (
            [] if masking.causal else [(source, -each % size) for source, each in zip(sources, away, strict=True)]
        )
        # A query at least so far behind the begin of a document, on this rank.
        return any(
            each < window and bool((starts + each + (rank - starts - each) % size < stops).any())
            for rank, each in nearest
        )
    return _some_meet(_chunks_in_reach(layout, size, local_length, masking), layout, size, sources)


@functools.lru_cache(maxsize=4)
def _chunks_in_reach(layout: CpLayout, size: int, local_length: int, masking: Masking) -> npt.NDArray[np.bool_]:
    """For each two chunks [query, key] whether a token of the first sees one of the second through the window.

    The nearest tokens of two chunks are the ends that face each other.
    """
    assert masking.window is not None
    ids, documents = np.arange(size * layout.chunks_per_rank), masking.borders(local_length * size)
    chunk = local_length // layout.chunks_per_rank
    if masking.deals_documents:
        lengths = np.diff(_numbers(documents))
        chunk = int(lengths[lengths > 0].min()) // len(ids)
        meet = ids[:, None] >= ids[None, :] if masking.causal else np.ones((len(ids), len(ids)), dtype=bool)
    else:
        meet = _chunks_that_meet(layout, size, local_length, documents, masking.causal)
    return np.asarray(meet & ((np.abs(ids[:, None] - ids[None, :]) - 1) * chunk + 1 < masking.window))


def _some_meet(seen: npt.NDArray[np.bool_], layout: CpLayout, size: int, sources: list[int]) -> bool:
    """Whether any rank has a chunk that sees one of its entry of `sources`."""
    held = _held_chunks(layout, size)
    return bool(seen[held[:, :, None], held[sources][:, None, :]].any())


@functools.lru_cache(maxsize=4)
def _held_chunks(layout: CpLayout, size: int) -> Numbers:
    """The chunks of each rank."""
    return np.asarray([chunk_ids(layout, size, rank) for rank in range(size)])


def some_rank_computes(layout: CpLayout, size: int, sources: list[int], local_length: int, masking: Masking) -> bool:
    """Whether any rank has a tile on the keys of its entry of `sources`; for a sequence that is dealt as a whole."""
    if not local_length:
        return False
    documents = masking.borders(local_length * size)
    if layout is CpLayout.STRIPED:
        longest = int(np.diff(_numbers(documents)).max())
        # Each rank then has a query in the second half of a document, and each other one a key in the first.
        return longest >= 2 * size or any(
            len(document_tiles(layout, size, rank, source, local_length, masking))
            for rank, source in enumerate(sources)
        )
    return _some_meet(_chunks_that_meet(layout, size, local_length, documents, masking.causal), layout, size, sources)


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


def _filled(documents: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """Where the documents that have tokens start and stop."""
    borders = _numbers(documents)
    has_tokens = borders[1:] > borders[:-1]
    return borders[:-1][has_tokens], borders[1:][has_tokens]
