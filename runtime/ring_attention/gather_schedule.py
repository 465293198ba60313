"""What a rank attends to once the keys of all others are at hand: few and large tiles instead of a ring's many.

The keys are laid in the order of the sequence, so that all that a chunk of queries sees before its own diagonal is one
rectangle.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompile.layout.sequence import CpLayout, chunk_ids

from .document_tiles import Masking, source_tiles
from .kernels import FULL, Tile
from .kernels.packs import PackedTiles
from .route import Hop, check_route, dealt_alone, effective_layout, needed_steps


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive keys of one of the sources: `part` counts the sources of a `GatherSchedule`."""

    part: int
    keys: slice


@dataclass(frozen=True, slots=True)
class GatherSchedule:
    """`tiles` are local queries × gathered keys; the gathered keys are `pieces`, one after the other.

    `hops` are the exchanges that bring the keys of other ranks, all of which may be made at once: part 0 is the rank's
    own, part i comes with hop i − 1 and belongs to rank `sources[i]`. The gradients of that part go back the same way.
    """

    tiles: Sequence[Tile]
    pieces: tuple[Piece, ...]
    hops: tuple[Hop, ...]
    sources: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def plan_gather(layout: CpLayout, size: int, rank: int, local_length: int, masking: Masking) -> GatherSchedule:
    """What `rank` gathers and computes. Ranks whose keys a window hides from everybody send nothing.

    Raises:
        ValueError: as `plan_route`.
    """
    layout = effective_layout(layout, size)
    check_route(layout, size, local_length, masking)
    steps = needed_steps(layout, size, local_length, masking)
    chunks = _chunks(layout, size, local_length, masking)
    sources = [(rank - step) % size for step in steps]
    pieces = _in_order(layout, size, sources, chunks)
    places, place = {}, 0
    for piece in pieces:
        places[piece.part, piece.keys.start] = place
        place += piece.keys.stop - piece.keys.start
    tiles = []
    for part, source in enumerate(sources):
        for tile in source_tiles(layout, size, rank, source, local_length, masking):
            for (_, queries), (chunk, keys) in itertools.product(_cut(tile.queries, chunks), _cut(tile.keys, chunks)):
                cell = tile.part(queries, keys)
                if cell is not None:
                    by = places[part, chunk.tokens.start] - chunk.tokens.start
                    tiles.append(Tile(cell.queries, slice(cell.keys.start + by, cell.keys.stop + by), cell.band))
    hops = tuple(Hop((rank + step) % size, (rank - step) % size) for step in steps[1:])
    joined: Sequence[Tile] = _joined(tiles)
    if masking.documents is not None:
        joined = PackedTiles.of(joined)
    return GatherSchedule(joined, pieces, hops, tuple(sources))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of every rank: its local tokens, which of the rank's chunks it is, and where what is dealt out begins."""

    tokens: slice
    index: int
    begin: int


def _chunks(layout: CpLayout, size: int, local_length: int, masking: Masking) -> list[_Chunk]:
    found = []
    for start, stop in dealt_alone(size, local_length, masking):
        length = (stop - start) // layout.chunks_per_rank
        found += [
            _Chunk(slice(first, first + length), index, start * size)
            for index, first in enumerate(range(start, stop, max(length, 1)))
        ]
    return found


def _in_order(layout: CpLayout, size: int, sources: list[int], chunks: list[_Chunk]) -> tuple[Piece, ...]:
    """The chunks of all sources as they follow each other in the sequence; stripes lie one after the other."""
    found = [
        (chunk.begin, chunk_ids(layout, size, source)[chunk.index], part, chunk.tokens)
        for part, source in enumerate(sources)
        for chunk in chunks
    ]
    return tuple(Piece(part, tokens) for _, _, part, tokens in sorted(found, key=lambda each: each[:3]))


def _cut(tokens: slice, chunks: list[_Chunk]) -> Iterator[tuple[_Chunk, slice]]:
    """The parts of these local tokens that lie in one chunk, with it."""
    index = bisect_right(chunks, tokens.start, key=lambda chunk: chunk.tokens.start) - 1
    for chunk in itertools.islice(chunks, index, None):
        if chunk.tokens.start >= tokens.stop:
            return
        yield (chunk, slice(max(tokens.start, chunk.tokens.start), min(tokens.stop, chunk.tokens.stop)))


def _joined(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Neighbouring rectangles of the same queries become one."""
    found: list[Tile] = []
    for tile in sorted(tiles, key=lambda each: (each.queries.start, each.queries.stop, each.keys.start)):
        before = found[-1] if found else None
        follows = before and before.queries == tile.queries and before.keys.stop == tile.keys.start
        if before and follows and before.band == FULL == tile.band:
            found[-1] = Tile(tile.queries, slice(before.keys.start, tile.keys.stop))
        else:
            found.append(tile)
    return tuple(found)
