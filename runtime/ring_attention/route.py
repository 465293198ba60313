"""The steps of a rank in the ring: the compiler's schedule with its blocks in tokens, cut down by further masks.

The schedule says which chunks of queries attend to which chunks of keys in which step. A sliding window or the borders
of documents can only take away from that: they make tiles smaller, and a step in which no rank has a tile left is left
out, keys and all.
"""

from __future__ import annotations

import functools
import itertools
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompile.layout.sequence import CpLayout, Mask, blocks_between, chunk_ids, ring_holder, ring_source

from .document_tiles import document_tiles, some_rank_computes, some_rank_sees, windowed_tiles
from .kernels import CAUSAL, FULL, STRICT, Band, Tile

_BANDS = {Mask.FULL: FULL, Mask.CAUSAL: CAUSAL, Mask.STRICT: STRICT}


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
    def refines_blocks(self) -> bool:
        """Less is to compute than the blocks of the schedule."""
        return self.window is not None or (self.documents is not None and not self.per_document)

    def has_bands(self, layout: CpLayout) -> bool:
        """Tiles may be other than rectangles in which all see all and causal squares.

        A document may have more stripes on one rank than on another, so that its diagonal misses the corners.
        """
        cut_stripes = layout is CpLayout.STRIPED and self.documents is not None and not self.per_document
        return self.window is not None or cut_stripes


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
        pairs = [(rank, ring_source(step, rank, size, inner or size)) for rank in range(size)]
        if masking.documents is not None and masking.window is None and not masking.per_document:
            sources = [source for _, source in pairs]
            return some_rank_computes(layout, size, sources, local_length, masking.documents, causal=masking.causal)
        if masking.window is not None:
            return some_rank_sees(
                layout,
                size,
                [source for _, source in pairs],
                local_length,
                masking.documents or (0, local_length * size),
                masking.window,
                causal=masking.causal,
                per_document=masking.per_document and masking.documents is not None,
            )
        return any(blocks_between(layout, size, rank, source, causal=masking.causal) for rank, source in pairs)

    return (0, *(step for step in range(1, size) if is_needed(step)))


def source_tiles(
    layout: CpLayout, size: int, rank: int, source: int, local_length: int, masking: Masking
) -> Sequence[Tile]:
    """What the schedule and the masks leave to compute for `rank` on the keys of `source`."""
    if masking.documents is None:
        return tuple(_tile_by_tile(layout, size, rank, source, local_length, masking))
    if masking.window is not None:
        return windowed_tiles(
            layout,
            size,
            rank,
            source,
            local_length,
            masking.documents,
            masking.window,
            causal=masking.causal,
            per_document=masking.per_document,
        )
    if masking.per_document and source != rank:
        # Of all earlier ranks the same tiles, and of all later ones.
        source = 0 if source < rank else size - 1
    return document_tiles(
        layout,
        size,
        rank,
        source,
        local_length,
        masking.documents,
        causal=masking.causal,
        per_document=masking.per_document,
    )


def _tile_by_tile(
    layout: CpLayout, size: int, rank: int, source: int, local_length: int, masking: Masking
) -> Iterator[Tile]:
    blocks = blocks_between(layout, size, rank, source, causal=masking.causal)
    for start, stop in dealt_alone(size, local_length, masking):
        chunk = (stop - start) // layout.chunks_per_rank
        for block in blocks:
            if not masking.refines_blocks:
                trimmed = Tile(
                    slice(start + block.q_start * chunk, start + block.q_stop * chunk),
                    slice(start + block.kv_start * chunk, start + block.kv_stop * chunk),
                    _BANDS[block.mask],
                ).trimmed()
                if trimmed is not None:
                    yield trimmed
                continue
            queries, keys = chunk_ids(layout, size, rank), chunk_ids(layout, size, source)
            for query in range(block.q_start, block.q_stop):
                for key in range(block.kv_start, block.kv_stop):
                    yield from _masked(
                        _Chunk.of(layout, size, queries[query], start + query * chunk, chunk),
                        _Chunk.of(layout, size, keys[key], start + key * chunk, chunk),
                        masking,
                    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk: token i is at `place + i` of a rank's tensors and at position `first + i · stride` of the sequence."""

    place: int
    first: int
    stride: int
    length: int

    @classmethod
    def of(cls, layout: CpLayout, size: int, chunk_id: int, place: int, length: int) -> _Chunk:
        stride = layout.stride(size)
        return cls(place, chunk_id if stride > 1 else chunk_id * length, stride, length)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.first + (self.length - 1) * self.stride + 1 if self.length else self.first

    def within(self, first: int, stop: int) -> tuple[int, int]:
        """The tokens whose positions are in `[first, stop)`."""
        return self._tokens_before(first), self._tokens_before(stop)

    def _tokens_before(self, position: int) -> int:
        return max(0, min(self.length, -((self.first - position) // self.stride)))


def _masked(queries: _Chunk, keys: _Chunk, masking: Masking) -> Iterator[Tile]:
    """The tiles of one chunk of queries and one of keys: one for each document that both hold."""
    ahead, stride, window = queries.first - keys.first, queries.stride, masking.window
    for first, stop in _documents_of(max(queries.first, keys.first), min(queries.stop, keys.stop), masking):
        query_first, query_stop = queries.within(first, stop)
        key_first, key_stop = keys.within(first, stop)
        if query_first >= query_stop or key_first >= key_stop:
            continue
        # Key position − query position = (key − query) · stride − ahead lies between −(window − 1) and `most`.
        most = 0 if masking.causal else None if window is None else window - 1
        corner = key_first - query_first
        tile = Tile(
            slice(queries.place + query_first, queries.place + query_stop),
            slice(keys.place + key_first, keys.place + key_stop),
            Band(
                None if window is None else -((window - 1 - ahead) // stride) - corner,
                None if most is None else (most + ahead) // stride - corner,
            ),
        ).trimmed()
        if tile is not None:
            yield tile


def _documents_of(begin: int, end: int, masking: Masking) -> Iterator[tuple[int, int]]:
    """First and last position of the documents that reach into `[begin, end)`.

    `end` may lie before `begin`: the document at `begin` then has to reach back to before `end`.
    """
    if masking.documents is None or masking.per_document:
        yield 0, sys.maxsize
        return
    borders = masking.documents
    index = bisect_right(borders, begin) - 1
    while index < len(borders) - 1 and borders[index] < end:
        if borders[index + 1] > borders[index]:
            yield borders[index], borders[index + 1]
        index += 1


def dealt_alone(size: int, local_length: int, masking: Masking) -> Iterator[tuple[int, int]]:
    """The local tokens of everything that the layout deals on its own: the sequence, or each document."""
    if masking.documents is None or not masking.per_document:
        yield 0, local_length
        return
    borders = [border // size for border in masking.documents]
    yield from itertools.pairwise(borders)


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
