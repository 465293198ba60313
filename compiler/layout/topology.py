"""Where groups lie on the machines: which of them leave their node, over how many nodes and rails they reach.

A node holds `per_node` consecutive ranks; a rail joins the ranks of equal place on all nodes. Everything is counted
from sizes and strides: a group's nodes depend on its first rank only through that rank's place on its node, and there
are `per_node` such places.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass

from .group_families import GroupFamily, Steps

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


def reach(family: GroupFamily, per_node: int) -> Reach:
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
