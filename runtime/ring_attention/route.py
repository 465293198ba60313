"""The steps of a rank in the ring: the compiler's schedule with its blocks in tokens, cut down by further masks.

The schedule says which chunks of queries attend to which chunks of keys in which step. A sliding window or the borders
of documents can only take away from that: they make tiles smaller, and a step in which no rank has a tile left is left
out, keys and all.

What a rank attends to once the keys of all others are at hand: few and large tiles instead of a ring's many.

The keys are laid in the order of the sequence, so that all that a chunk of queries sees before its own diagonal is one
rectangle.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompile.layout.sequence import CpLayout, blocks_between, chunk_ids, ring_holder, ring_source

from .document_tiles import Masking, some_rank_computes, some_rank_sees, source_tiles
from .kernels import FULL, Tile
from .kernels.packs import PackedTiles


@dataclass(frozen=True, slots=True)
class Hop:
    """Whom to send to and whom to receive from, as ranks within the group."""

    send_to: int
    receive_from: int

    def reversed(self) -> Hop:
        """The way back."""
        return Hop(self.receive_from, self.send_to)


@dataclass(frozen=True, slots=True)
class RingStep:
    """The tiles to compute with the keys and values of rank `source`, and how these move on.

    `keys_hop` brings the next keys and values (None in the last step). `gradients_hop` takes their gradients on after
    this step, at last to their owner (None in step 0, where they are the rank's own).
    """

    source: int
    tiles: Sequence[Tile]
    keys_hop: Hop | None
    gradients_hop: Hop | None


@functools.lru_cache(maxsize=256)
def plan_route(
    layout: CpLayout, size: int, rank: int, local_length: int, masking: Masking, inner: int | None = None
) -> tuple[RingStep, ...]:
    """The steps of `rank` in a ring of `size` ranks, each of which holds `local_length` tokens.

    `inner`: a double ring. Keys go round among this many neighbouring ranks before all of them move on to the next such
    neighbours at once (arXiv 2406.18485, section 4.4).

    Raises:
        ValueError: the local tokens or documents cannot be cut into the layout's chunks, the documents do not fill the
            sequence, or the inner rings do not fill the outer one.
    """
    layout = effective_layout(layout, size)
    inner = inner or size
    if size % inner:
        raise ValueError(f"ring attention: inner rings of {inner} ranks do not divide a ring of {size} ranks")
    check_route(layout, size, local_length, masking)
    needed = needed_steps(layout, size, local_length, masking, inner)
    hops = []
    for now, then in zip(needed, [*needed[1:], 0], strict=True):
        # The keys of `mine` go to the rank that has its turn with them next; those of `theirs` are mine then.
        mine, theirs = ring_source(now, rank, size, inner), ring_source(then, rank, size, inner)
        hops.append(Hop(ring_holder(then, mine, size, inner), ring_holder(now, theirs, size, inner)))
    last = len(needed) - 1
    return tuple(
        RingStep(
            ring_source(step, rank, size, inner),
            source_tiles(layout, size, rank, ring_source(step, rank, size, inner), local_length, masking),
            hops[index] if index < last else None,
            hops[index] if index > 0 else None,
        )
        for index, step in enumerate(needed)
    )


def effective_layout(layout: CpLayout, size: int) -> CpLayout:
    """One rank holds the whole sequence in order, whatever the layout."""
    return layout if size > 1 else CpLayout.CONTIGUOUS


def needed_steps(
    layout: CpLayout, size: int, local_length: int, masking: Masking, inner: int | None = None
) -> tuple[int, ...]:
    """The steps in which any rank has something to compute, beginning with 0, the rank's own keys."""

    def is_needed(step: int) -> bool:
        sources = [ring_source(step, rank, size, inner or size) for rank in range(size)]
        if masking.window is not None:
            return some_rank_sees(layout, size, sources, local_length, masking)
        if masking.documents is not None and not masking.per_document:
            return some_rank_computes(layout, size, sources, local_length, masking)
        return any(blocks_between(layout, size, *pair, causal=masking.causal) for pair in enumerate(sources))

    return (0, *(step for step in range(1, size) if is_needed(step)))


def dealt_alone(size: int, local_length: int, masking: Masking) -> Iterator[tuple[int, int]]:
    """The local tokens of everything that the layout deals on its own: the sequence, or each document."""
    borders = masking.documents if masking.documents is not None and masking.per_document else (0, local_length * size)
    yield from itertools.pairwise(border // size for border in borders)


def check_route(layout: CpLayout, size: int, local_length: int, masking: Masking) -> None:
    """Raise ValueError, with the numbers, where tokens, documents and window do not fit the ranks."""
    chunks = layout.chunks_per_rank
    documents = masking.documents
    if masking.window is not None and masking.window < 1:
        raise ValueError(f"ring attention: window {masking.window} must be at least 1: the token itself")
    length = local_length * size
    if documents is not None and (
        documents[:1] != (0,) or documents[-1] != length or sorted(documents) != list(documents)
    ):
        raise ValueError(
            f"ring attention: documents must rise from 0 to the length of the sequence = {local_length} local tokens "
            f"· {size} ranks = {length}, got {_shown(documents)}"
        )
    if documents is not None and masking.per_document:
        for start, stop in itertools.pairwise(documents):
            if (stop - start) % (chunks * size):
                raise ValueError(
                    f"ring attention: the document at {start} has {stop - start} tokens, which is no multiple of "
                    f"{chunks} · {size} ranks = {chunks * size} ({layout.value} layout per document): pad it"
                )
    elif local_length % chunks:
        raise ValueError(
            f"ring attention: {local_length} local tokens cannot be split into {chunks} equal chunks "
            f"({layout.value} layout): pad the sequence to a multiple of {chunks} · {size} ranks = {chunks * size}"
        )


def _shown(numbers: tuple[int, ...]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:4]))}, …, {numbers[-1]}]"


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
