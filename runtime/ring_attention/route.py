"""The steps of a rank in the ring: the compiler's schedule with its blocks in tokens, cut down by further masks.

The schedule says which chunks of queries attend to which chunks of keys in which step. A sliding window or the borders
of documents can only take away from that: they make tiles smaller, and a step in which no rank has a tile left is left
out, keys and all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompile.layout.sequence import CpLayout, blocks_between, ring_holder, ring_source

from .document_tiles import Masking, some_rank_computes, some_rank_sees, source_tiles
from .kernels import Tile


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
