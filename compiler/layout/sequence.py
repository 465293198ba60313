"""Which tokens each context-parallel rank holds, and what it computes in each step of the ring.

The sequence is cut into equal *chunks*; a rank holds one chunk (contiguous, striped) or two (zigzag). A chunk is a
stretch of tokens, or with the striped layout every cp-th token. In step i of the ring a rank works on the keys and
values of rank `rank - i`; what it computes is described by *blocks*, rectangles in units of its local chunks. The
runtime executes these blocks as they are.

Sources: zigzag assignment as in Llama 3 (arXiv 2407.21783, section 3.3.2); striped attention, arXiv 2311.09431; ring
attention, arXiv 2310.01889.

How attention runs over the ranks that share a sequence: its implementation, and the ranks of each of its levels.

| implementation | what travels | levels |
|---|---|---|
| ring | keys and values, from neighbour to neighbour | one ring of cp ranks |
| double_ring | the same, round the inner ranks before all of them pass on to the next inner ranks | inner, outer ring |
| all_gather | keys and values of one group of heads, straight to all ranks | cp ranks |
| ulysses | heads for tokens | cp ranks that exchange heads |
| usp | heads for tokens between inner ranks, keys and values around a ring across them | inner, outer ring |

Sources: ring attention, arXiv 2310.01889; double ring, arXiv 2406.18485, section 4.4; all-gather, arXiv 2407.21783,
section 3.3.2; Ulysses, arXiv 2309.14509; USP, arXiv 2405.07719.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from fractions import Fraction

from parcompile.units import MIB


class CpLayout(str, enum.Enum):
    """How the chunks of a sequence are dealt to the context-parallel ranks."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"
    STRIPED = "striped"
    """Rank r holds the tokens r, r + cp, r + 2 · cp, …"""

    @property
    def chunks_per_rank(self) -> int:
        """Chunks that each rank holds: the sequence length is a multiple of this times cp."""
        return 2 if self is CpLayout.ZIGZAG else 1

    def stride(self, cp: int) -> int:
        """Positions from one token of a chunk to the next."""
        return cp if self is CpLayout.STRIPED else 1


class Mask(str, enum.Enum):
    """What a block computes: every query sees every key, or only some, counted in the block's own rows and columns."""

    FULL = "full"
    CAUSAL = "causal"
    """Row i sees the columns up to i."""
    STRICT = "strict"
    """Row i sees the columns before i: strictly below the diagonal."""


