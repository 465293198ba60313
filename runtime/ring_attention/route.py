"""A rank's way through the ring: the compiler's schedule, with blocks in tokens and what further masks leave of them.

The schedule says which chunks of queries attend to which chunks of keys in which step. A sliding window or the borders
of documents can only take away from that: they make tiles smaller, and a step in which no rank has a tile left is left
out, keys and all.
"""

from __future__ import annotations

import functools
import itertools
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from parcompile.layout.sequence import Block, CpLayout, Mask, chunk_ids, ring_schedule

from .tiles import CAUSAL, FULL, Band, Tile


@dataclass(frozen=True, slots=True)
class Hop:
    """Whom to send to and whom to receive from, as ranks within the group."""

    send_to: int
    receive_from: int


@dataclass(frozen=True, slots=True)
class Step:
    """The tiles to compute with the keys and values at hand, and how they move on.

    `keys_hop` brings the next keys and values (None in the last step). `gradients_hop` takes their gradients on after
    this step, at last to their owner (None in step 0, where they are the rank's own).
    """

    tiles: tuple[Tile, ...]
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


@functools.lru_cache(maxsize=256)
def plan_route(layout: CpLayout, size: int, rank: int, local_length: int, masking: Masking) -> tuple[Step, ...]:
    """The steps of `rank` in a ring of `size` ranks, each of which holds `local_length` tokens.

    Raises:
        ValueError: the local tokens or documents cannot be cut into the layout's chunks, or the documents do not fill
        the sequence.
    """
    if size == 1:
        # One rank holds the whole sequence in order, whatever the layout.
        layout = CpLayout.CONTIGUOUS
    _check(layout, size, local_length, masking)
    tiles = [tuple(_tiles(layout, size, rank, step, local_length, masking)) for step in range(size)]
    needed = [0, *(step for step in range(1, size) if _is_needed(layout, size, step, local_length, masking))]
    hops = [
        Hop((rank + after - before) % size, (rank - after + before) % size)
        for before, after in zip(needed, [*needed[1:], size], strict=True)
    ]
    last = len(needed) - 1
    return tuple(
        Step(tiles[step], hops[index] if index < last else None, hops[index] if index > 0 else None)
        for index, step in enumerate(needed)
    )


def _is_needed(layout: CpLayout, size: int, step: int, local_length: int, masking: Masking) -> bool:
    if not masking.refines_blocks:
        return any(ring_schedule(layout, size, rank, causal=masking.causal)[step].blocks for rank in range(size))
    return any(next(_tiles(layout, size, rank, step, local_length, masking), None) is not None for rank in range(size))


def _tiles(layout: CpLayout, size: int, rank: int, step: int, local_length: int, masking: Masking) -> Iterator[Tile]:
    """What the schedule and the masks leave to compute for `rank` in `step`."""
    scheduled = ring_schedule(layout, size, rank, causal=masking.causal)[step]
    for start, stop in _dealt_alone(size, local_length, masking):
        chunk = (stop - start) // layout.chunks_per_rank
        for block in scheduled.blocks:
            tile = Tile(
                slice(start + block.q_start * chunk, start + block.q_stop * chunk),
                slice(start + block.kv_start * chunk, start + block.kv_stop * chunk),
                CAUSAL if block.mask is Mask.CAUSAL else FULL,
            )
            if not masking.refines_blocks:
                trimmed = tile.trimmed()
                if trimmed is not None:
                    yield trimmed
                continue
            queries, keys = chunk_ids(layout, size, rank), chunk_ids(layout, size, scheduled.source)
            for pair in _chunk_pairs(block, queries, keys):
                yield from _masked(pair, start, chunk, masking)


@dataclass(frozen=True, slots=True)
class _ChunkPair:
    """A chunk of queries and a chunk of keys: their places in the rank's tensors and in the sequence."""

    query_place: int
    key_place: int
    query_chunk: int
    key_chunk: int


def _chunk_pairs(block: Block, queries: tuple[int, ...], keys: tuple[int, ...]) -> Iterator[_ChunkPair]:
    for query in range(block.q_start, block.q_stop):
        for key in range(block.kv_start, block.kv_stop):
            if block.mask is Mask.FULL or keys[key] <= queries[query]:
                yield _ChunkPair(query, key, queries[query], keys[key])


def _masked(pair: _ChunkPair, start: int, chunk: int, masking: Masking) -> Iterator[Tile]:
    """The tiles of one chunk of queries and one of keys: one for each document that both hold."""
    query_begin, key_begin = pair.query_chunk * chunk, pair.key_chunk * chunk
    for first, last in _documents_of(query_begin, query_begin + chunk, masking):
        query_first, query_last = max(first, query_begin), min(last, query_begin + chunk)
        key_first, key_last = max(first, key_begin), min(last, key_begin + chunk)
        if key_first >= key_last:
            continue
        ahead = query_first - key_first
        window = masking.window
        upper = ahead if masking.causal else None if window is None else ahead + window - 1
        tile = Tile(
            _shifted(query_first, query_last, start + pair.query_place * chunk - query_begin),
            _shifted(key_first, key_last, start + pair.key_place * chunk - key_begin),
            Band(None if window is None else ahead - window + 1, upper),
        ).trimmed()
        if tile is not None:
            yield tile


def _documents_of(begin: int, end: int, masking: Masking) -> Iterator[tuple[int, int]]:
    """First and last position of the documents that reach into `[begin, end)`."""
    if masking.documents is None or masking.per_document:
        yield 0, sys.maxsize
        return
    borders = masking.documents
    index = bisect_right(borders, begin) - 1
    while index < len(borders) - 1 and borders[index] < end:
        if borders[index + 1] > borders[index]:
            yield borders[index], borders[index + 1]
        index += 1


def _dealt_alone(size: int, local_length: int, masking: Masking) -> Iterator[tuple[int, int]]:
    """The local tokens of everything that the layout deals on its own: the sequence, or each document."""
    if masking.documents is None or not masking.per_document:
        yield 0, local_length
        return
    borders = [border // size for border in masking.documents]
    yield from itertools.pairwise(borders)


def _shifted(start: int, stop: int, by: int) -> slice:
    return slice(start + by, stop + by)


def _check(layout: CpLayout, size: int, local_length: int, masking: Masking) -> None:
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
            f"ring attention: {local_length} local tokens cannot be cut into {chunks} equal chunks "
            f"({layout.value} layout): pad the sequence to a multiple of {chunks} · {size} ranks = {chunks * size}"
        )


def _shown(numbers: tuple[int, ...]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:4]))}, …, {numbers[-1]}]"
