"""A family is all groups of one kind. Most are slices of a grid; embedding groups are the ends of pipeline groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parcompile.layout.grid import Axis

from .grid import Grid

Steps = tuple[tuple[int, int], ...]
"""Size and stride of each axis along which ranks differ, innermost first."""


@dataclass(frozen=True, slots=True)
class AxisGroups:
    """Groups whose members differ only along `axes` of `grid`: each rank is in exactly one."""

    grid: Grid
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Ranks of one group."""
        return self.grid.size(self.axes)

    @property
    def count(self) -> int:
        """Groups."""
        return self.grid.world_size // self.size

    @property
    def members(self) -> Steps:
        """How the members of a group differ from its first rank."""
        return self.grid.steps(self.axes)

    @property
    def starts(self) -> Steps:
        """How the first ranks of the groups differ from rank 0."""
        return self.grid.steps([axis for axis in self.grid.order if axis not in self.axes])

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The group of a rank, ascending.

        Raises:
            ValueError: the rank is not in the grid.
        """
        return self.grid.group(rank, self.axes)

    def all(self) -> Iterator[tuple[int, ...]]:
        """Every group, ordered by its first rank."""
        yield from self.grid.groups(self.axes)


@dataclass(frozen=True, slots=True)
class EmbeddingGroups:
    """The first, or the first and the last, rank of each pipeline group; the ranks between are in no group.

    Megatron-LM keeps tied embeddings equal over {first, last}, and learned positions over {first}.
    """

    pipeline: AxisGroups
    last: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis along which members differ."""
        return self.pipeline.axes

    @property
    def size(self) -> int:
        """Ranks of one group."""
        return 2 if self.last and self.pipeline.size > 1 else 1

    @property
    def count(self) -> int:
        """Groups."""
        return self.pipeline.count

    @property
    def members(self) -> Steps:
        """How the last rank differs from the first: one step over all stages between."""
        if self.size == 1:
            return ()
        return ((2, sum((size - 1) * stride for size, stride in self.pipeline.members)),)

    @property
    def starts(self) -> Steps:
        """How the first ranks of the groups differ from rank 0."""
        return self.pipeline.starts

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The group of a rank, or nothing when it is in none."""
        ends = self._ends(self.pipeline.of_rank(rank))
        return ends if rank in ends else ()

    def all(self) -> Iterator[tuple[int, ...]]:
        """Every group, ordered by its first rank."""
        for group in self.pipeline.all():
            yield self._ends(group)

    def _ends(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return (group[0], group[-1]) if self.size == 2 else group[:1]


GroupFamily = AxisGroups | EmbeddingGroups


def kv_replica_family(grid: Grid, replicas: int) -> AxisGroups:
    """`replicas` consecutive ranks of each tp group: they hold the same kv heads."""
    tp = grid.size((Axis.TP,))
    return AxisGroups(grid.factored(Axis.TP, ("kv-replica", "kv-head"), (replicas, tp // replicas)), ("kv-replica",))


def hierarchical_cp_families(grid: Grid, sizes: tuple[int, ...]) -> tuple[AxisGroups, ...]:
    """One family for each level of a hierarchical context-parallel group, the innermost level first.

    Megatron-Core calls the sizes `hierarchical_context_parallel_sizes`.

    Raises:
        ValueError: the sizes do not multiply to cp.
    """
    names = tuple(f"cp-{level}" for level in range(len(sizes)))
    factored = grid.factored(Axis.CP, names, sizes)
    return tuple(AxisGroups(factored, (name,)) for name in names)
