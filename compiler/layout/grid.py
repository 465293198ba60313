"""The grid of ranks: one arithmetic explains every group.

Axes are listed innermost first, as in Megatron-Core: in the order `tp-cp-ep-dp-pp` neighbouring ranks differ in tp. A
rank is the sum of its coordinates times the strides of their axes, so coordinates and groups are computed, never
stored.
"""

from __future__ import annotations

import enum
import math
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


def divisors(total: int) -> tuple[int, ...]:
    """The divisors of `total`, ascending; in the time of its square root."""
    low: list[int] = []
    high: list[int] = []
    number = 1
    while number * number <= total and number < 1_000_000:
        if total % number == 0:
            low.append(number)
            if number * number != total:
                high.append(total // number)
        number += 1
    return (*low, *reversed(high))
