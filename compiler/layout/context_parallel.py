"""How attention runs over the ranks that share a sequence: its implementation, and the ranks of each of its levels.

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

from .sequence import CpLayout, work

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
