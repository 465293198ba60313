"""Keys and values of all ranks at once, for one group of heads while the group before it is computed.

Every rank sends its own keys straight to those that need them, and their gradients come straight back: as many bytes as
around a ring, in one exchange.

KeySource: Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parcompile.layout.sequence import CpLayout, chunk_ids
from parcompile.runtime.ring_attention.kernels.blocks import add_gradients
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries
from parcompile.runtime.ring_attention.kernels.packs import PackedTiles
from parcompile.runtime.ring_attention.kernels.tiles import FULL, Tile
from parcompile.runtime.ring_attention.passes import AttentionCall, Pass, keep, zeroed_sum_for
from parcompile.runtime.ring_attention.ring import Exchanges, MessageKind, Pair, post_exchanges
from parcompile.runtime.ring_attention.route import (
    Hop,
    Masking,
    check_route,
    dealt_alone,
    effective_layout,
    needed_steps,
    source_tiles,
)


def gathered(call: AttentionCall, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values [B, K, gathered tokens, D] of each pass; those of the next are under way meanwhile."""
    under_way = _post(call, call.passes[0], key, value) if call.passes else None
    for one, following in zip(call.passes, [*call.passes[1:], None], strict=True):
        assert isinstance(one.schedule, GatherSchedule)
        parts = [(one.of_keys(key), one.of_keys(value))]
        if under_way is not None:
            parts += [(pair.first, pair.second) for pair in under_way.wait()]
        under_way = None if following is None else _post(call, following, key, value)
        yield _in_order(one.schedule, [part[0] for part in parts]), _in_order(one.schedule, [part[1] for part in parts])


def gathered_backward(
    call: AttentionCall,
    one: Pass,
    queries: Queries,
    keys: Tensor,
    values: Tensor,
    targets: Gradients,
    bring_home: Callable[[], None] | None,
) -> Callable[[], None]:
    """The backward of one pass; returns what is left to do once the gradients of the rank's own keys have arrived."""
    schedule, terms, dtype = one.schedule, one.gathered_terms(), queries.lse.dtype
    assert isinstance(schedule, GatherSchedule)
    grad_query = zeroed_sum_for(targets.query)
    grad_keys, grad_values = torch.zeros_like(keys, dtype=dtype), torch.zeros_like(values, dtype=dtype)
    into = Gradients(grad_query, grad_keys, grad_values)
    add_gradients(call.kernel, schedule.tiles, queries, keys, values, into, terms)
    keep(grad_query, targets.query)
    if bring_home is not None:
        bring_home()
    (own_key, *other_keys), (own_value, *other_values) = _by_part(schedule, grad_keys), _by_part(schedule, grad_values)
    outgoing = [Pair.pack(*pair) for pair in zip(other_keys, other_values, strict=True)]
    incoming = [Pair.empty_like(own_key, own_value) for _ in schedule.hops]
    # Back to where the keys came from.
    hops = [hop.reversed() for hop in schedule.hops]
    under_way = post_exchanges(call.group, hops, outgoing, incoming, MessageKind.GRADIENTS)

    def finish() -> None:
        grad_key, grad_value = own_key, own_value
        for pair in under_way.wait():
            grad_key, grad_value = grad_key + pair.first, grad_value + pair.second
        targets.key.copy_(grad_key)
        targets.value.copy_(grad_value)

    return finish


def _post(call: AttentionCall, one: Pass, key: Tensor, value: Tensor) -> Exchanges:
    assert isinstance(one.schedule, GatherSchedule)
    hops = one.schedule.hops
    own = Pair.pack(one.of_keys(key), one.of_keys(value)) if hops else None
    incoming = [] if own is None else [Pair.empty_like(own.first, own.second) for _ in hops]
    outgoing = [] if own is None else [own] * len(hops)
    return post_exchanges(call.group, hops, outgoing, incoming, MessageKind.KEYS_AND_VALUES)


def _in_order(schedule: GatherSchedule, parts: list[Tensor]) -> Tensor:
    """The gathered tokens in the order in which the tiles count them."""
    if not schedule.hops and len(schedule.pieces) == 1:
        return parts[0]
    return torch.cat([parts[piece.part][:, :, piece.keys] for piece in schedule.pieces], 2)


def _by_part(schedule: GatherSchedule, gathered_tokens: Tensor) -> list[Tensor]:
    """Undoes `_in_order`: what belongs to each part."""
    if not schedule.hops and len(schedule.pieces) == 1:
        return [gathered_tokens]
    lengths = [piece.keys.stop - piece.keys.start for piece in schedule.pieces]
    by_part: list[list[tuple[int, Tensor]]] = [[] for _ in range(len(schedule.hops) + 1)]
    for piece, tokens in zip(schedule.pieces, torch.split(gathered_tokens, lengths, 2), strict=True):
        by_part[piece.part].append((piece.keys.start, tokens))
    return [torch.cat([tokens for _, tokens in sorted(each, key=lambda one: one[0])], 2) for each in by_part]


# What a rank attends to once the keys of all others are at hand: few and large tiles instead of a ring's many.


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
    pieces = _pieces_in_order(layout, size, sources, chunks)
    places, place = {}, 0
    for piece in pieces:
        places[piece.part, piece.keys.start] = place
        place += piece.keys.stop - piece.keys.start
    tiles = []
    for part, source in enumerate(sources):
        for tile in source_tiles(layout, size, rank, source, local_length, masking):
            for queries, keys in itertools.product(_cut(tile.queries, chunks), _cut(tile.keys, chunks)):
                cell = tile.part(queries.common, keys.common)
                if cell is not None:
                    by = places[part, keys.chunk.tokens.start] - keys.chunk.tokens.start
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


def _pieces_in_order(layout: CpLayout, size: int, sources: list[int], chunks: list[_Chunk]) -> tuple[Piece, ...]:
    """The chunks of all sources as they follow each other in the sequence; stripes lie one after the other."""
    found = [
        (chunk.begin, chunk_ids(layout, size, source)[chunk.index], part, chunk.tokens)
        for part, source in enumerate(sources)
        for chunk in chunks
    ]
    return tuple(Piece(part, tokens) for _, _, part, tokens in sorted(found, key=lambda each: each[:3]))


@dataclass(frozen=True, slots=True)
class _Cut:
    chunk: _Chunk
    common: slice


def _cut(tokens: slice, chunks: list[_Chunk]) -> Iterator[_Cut]:
    """The parts of these local tokens that lie in one chunk."""
    index = bisect_right(chunks, tokens.start, key=lambda chunk: chunk.tokens.start) - 1
    for chunk in itertools.islice(chunks, index, None):
        if chunk.tokens.start >= tokens.stop:
            return
        yield _Cut(chunk, slice(max(tokens.start, chunk.tokens.start), min(tokens.stop, chunk.tokens.stop)))


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
