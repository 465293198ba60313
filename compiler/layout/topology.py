"""Where groups lie on the machines: which of them leave their node, over how many nodes and rails they reach.

A node holds `per_node` consecutive ranks; a rail joins the ranks of equal place on all nodes. Everything is counted
from sizes and strides: a group's nodes depend on its first rank only through that rank's place on its node, and there
are `per_node` such places.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from .families import Family, Steps
from .grid import offsets_of

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


def reach(family: Family, per_node: int) -> Reach:
    """How far the groups of a family reach, without enumerating them."""
    places = _places(family.starts, per_node)
    nodes = {place: nodes_touched(place, family.members, per_node) for place in places}
    rails = {place: _rails(place, family.members, per_node) for place in places}
    leaving = sum(count for place, count in places.items() if nodes[place] > 1)
    return Reach(
        count=family.count,
        leaving_node=leaving,
        nodes=(min(nodes.values()), max(nodes.values())),
        rails=(min(rails.values()), max(rails.values())),
    )


def nodes_touched(first: int, members: Steps, per_node: int) -> int:
    """On how many nodes the ranks `first + members` lie."""
    inner: list[tuple[int, int]] = []
    outer = 1
    for size, stride in members:
        # From the first stride on that is a whole number of nodes, every step leads to other nodes: strides divide each
        # other.
        if stride % per_node == 0:
            outer *= size
        else:
            inner.append((size, stride))
    if len(inner) == 1:
        size, stride = inner[0]
        last = (first + (size - 1) * stride) // per_node
        return outer * (size if stride >= per_node else last - first // per_node + 1)
    return outer * len({(first + offset) // per_node for offset in offsets_of(inner)})


def _places(starts: Steps, per_node: int) -> Counter[int]:
    """How many of the first ranks stand at each place of a node."""
    found: Counter[int] = Counter({0: 1})
    for size, stride in starts:
        period = per_node // math.gcd(stride, per_node)
        step: Counter[int] = Counter()
        for index in range(min(size, period)):
            step[index * stride % per_node] += size // period + (index < size % period)
        following: Counter[int] = Counter()
        for place, count in found.items():
            for offset, times in step.items():
                following[(place + offset) % per_node] += count * times
        found = following
    return found


def _rails(first: int, members: Steps, per_node: int) -> int:
    shortened = tuple((min(size, per_node // math.gcd(stride, per_node)), stride) for size, stride in members)
    return len({(first + offset) % per_node for offset in offsets_of(shortened)})
