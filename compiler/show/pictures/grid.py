"""The ranks on their nodes, coloured by their place on an axis, or by the groups of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parcompile.layout.groups import DENSE_AXES, Axis, AxisGroups

from . import SMALL, Box, Cells, Picture, Sketch, Subject, Text
from .svg import shade

LARGEST_CELL, SMALLEST_CELL = 34, 3
LABELLED = 22
"""Cells of at least so many pixels carry the number of their rank."""
NODE_COLUMNS = 8
MOST_LINES = 16
SPLITS = {Axis.TP: "weights", Axis.CP: "sequences", Axis.DP: "the batch", Axis.PP: "layers"}
"""What the ranks of a group of one axis each hold a part of."""


class _Tiling(NamedTuple):
    """Nodes as blocks of cells, in rows of `across` blocks."""

    cell: int
    columns: int
    rows: int
    across: int
    head: float
    gap: float

    @classmethod
    def of(cls, nodes: int, per_node: int, width: float, height: float) -> _Tiling:
        columns = min(per_node, NODE_COLUMNS)
        rows = -(-per_node // columns)
        for cell in range(LARGEST_CELL, SMALLEST_CELL - 1, -1):
            gap = 3.0 if cell < 12 else 14.0
            head = 17.0 if cell >= LABELLED else 0.0
            across = int((width + gap) // (columns * cell + gap))
            found = cls(cell, columns, rows, max(across, 1), head, gap)
            if across >= 1 and found.height(nodes) <= height:
                return found
        return found

    def height(self, nodes: int) -> float:
        return -(-nodes // self.across) * (self.head + self.rows * self.cell + self.gap) - self.gap

    def corner(self, node: int) -> tuple[float, float]:
        row, column = divmod(node, self.across)
        return (
            column * (self.columns * self.cell + self.gap),
            row * (self.head + self.rows * self.cell + self.gap) + self.head,
        )

    def cells(self, nodes: int, per_node: int) -> Iterator[tuple[int, float, float]]:
        """Every rank with its corner."""
        for node in range(nodes):
            left, top = self.corner(node)
            for place in range(per_node):
                row, column = divmod(place, self.columns)
                yield node * per_node + place, left + column * self.cell, top + row * self.cell


def draw(subject: Subject, width: float, *, axis: str | None = None, rank: int | None = None) -> Picture:
    """The grid, coloured by `axis` (the innermost one larger than 1), or with the groups of `rank` lit.

    Raises:
        ValueError: the rank or the axis does not exist.
    """
    if axis is not None and axis not in DENSE_AXES:
        raise ValueError(f"ranks have no coordinate on an axis {axis!r}: the axes are {', '.join(DENSE_AXES)}")
    plan, chosen = subject.plan, Axis(axis) if axis else subject.axes[0]
    grid, cluster = plan.groups.grid, plan.spec.cluster
    sketch = Sketch(width)
    tiling = _Tiling.of(cluster.nodes, cluster.gpus_per_node, width, 760.0 if sketch.narrow else 470.0)
    size, stride = grid.size((chosen,)), grid.stride(chosen)
    lit: dict[int, str] = {}  # of each rank that shares a group of one axis with `rank`
    if rank is not None:
        lit = {one: axis for axis in reversed(DENSE_AXES) for one in AxisGroups(grid, (axis,)).of_rank(rank)}
        lit[rank] = "ink"
    corners: dict[str, list[tuple[float, float]]] = {}
    for one, x, y in tiling.cells(cluster.nodes, cluster.gpus_per_node):
        role = lit.get(one, "track") if rank is not None else shade(chosen, one // stride % size, size)
        if tiling.cell >= LABELLED:
            side = tiling.cell - 2
            sketch.add(Box(x, y, side, side, role, f"rank {one}: {_place(subject, one)}", radius=3))
            sketch.add(Text(x + side / 2, y + side / 2 + 4, str(one), SMALL, f"on:{role}", "middle"))
        else:
            corners.setdefault(role, []).append((x, y))
    inner = tiling.cell - (1 if tiling.cell > 4 else 0.4)
    sketch.add(*(Cells(tuple(found), inner, inner, role) for role, found in corners.items()))
    if tiling.head:
        for node in range(cluster.nodes):
            left, top = tiling.corner(node)
            sketch.add(Text(left, top - 5, f"node {node}", SMALL, "soft"))
    sketch.y = tiling.height(cluster.nodes) + 6
    sizes = " × ".join(f"{name} {grid.size((name,))}" for name in DENSE_AXES)
    world = f"{plan.world_size:,} ranks on {cluster.nodes:,} {'node' if cluster.nodes == 1 else 'nodes'}: {sizes}"
    if rank is None:
        shown = range(size) if size <= 8 else sorted({index * (size - 1) // 5 for index in range(6)})
        sketch.legend([(shade(chosen, index, size), f"{chosen} {index}") for index in shown])
        title = f"Ranks, coloured by {chosen}"
        words = f"Neighbours on {chosen} are {stride} {'rank' if stride == 1 else 'ranks'} apart."
    else:
        entries = [("ink", f"rank {rank}")]
        for each in subject.axes:
            ranks = AxisGroups(grid, (each,)).of_rank(rank)
            nodes = len({one // cluster.gpus_per_node for one in ranks})
            words = f"{each}: splits {SPLITS[each]}, {len(ranks)} ranks on {nodes} node{'s' * (nodes > 1)}"
            entries.append((each, words))
        sketch.legend(entries)
        title = f"The groups of rank {rank}"
        words = f"Rank {rank} is at {_place(subject, rank)}."
    return sketch.picture(title, world, f"{world}. {words}")


def _place(subject: Subject, rank: int) -> str:
    found = subject.plan.groups.grid.coordinates(rank)
    return ", ".join(f"{axis} {found[axis]}" for axis in DENSE_AXES)


def lines(subject: Subject, *, unicode: bool = True) -> list[str]:
    """For a terminal: each node with the coordinates of its ranks."""
    plan, axes = subject.plan, subject.axes
    cluster, grid = plan.spec.cluster, plan.groups.grid
    found = [f"ranks by node, each as {','.join(axes)}"]
    dots = "…" if unicode else "..."
    more = f"  {dots}" if cluster.gpus_per_node > NODE_COLUMNS else ""
    for node in range(min(cluster.nodes, MOST_LINES)):
        first = node * cluster.gpus_per_node
        places = (grid.coordinates(rank) for rank in range(first, first + min(cluster.gpus_per_node, NODE_COLUMNS)))
        cells = "  ".join(",".join(str(place[axis]) for axis in axes) for place in places)
        found.append(f"{node:>5} | {cells}{more}")
    if cluster.nodes > MOST_LINES:
        found.append(f"      {dots} {cluster.nodes - MOST_LINES:,} more nodes")
    return found
