"""The process groups of a plan, by name and by family, and where they lie on the machines.

| group | ranks differ in | used for |
|---|---|---|
| tp, cp, dp, pp | that axis | layers, ring, batches, stages |
| dp-cp | dp and cp | gradients and ZeRO: DeepSpeed's "sequence data parallel" group |
| tp-pp | tp and pp | one whole copy of the model: DeepSpeed's "model parallel" group |
| cp-inner, cp-outer | cp, within one level | USP: heads for tokens, and the ring across |
| kv-replica | tp, inside one kv head | gradients of kv heads that several ranks hold |
| tp-cp, tp-dp, tp-dp-cp | those axes | Megatron-Core: amax reduction, activations, embeddings |
| embedding, position-embedding | pp, first and last stage, first stage | tied embeddings, learned positions |
| expert-tp, ep, expert-dp, expert-tp-ep, expert-tp-ep-pp | those axes of the expert grid | routed experts |

The runtime creates the groups of `Groups.names`; all others are computed when they are asked for.

Where groups lie on the machines: which of them leave their node, over how many nodes and rails they reach.

A node holds `per_node` consecutive ranks; a rail joins the ranks of equal place on all nodes. Everything is counted
from sizes and strides: a group's nodes depend on its first rank only through that rank's place on its node, and there
are `per_node` such places.

Axes are listed innermost first, as in Megatron-Core: in the order `tp-cp-ep-dp-pp` neighbouring ranks differ in tp. A
rank is the sum of its coordinates times the strides of their axes, so coordinates and groups are computed, never
stored.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass


class Axis(str, enum.Enum):
    """An axis of the mesh. As text, in files too, it is its value."""

    TP = "tp"
    """Tensor parallelism: the weights of a layer."""
    CP = "cp"
    """Context parallelism: the tokens of a sequence."""
    EP = "ep"
    """Expert parallelism: the experts of a layer."""
    DP = "dp"
    """Data parallelism: the sequences of a batch."""
    PP = "pp"
    """Pipeline parallelism: the layers."""

    def __str__(self) -> str:
        """`tp`, which is also what an f-string writes on every Python."""
        return self.value


AXES = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)
"""The axes in their default order, innermost first."""
DENSE_AXES = (Axis.TP, Axis.CP, Axis.DP, Axis.PP)
"""The axes that multiply to the world. Experts are laid over the ranks of these, so ep takes none of its own."""
FACTORS = (Axis.TP, Axis.CP, Axis.PP, Axis.DP)
"""The same, as equations list them."""


@dataclass(frozen=True, slots=True)
class Grid:
    """`sizes[i]` ranks along `order[i]`; the first axis is the innermost.

    In the order stand axes, or the names of the levels into which `factored` cuts one.
    """

    order: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.order) == len(self.sizes) == len(set(self.order))
        assert all(size >= 1 for size in self.sizes)

    @classmethod
    def of(cls, order: tuple[Axis, ...], sizes: Mapping[Axis, int]) -> Grid:
        """The grid with these sizes; an axis that is not named has size 1."""
        return cls(order, tuple(sizes.get(axis, 1) for axis in order))

    @property
    def world_size(self) -> int:
        """Ranks in the grid."""
        return math.prod(self.sizes)

    def size(self, axes: Collection[str]) -> int:
        """Ranks in one group over these axes."""
        return math.prod(size for axis, size in zip(self.order, self.sizes, strict=True) if axis in axes)

    def stride(self, axis: str) -> int:
        """The distance between neighbours along an axis."""
        return math.prod(self.sizes[: self.order.index(axis)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis.

        Raises:
            ValueError: the rank is not in the grid.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is not in a world of {self.world_size}: it needs 0 ≤ rank < {self.world_size}"
            )
        found: dict[str, int] = {}
        for axis, size in zip(self.order, self.sizes, strict=True):
            rank, found[axis] = divmod(rank, size)
        return found

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; an axis that is not named counts as 0."""
        return sum(coordinates.get(axis, 0) * self.stride(axis) for axis in self.order)

    def group(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, in ascending order; `rank` is one of them."""
        here = self.coordinates(rank)
        first = self.rank({axis: 0 if axis in axes else here[axis] for axis in self.order})
        return tuple(first + offset for offset in offsets_of(self.steps(axes)))

    def steps(self, axes: Collection[str]) -> tuple[tuple[int, int], ...]:
        """Size and stride of each of `axes` larger than 1, innermost first: what the members of a group differ by."""
        return tuple(
            (size, self.stride(axis))
            for axis, size in zip(self.order, self.sizes, strict=True)
            if axis in axes and size > 1
        )

    def groups(self, axes: Collection[str]) -> Iterator[tuple[int, ...]]:
        """All groups over `axes`, ordered by their first rank: each rank is in exactly one."""
        others = [axis for axis in self.order if axis not in axes]
        offsets = offsets_of(self.steps(axes))
        # Outer axes have the larger strides, so that the first ranks come out in ascending order.
        for first in offsets_of(self.steps(others)):
            yield tuple(first + offset for offset in offsets)

    def factored(self, axis: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> Grid:
        """The same ranks with `axis` written as several axes, innermost first: sub-groups are then slices too.

        Raises:
            ValueError: the sizes do not multiply to the size of the axis.
        """
        place = self.order.index(axis)
        if math.prod(sizes) != self.sizes[place]:
            product = " · ".join(map(str, sizes))
            raise ValueError(f"{product} = {math.prod(sizes)} ≠ {axis} {self.sizes[place]}")
        order = (*self.order[:place], *names, *self.order[place + 1 :])
        return Grid(order, (*self.sizes[:place], *sizes, *self.sizes[place + 1 :]))


def offsets_of(steps: Sequence[tuple[int, int]]) -> list[int]:
    """All sums of one multiple of each stride, ascending when the steps (size, stride) are listed innermost first."""
    found = [0]
    for size, stride in steps:
        found = [inner + step * stride for step in range(size) for inner in found]
    return found


# A family is all groups of one kind. Most are slices of a grid; embedding groups are the ends of pipeline groups.

Steps = tuple[tuple[int, int], ...]
"""Size and stride of each axis along which ranks differ, innermost first."""


def divisors(total: int) -> tuple[int, ...]:
    """The divisors of `total`, ascending; in the time of its square root."""
    root = min(math.isqrt(max(total, 0)), 999_999)
    low = [number for number in range(1, root + 1) if total % number == 0]
    return (*low, *(total // number for number in reversed(low) if number * number != total))


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
        return self.grid.world_size // self.grid.size(self.axes)

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
class EmbeddingGroups(AxisGroups):
    """The first, or the first and the last, rank of each group of the pipeline; the ranks between are in no group.

    Megatron-LM keeps tied embeddings equal over {first, last}, and learned positions over {first}.
    """

    last: bool

    @property
    def size(self) -> int:
        """Ranks of one group."""
        return 2 if self.last and self.grid.size(self.axes) > 1 else 1

    @property
    def members(self) -> Steps:
        """How the last rank differs from the first: one step over all stages between."""
        if self.size == 1:
            return ()
        return ((2, sum((size - 1) * stride for size, stride in self.grid.steps(self.axes))),)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The group of a rank, or nothing when it is in none."""
        ends = self._ends(self.grid.group(rank, self.axes))
        return ends if rank in ends else ()

    def all(self) -> Iterator[tuple[int, ...]]:
        """Every group, ordered by its first rank."""
        yield from map(self._ends, self.grid.groups(self.axes))

    def _ends(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return (group[0], group[-1]) if self.size == 2 else group[:1]


# The process groups of a plan, by name.

GROUP_AXES: dict[str, tuple[Axis, ...]] = {
    Axis.TP: (Axis.TP,),
    Axis.CP: (Axis.CP,),
    Axis.DP: (Axis.DP,),
    Axis.PP: (Axis.PP,),
    "dp-cp": (Axis.CP, Axis.DP),
    "tp-pp": (Axis.TP, Axis.PP),
}
"""Every group that the runtime creates as a slice of the grid, and the axes along which its members differ."""

KV_REPLICA = "kv-replica"

CP_LEVELS = ("cp-inner", "cp-outer")
"""The groups of each level of a context-parallel group, as Megatron-Core's hierarchical ones.

Their sizes are its `hierarchical_context_parallel_sizes`.
"""

MEGATRON_AXES: dict[str, tuple[Axis, ...]] = {
    "tp-cp": (Axis.TP, Axis.CP),
    "tp-dp": (Axis.TP, Axis.DP),
    "tp-dp-cp": (Axis.TP, Axis.CP, Axis.DP),
}
"""Further slices of the dense grid that Megatron-Core makes groups of."""

EMBEDDING = "embedding"
EMBEDDING_GROUPS = {EMBEDDING: True, "position-embedding": False}
"""Groups of the ends of the pipeline, and whether the last stage belongs to them."""

EXPERT_DP = "expert-dp"
"""The ranks that hold the same experts and read other tokens."""

EXPERT_AXES: dict[str, tuple[Axis, ...]] = {
    "expert-tp": (Axis.TP,),
    Axis.EP: (Axis.EP,),
    EXPERT_DP: (Axis.DP,),
    "expert-tp-ep": (Axis.TP, Axis.EP),
    "expert-tp-ep-pp": (Axis.TP, Axis.EP, Axis.PP),
}
"""Slices of the expert grid."""


def expert_grid(dense: Grid, ep: int, expert_tp: int | None = None) -> Grid:
    """The grid on which routed experts are laid: the same ranks in the same order, without cp.

    Experts take ep (and their data parallelism) out of the ranks that tp and pp leave: expert-dp = world / (expert-tp ·
    ep · pp), as Megatron-Core's second `RankGenerator`. `expert_tp` is tp unless it is given.

    Raises:
        ValueError: the sizes do not divide the world.
    """
    tp, pp, world = dense.size((Axis.TP,)) if expert_tp is None else expert_tp, dense.size((Axis.PP,)), dense.world_size
    if world % (tp * ep * pp):
        raise ValueError(
            f"expert-tp {tp} · ep {ep} · pp {pp} = {tp * ep * pp} does not divide the world of {world} ranks"
        )
    sizes = {Axis.TP: tp, Axis.EP: ep, Axis.DP: world // (tp * ep * pp), Axis.PP: pp}
    return Grid.of(tuple(map(Axis, dense.order)), sizes)


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a world.

    `kv_replicas` consecutive ranks of each tp group hold the same kv heads; `ep` ranks share the routed experts, and
    `expert_tp` ranks (those of tp, unless it is given) each of them;
    `cp_sizes` are the ranks of the inner and outer groups of cp, where attention needs such groups; with `tied`, the
    first and the last stage both hold the embedding.
    """

    grid: Grid
    kv_replicas: int = 1
    ep: int = 1
    cp_sizes: tuple[int, int] | None = None
    tied: bool = False
    expert_tp: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups that every rank of the runtime creates, in the order in which it does."""
        levels = CP_LEVELS if self.cp_sizes else ()
        tied = (EMBEDDING,) if self.tied and self.grid.size((Axis.PP,)) > 1 else ()
        experts = (Axis.EP.value, EXPERT_DP) if self.ep > 1 else ()
        return (*GROUP_AXES, *levels, *((KV_REPLICA,) if self.kv_replicas > 1 else ()), *tied, *experts)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of all groups that can be asked for, those of the runtime first."""
        further = (*MEGATRON_AXES, *EMBEDDING_GROUPS, *(EXPERT_AXES if self.ep > 1 else ()))
        return (*self.names, *(name for name in further if name not in self.names))

    @property
    def expert_grid(self) -> Grid:
        """The grid of the routed experts."""
        return expert_grid(self.grid, self.ep, self.expert_tp)

    def __call__(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The groups of a rank that its runtime creates, and those of its experts: the ranks of each, by name.

        Raises:
            ValueError: the rank is not in the plan's world.
        """
        return {name: self.of_rank(name, rank) for name in self.shown_names}

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The groups that matter in a plan: those that its runtime creates, and those of its experts."""
        experts = EXPERT_AXES if self.ep > 1 else ()
        return (*self.names, *(name for name in experts if name not in self.names))

    def family(self, name: str) -> AxisGroups:
        """All groups of one name.

        Raises:
            KeyError: there is no such group.
        """
        if name == KV_REPLICA:
            sizes = (self.kv_replicas, self.grid.size((Axis.TP,)) // self.kv_replicas)
            return AxisGroups(self.grid.factored(Axis.TP, (KV_REPLICA, "kv-head"), sizes), (KV_REPLICA,))
        if self.cp_sizes and name in CP_LEVELS:
            return AxisGroups(self.grid.factored(Axis.CP, CP_LEVELS, self.cp_sizes), (name,))
        if name in EMBEDDING_GROUPS:
            return EmbeddingGroups(self.grid, (Axis.PP,), last=EMBEDDING_GROUPS[name])
        if name in EXPERT_AXES:
            return AxisGroups(self.expert_grid, EXPERT_AXES[name])
        return AxisGroups(self.grid, GROUP_AXES[name] if name in GROUP_AXES else MEGATRON_AXES[name])

    def of_rank(self, name: str, rank: int) -> tuple[int, ...]:
        """The members of the group `name` to which `rank` belongs, ascending; none when it is in no embedding group.

        Raises:
            KeyError: there is no such group.
        """
        return self.family(name).of_rank(rank)

    def all(self, name: str) -> Iterator[tuple[int, ...]]:
        """Every group of this name; each rank is in exactly one (in at most one embedding group)."""
        yield from self.family(name).all()


# Where groups lie on the machines: which of them leave their node, over how many nodes and rails they reach.

NODE, NETWORK = "node", "network"
"""The slowest link that a group uses: inside a node, or between nodes."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the groups of one family reach.

    `nodes` and `rails` are the smallest and the largest number that one group touches.
    """

    count: int
    leaving_node: int
    nodes: tuple[int, int]
    rails: tuple[int, int]

    @property
    def slowest_link(self) -> str:
        """The slowest link that any group of the family uses."""
        return NETWORK if self.leaving_node else NODE


def reach(family: AxisGroups, per_node: int) -> Reach:
    """How far the groups of a family reach, without enumerating them."""
    return _reach(tuple(family.starts), tuple(family.members), family.count, per_node)


@functools.lru_cache(maxsize=1 << 12)
def _reach(starts: Steps, members: Steps, count: int, per_node: int) -> Reach:
    """Kept: rules, the plan's hash and the plan itself ask for the same orders of the axes."""
    places = _places(starts, per_node)
    nodes = {place: nodes_touched(place, members, per_node) for place in places}
    rails = {place: _rails(place, members, per_node) for place in places}
    leaving = sum(times for place, times in places.items() if nodes[place] > 1)
    return Reach(
        count=count,
        leaving_node=leaving,
        nodes=(min(nodes.values()), max(nodes.values())),
        rails=(min(rails.values()), max(rails.values())),
    )


@functools.lru_cache(maxsize=1 << 16)
def nodes_touched(first: int, members: Steps, per_node: int) -> int:
    """On how many nodes the ranks `first + members` lie, in the time of the steps and `per_node`.

    The steps of the last (outermost) member repeat their place on a node after a period. Each step counts the nodes of
    what lies inside it, less one where the next step begins on the node on which it ends.
    """
    if not members:
        return 1
    *rest, (size, stride) = members
    inner = tuple(rest)
    span = sum((count - 1) * step for count, step in inner)
    period = per_node // math.gcd(stride, per_node)
    total = 0
    for index in range(min(size, period)):
        place = (first + index * stride) % per_node
        total += _times(index, size, period) * nodes_touched(place, inner, per_node)
        if (place + span) // per_node == (place + stride) // per_node:
            total -= _times(index, size - 1, period)
    return total


def _times(index: int, size: int, period: int) -> int:
    """How many of `size` steps are `index` modulo `period`."""
    return size // period + (index < size % period)


def _places(starts: Steps, per_node: int) -> Counter[int]:
    """How many of the first ranks stand at each place of a node."""
    found: Counter[int] = Counter({0: 1})
    for size, stride in starts:
        period = per_node // math.gcd(stride, per_node)
        step: Counter[int] = Counter()
        for index in range(min(size, period)):
            step[index * stride % per_node] += _times(index, size, period)
        following: Counter[int] = Counter()
        for place, count in found.items():
            for offset, times in step.items():
                following[(place + offset) % per_node] += count * times
        found = following
    return found


def _rails(first: int, members: Steps, per_node: int) -> int:
    places = {first % per_node}
    for size, stride in members:
        period = per_node // math.gcd(stride, per_node)
        places = {(place + index * stride) % per_node for place in places for index in range(min(size, period))}
    return len(places)
