"""Which rank owns the optimizer state of which layer, when whole layers are dealt out instead of equal pieces.

The plan executes DeepSpeed's equal pieces (`layout.optimizer`). Dealing out whole layers needs no cut tensors, but is
only as even as the layers are: with the embedding and the head on rank 0 as well, rank 0 holds far more than its share.
These maps say how much.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnershipMap:
    """`owners[i]` is the rank that owns layer i; `embedding` and `head` (with the final norm) have one owner each."""

    rule: str
    ranks: int
    owners: tuple[int, ...]
    embedding: int
    head: int

    def load(self, sizes: Sizes) -> dict[int, int]:
        """Size of what each rank owns; ranks that own nothing are left out."""
        found = dict.fromkeys(sorted({*self.owners, self.embedding, self.head}), 0)
        for layer, owner in enumerate(self.owners):
            found[owner] += sizes.layers[layer]
        found[self.embedding] += sizes.embedding
        found[self.head] += sizes.head
        return found

    def imbalance(self, sizes: Sizes) -> tuple[int, float, float]:
        """The rank that owns most, its share of everything, and the even share 1 / ranks."""
        load = self.load(sizes)
        rank = max(load, key=lambda one: (load[one], -one))
        return rank, load[rank] / sizes.total, 1 / self.ranks

    def warning(self, sizes: Sizes, tolerance: float = 0.1) -> str | None:
        """What is wrong with the map, with the figure, when a rank owns `tolerance` more than its share; else None."""
        rank, share, even = self.imbalance(sizes)
        if share <= even * (1 + tolerance):
            return None
        named = [name for name, owner in (("the embedding", self.embedding), ("the head", self.head)) if owner == rank]
        why = f": it owns {' and '.join(named)} beside its layers" if named else ""
        return f"{self.rule}: rank {rank} owns {share:.1%} of the optimizer state, not {even:.1%}{why}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements (or bytes) of each layer, of the embedding, and of the head with the final norm."""

    layers: tuple[int, ...]
    embedding: int
    head: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.layers) + self.embedding + self.head


def round_robin(num_layers: int, ranks: int) -> OwnershipMap:
    """Layer i belongs to rank i mod ranks; embedding and head to rank 0, as in entrenar's `ZeroShardMap`."""
    _check(ranks)
    return OwnershipMap("round robin", ranks, tuple(layer % ranks for layer in range(num_layers)), 0, 0)


def contiguous(num_layers: int, ranks: int) -> OwnershipMap:
    """Equal runs of layers, the first ranks one more; embedding and head on rank 0, as in entrenar's `ZeroShardMap`."""
    _check(ranks)
    share, larger = divmod(num_layers, ranks)
    runs = ([rank] * (share + (rank < larger)) for rank in range(min(ranks, num_layers)))
    return OwnershipMap("contiguous", ranks, tuple(rank for run in runs for rank in run), 0, 0)


def balanced(sizes: Sizes, ranks: int) -> OwnershipMap:
    """The largest piece first, each to the rank that holds least.

    The largest load is at most 4/3 of the best possible one (R. L. Graham, 1969).
    """
    _check(ranks)
    names: Sequence[int | str] = [*range(len(sizes.layers)), "embedding", "head"]
    weights = [*sizes.layers, sizes.embedding, sizes.head]
    heap = [(0, rank) for rank in range(min(ranks, len(names)))]
    owner: dict[int | str, int] = {}
    for weight, name in sorted(zip(weights, names, strict=True), key=lambda piece: -piece[0]):
        load, rank = heapq.heappop(heap)
        owner[name] = rank
        heapq.heappush(heap, (load + weight, rank))
    layers = tuple(owner[layer] for layer in range(len(sizes.layers)))
    return OwnershipMap("balanced", ranks, layers, owner["embedding"], owner["head"])


def _check(ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: it takes at least one to own something")