@dataclass(frozen=True, slots=True)
class Block:
    """Local query chunks `[q_start, q_stop)` against the source's key chunks `[kv_start, kv_stop)`.

    A causal or strict block is square. Where chunks are stretches it covers the same chunks on both sides (queries and
    keys of one rank), so its diagonal is the causal diagonal. Striped chunks interleave: the keys of an earlier rank
    are seen up to the diagonal, those of a later one up to the token before it.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    mask: Mask

    @property
    def area(self) -> Fraction:
        """Work in units of one full chunk × chunk block; causal and strict blocks are half of their square.

        The tokens of the diagonal itself, one part in twice the chunk's length, are not told apart.
        """
        whole = (self.q_stop - self.q_start) * (self.kv_stop - self.kv_start)
        return Fraction(whole) if self.mask is Mask.FULL else Fraction(whole, 2)


def chunk_ids(layout: CpLayout, cp: int, rank: int) -> tuple[int, ...]:
    """The chunks of the sequence that `rank` holds, ascending; there are `chunks_per_rank · cp` chunks in all."""
    _check_rank(cp, rank)
    return (rank, 2 * cp - 1 - rank) if layout is CpLayout.ZIGZAG else (rank,)


def token_ranges(layout: CpLayout, cp: int, rank: int, sequence_length: int) -> tuple[range, ...]:
    """The positions of the sequence that `rank` holds, in the order in which it holds them.

    Adjacent chunks are joined, so that a rank with neighbouring chunks (cp 1, or the middle of a zigzag) holds one
    range. With the striped layout that range has a step of cp.

    Raises:
        ValueError: the sequence length is not a multiple of the number of chunks.
    """
    chunks = layout.chunks_per_rank * cp
    if sequence_length < 1 or sequence_length % chunks:
        raise ValueError(
            f"sequence_length {sequence_length} is not a multiple of {chunks} "
            f"({layout.value} layout: {layout.chunks_per_rank} · cp {cp} chunks)"
        )
    if layout is CpLayout.STRIPED:
        _check_rank(cp, rank)
        return (range(rank, sequence_length, cp),)
    length = sequence_length // chunks
    joined: list[range] = []
    for chunk in chunk_ids(layout, cp, rank):
        start, stop = chunk * length, (chunk + 1) * length
        if joined and joined[-1].stop == start:
            joined[-1] = range(joined[-1].start, stop)
        else:
            joined.append(range(start, stop))
    return tuple(joined)


class KeySource(str, enum.Enum):
    """Whose keys and values a rank works on: what it computes depends on nothing else."""

    OWN = "own"
    EARLIER = "earlier"
    """Those of a rank before it in the context-parallel group."""
    LATER = "later"

    @classmethod
    def of(cls, rank: int, source: int) -> KeySource:
        """How `source` stands to `rank`."""
        return cls.OWN if source == rank else cls.EARLIER if source < rank else cls.LATER


def source_blocks(layout: CpLayout, cp: int) -> dict[KeySource, tuple[Block, ...]]:
    """The blocks for each kind of source: the whole ring schedule of every rank in three entries."""
    first, last = 0, cp - 1
    return {
        KeySource.OWN: blocks_between(layout, cp, first, first, causal=True),
        KeySource.EARLIER: blocks_between(layout, cp, last, first, causal=True) if cp > 1 else (),
        KeySource.LATER: blocks_between(layout, cp, first, last, causal=True) if cp > 1 else (),
    }


def work(layout: CpLayout, cp: int, rank: int) -> Fraction:
    """The share of the whole sequence × sequence square that `rank` computes."""
    _check_rank(cp, rank)
    chunks = layout.chunks_per_rank * cp
    areas = {
        kind: sum((block.area for block in blocks), Fraction(0)) for kind, blocks in source_blocks(layout, cp).items()
    }
    sources = {KeySource.OWN: 1, KeySource.EARLIER: rank, KeySource.LATER: cp - 1 - rank}
    return sum((areas[kind] * count for kind, count in sources.items()), Fraction(0)) / chunks**2


def blocks_between(layout: CpLayout, cp: int, rank: int, source: int, *, causal: bool) -> tuple[Block, ...]:
    """What `rank` computes with the keys and values of `source`."""
    queries, keys = chunk_ids(layout, cp, rank), chunk_ids(layout, cp, source)
    if not causal:
        return (Block(0, len(queries), 0, len(keys), Mask.FULL),)
    if rank == source:
        return (Block(0, len(queries), 0, len(keys), Mask.CAUSAL),)
    if layout is CpLayout.STRIPED:
        return (Block(0, 1, 0, 1, Mask.CAUSAL if source < rank else Mask.STRICT),)
    # Chunks are in ascending order on both sides: each query chunk sees a prefix of the key chunks, which grows with
    # it.
    blocks: list[Block] = []
    for index, query in enumerate(queries):
        seen = sum(key < query for key in keys)
        if not seen:
            continue
        if blocks and blocks[-1].kv_stop == seen and blocks[-1].q_stop == index:
            blocks[-1] = Block(blocks[-1].q_start, index + 1, 0, seen, Mask.FULL)
        else:
            blocks.append(Block(index, index + 1, 0, seen, Mask.FULL))
    return tuple(blocks)


def _check_rank(cp: int, rank: int) -> None:
    if cp < 1 or not 0 <= rank < cp:
        raise ValueError(f"rank {rank} is not in a context-parallel group of {cp}: it needs 0 ≤ rank < cp and cp ≥ 1")


SMALLEST_MESSAGE_BYTES = MIB
"""Keys and values travel for so many heads at once that a message is at least this long: its latency does not count."""
CUDA_ROWS_PER_LAUNCH = 2 * 132 * 128
"""Rows of queries that fill a GPU about twice."""


class CpImplementation(str, enum.Enum):
    """Who sends what to whom, so that each query meets every key."""

    RING = "ring"
    DOUBLE_RING = "double_ring"
    ALL_GATHER = "all_gather"
    ULYSSES = "ulysses"
    USP = "usp"

    @property
    def has_levels(self) -> bool:
        """Whether the ranks are cut into inner and outer ones."""
        return self in (CpImplementation.DOUBLE_RING, CpImplementation.USP)


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """An implementation on `cp` ranks. `sizes`: ranks of the inner and of the outer level, None where there is one."""

    implementation: CpImplementation
    cp: int
    sizes: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert self.implementation.has_levels == (self.sizes is not None)
        assert self.sizes is None or self.sizes[0] * self.sizes[1] == self.cp

    @property
    def head_ranks(self) -> int:
        """Neighbouring ranks that exchange heads for tokens: each then has all their tokens, with its own heads."""
        if self.implementation is CpImplementation.ULYSSES:
            return self.cp
        return self.sizes[0] if self.sizes and self.implementation is CpImplementation.USP else 1

    @property
    def ring_ranks(self) -> int:
        """Places between which keys and values travel; `head_ranks` ranks share one."""
        return self.cp // self.head_ranks

    @property
    def inner_ranks(self) -> int:
        """Ranks round which keys go before all of them pass on to the next ones; all, but in a double ring."""
        is_double = self.sizes and self.implementation is CpImplementation.DOUBLE_RING
        return self.sizes[0] if self.sizes and is_double else self.ring_ranks

    @property
    def name(self) -> str:
        """The implementation with its sizes."""
        return self.implementation.value + (f" {self.sizes[0]} × {self.sizes[1]}" if self.sizes else "")

    def source(self, step: int, place: int) -> int:
        """Whose keys are at a place of the ring in a step."""
        return ring_source(step, place, self.ring_ranks, self.inner_ranks)

    def work(self, layout: CpLayout, rank: int) -> Fraction:
        """The share of the whole sequence × sequence square, over all heads, that a rank computes."""
        return work(layout, self.ring_ranks, rank // self.head_ranks) / self.head_ranks

    def balance(self, layout: CpLayout) -> Fraction:
        """Mean work of a rank divided by the work of the busiest one: 1 is perfect."""
        return _balance(self, layout)


@functools.lru_cache(maxsize=4096)
def _balance(context: ContextParallel, layout: CpLayout) -> Fraction:
    ends = context.work(layout, 0), context.work(layout, context.cp - 1)
    return sum(ends, Fraction(0)) / 2 / max(ends)


def ring_source(step: int, place: int, size: int, inner: int) -> int:
    """Whose keys a rank holds in a step, as ranks within the ring.

    With one inner ring that is all: `place - step`.
    """
    outer_step, inner_step = divmod(step, inner)
    node, seat = divmod(place, inner)
    return (node - outer_step) % (size // inner) * inner + (seat - inner_step) % inner


def ring_holder(step: int, source: int, size: int, inner: int) -> int:
    """Who holds the keys of a rank in a step."""
    outer_step, inner_step = divmod(step, inner)
    node, seat = divmod(source, inner)
    return (node + outer_step) % (size // inner) * inner + (seat + inner_step) % inner


def heads_fault(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why `ranks` ranks cannot exchange these heads of a tensor-parallel rank for tokens; None when they can.

    Key/value heads are repeated where there are fewer of them than ranks.
    """
    if heads % ranks:
        return f"{heads} query heads / {ranks} ranks is not whole"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} key/value heads and {ranks} ranks: neither is a multiple of the other"
    return None


def level_sizes(cp: int) -> list[tuple[int, int]]:
    """Every way to cut cp ranks into inner and outer ones, with more than one of both."""
    return [(inner, cp // inner) for inner in range(2, cp // 2 + 1) if cp % inner == 0]


def heads_per_pass(kv_heads: int, bytes_per_head: int, rows_per_head: int, *, fills_device: bool) -> int:
    """Key/value heads that travel at once: as few as are worth a message and, on a GPU, a launch.

    Args:
        kv_heads: those of a rank.
        bytes_per_head: keys and values of one head on a rank.
        rows_per_head: query rows that read one key/value head.
        fills_device: whether a launch has to fill a GPU.
    """
    for size in range(1, kv_heads):
        fills = not fills_device or size * rows_per_head >= CUDA_ROWS_PER_LAUNCH
        if kv_heads % size == 0 and fills and size * bytes_per_head >= SMALLEST_MESSAGE_BYTES:
            return size
    return kv_heads
