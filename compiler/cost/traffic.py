"""Messages and bytes of a rank in a step by group and link, and which order of the axes keeps them inside the nodes.

The traffic of an order is counted per rank and optimizer step. What a family of groups sends counts as leaving the node
for the share of its groups that lie on more than one: the slowest link of a ring sets its pace, whatever the others do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from parcompile.layout.groups import (
    AXES,
    CP_LEVELS,
    DENSE_AXES,
    EMBEDDING,
    EXPERT_DP,
    KV_REPLICA,
    Axis,
    AxisGroups,
    Grid,
    Groups,
    Reach,
    expert_grid,
    reach,
)
from parcompile.layout.pipeline import Stage
from parcompile.layout.shards import keeps_places
from parcompile.machines import Link

from .blocks import gathered_over_cp, sent_over_cp, window_exchanges
from .collectives import Sent, busiest_stage, collectives, stage_exchanges
from .context_exchanges import ContextExchange, context_exchanges
from .workload import Workload


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """What one rank of the busiest stage sends over one kind of group in a step.

    `wire_bytes` carry the ring factor; `messages` counts collective calls (or sends); of gradients
    and weights over dp and cp, which go in buckets, those of all buckets together. `leaves_node` says whether a group
    reaches over more than one node.
    """

    group: str
    operation: str
    messages: int
    wire_bytes: float
    link: Link
    leaves_node: bool


def traffic(work: Workload) -> tuple[GroupTraffic, ...]:
    """Everything that a rank of the busiest stage sends, group by group; groups of one rank are left out.

    Each level of context parallelism is an entry of its own.
    """
    sent = collectives(work, sending_most(work))
    sizes = {
        Axis.TP: work.tp,
        KV_REPLICA: _replicas(work),
        Axis.EP: work.ep,
        "dp-cp": work.shards,
        EXPERT_DP: work.expert_shards,
    }
    found = []
    for group, ranks in sizes.items():
        kinds = {kind: one for (name, kind), one in sent.items() if name == group}
        if kinds:
            stride = _stride(work, group)
            messages = sum(one.messages for one in kinds.values())
            size = sum(one.wire_bytes for one in kinds.values())
            found.append(_group(work, group, _operation(group, kinds), messages, size, ranks, stride))
    attending = max(work.stages, key=lambda stage: _exchanged(work, stage))
    passes = work.shape.attending(attending.layers) * work.micro_batches
    for one in context_exchanges(work.of_stage(attending)):
        stride = work.stride(Axis.CP) * one.stride
        size = passes * one.wire_bytes
        found.append(_group(work, one.group, one.operation, passes * one.messages, size, one.ranks, stride))
    messages, size = max(sent_over_cp(work, stage.layers) for stage in work.stages)
    if messages:
        stride = work.stride(Axis.CP)
        found.append(_group(work, Axis.CP, "states from piece to piece", messages, size, work.cp, stride))
    every = max((window_exchanges(work.of_stage(stage), stage.layers) for stage in work.stages), key=_sizes)
    if every:
        operation, messages = "tokens and keys of windows", sum(one.messages for one in every)
        found.append(_group(work, Axis.CP, operation, messages, _sizes(every), work.cp, work.stride(Axis.CP)))
    if work.pp > 1:
        between = stage_exchanges(work, busiest_stage(work))[Axis.PP, "send"]
        operation, stride = "send to the next stage and the one before", work.stride(Axis.PP)
        found.append(_group(work, Axis.PP, operation, between.messages, between.wire_bytes, 2, stride))
        tied = stage_exchanges(work, 0).get((EMBEDDING, "all-reduce"))
        if tied is not None:
            operation, stride = "all-reduce of the tied embedding's gradient", (work.pp - 1) * stride
            found.append(_group(work, EMBEDDING, operation, tied.messages, tied.wire_bytes, 2, stride))
    return tuple(sorted(found, key=lambda one: _ORDER.index(one.group)))


_ORDER = (Axis.TP, KV_REPLICA, Axis.CP, *CP_LEVELS, Axis.EP, "dp-cp", EXPERT_DP, Axis.PP, EMBEDDING)


def sending_most(work: Workload) -> Stage:
    """The stage whose ranks send most bytes in their groups, without what attention sends over cp."""
    return max(_distinct(work), key=lambda stage: sum(one.wire_bytes for one in collectives(work, stage).values()))


def _distinct(work: Workload) -> list[Stage]:
    """Stages that may send most: of those that recompute the same the longest, the first and the last."""
    stages = work.stages
    words = (work.recompute,) * len(stages) if isinstance(work.recompute, str) else work.recompute
    longest = [
        max((stage for stage, of in zip(stages, words, strict=True) if of == word), key=lambda one: len(one.layers))
        for word in dict.fromkeys(words)
    ]
    return list(dict.fromkeys((stages[0], *longest, stages[-1])))


def _exchanged(work: Workload, stage: Stage) -> float:
    """Bytes that the attention of a stage exchanges for one micro-batch; without cp, how often it attends."""
    sent = _sizes(context_exchanges(work.of_stage(stage)))
    return work.shape.attending(stage.layers) * (sent or 1)


def _sizes(exchanges: Iterable[ContextExchange]) -> float:
    return sum(one.wire_bytes for one in exchanges)


def _replicas(work: Workload) -> int:
    """Ranks that hold the same kv heads."""
    return work.shape.kv_replicas(work.tp)


_CARRIED = {"all-gather": "weights", "all-to-all": "matrices for Muon"}


def _operation(group: str, kinds: Mapping[str, Sent]) -> str:
    if group in ("dp-cp", EXPERT_DP):
        first, *rest = (f"{kind} of {_CARRIED.get(kind, 'gradients')}" for kind in kinds)
        return " + ".join((first, *rest)) + (" of experts" if group == EXPERT_DP else "")
    if group == KV_REPLICA:
        return "all-reduce of gradients"
    return " + ".join(sorted(kinds))


def _stride(work: Workload, group: str) -> int:
    """Distance in ranks between neighbours of a group."""
    if group in (Axis.EP, EXPERT_DP):
        return work.expert_stride(Axis.EP if group == Axis.EP else Axis.DP)
    if group != "dp-cp":
        return work.stride(Axis.TP)
    return min((work.stride(axis) for axis in (Axis.DP, Axis.CP) if work.size(axis) > 1), default=1)


def _group(
    work: Workload, group: str, operation: str, messages: int, size: float, ranks: int, stride: int
) -> GroupTraffic:
    leaves = work.nodes > 1 and stride * ranks > work.gpus_per_node
    link = work.machine.network_link if leaves else work.machine.node_link
    return GroupTraffic(group, operation, messages, size, link, leaves)


class Traffic(NamedTuple):
    """Bytes that one rank sends in one optimizer step, by the groups that carry them."""

    tp: int
    cp: int
    dp_cp: int
    pp: int
    cp_levels: tuple[tuple[int, int, int], ...] = ()
    """Of each level of context parallelism: ranks, the distance of neighbours in places of the cp group, bytes."""
    ep: int = 0
    expert_dp: int = 0
    ep_ranks: int = 1
    """Ranks that share experts."""
    expert_tp: int | None = None
    """Ranks that share each expert; None: those of tp."""

    def by_group(self) -> dict[str, int]:
        """The bytes under the names of the groups."""
        dense = {Axis.TP: self.tp, Axis.CP: self.cp, "dp-cp": self.dp_cp, Axis.PP: self.pp}
        return dense if self.ep_ranks == 1 else {**dense, Axis.EP: self.ep, EXPERT_DP: self.expert_dp}


def _state_bytes(work: Workload, stage: Stage) -> int:
    """What layers of a stage send over cp for other mechanisms than attention."""
    windows = window_exchanges(work.of_stage(stage), stage.layers)
    sent = sent_over_cp(work, stage.layers)[1] + gathered_over_cp(work, stage.layers)[1]
    return int(sent + sum(one.wire_bytes for one in windows))


def step_traffic(work: Workload) -> Traffic:
    """What a rank sends in a step, of the stage that sends most in its groups.

    What replicated kv heads exchange counts to tp, whose ranks they are.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    stage = sending_most(work)
    sent = collectives(work, stage)

    def over(*groups: str) -> int:
        return int(sum(one.wire_bytes for (group, _), one in sent.items() if group in groups))

    between = stage_exchanges(work, busiest_stage(work)).get((Axis.PP, "send"))
    attending = max(work.stages, key=lambda one: work.shape.attending(one.layers))
    passes = work.shape.attending(attending.layers) * work.micro_batches
    levels = tuple(
        (one.ranks, one.stride, int(one.wire_bytes) * passes) for one in context_exchanges(work.of_stage(attending))
    )
    states = max(_state_bytes(work, one) for one in work.stages)
    if states:
        levels = (*levels, (work.cp, 1, states))
    return Traffic(
        tp=over(Axis.TP, KV_REPLICA),
        cp=sum(size for _, _, size in levels),
        dp_cp=over("dp-cp"),
        pp=int(between.wire_bytes) if between else 0,
        cp_levels=levels,
        ep=over(Axis.EP),
        expert_dp=over(EXPERT_DP),
        ep_ranks=work.ep,
        expert_tp=work.expert_tp,
    )


class Placement(NamedTuple):
    """One order of the axes: how far its groups reach, and the bytes that leave the node."""

    order: tuple[Axis, ...]
    reaches: Mapping[str, Reach]
    leaving_bytes: int

    def keeps(self, name: str) -> bool:
        """Whether every group of this name lies on one node."""
        return self.reaches[name].leaving_node == 0


def placement(grid: Grid, per_node: int, traffic: Traffic) -> Placement:
    """How a grid lies on the machines."""
    groups = Groups(grid, ep=traffic.ep_ranks, expert_tp=traffic.expert_tp)
    reaches = {name: reach(groups.family(name), per_node) for name in traffic.by_group()}
    sent = [(reaches[name], size) for name, size in traffic.by_group().items() if name != Axis.CP]
    cp = grid.size((Axis.CP,))
    for ranks, stride, size in traffic.cp_levels:
        level = grid.factored(Axis.CP, ("within", "level", "beyond"), (stride, ranks, cp // (stride * ranks)))
        sent.append((reach(AxisGroups(level, ("level",)), per_node), size))
    leaving = sum((Fraction(size * far.leaving_node, far.count) for far, size in sent), Fraction(0))
    return Placement(tuple(map(Axis, grid.order)), reaches, int(leaving))


def alternatives(grid: Grid, per_node: int, traffic: Traffic) -> list[Placement]:
    """Every other order of the axes that puts ranks elsewhere, the one that sends least between nodes first.

    Axes of size 1 keep the end of the default order, so that no two of the orders are the same grid. Where experts are
    dealt over ep, each rank has those of its own place on tp and pp in all of them.
    """
    sizes, ep = {axis: grid.size((axis,)) for axis in DENSE_AXES}, traffic.ep_ranks
    large = [axis for axis in AXES if {**sizes, Axis.EP: ep}[axis] > 1]
    small = [axis for axis in AXES if axis not in large]
    here = tuple(axis for axis in grid.order if axis in large)
    orders = (order for order in itertools.permutations(large) if order != here)
    grids = [Grid.of((*order, *small), sizes) for order in orders]
    found = [
        placement(other, per_node, traffic)
        for other in grids
        if ep == 1 or keeps_places(other, expert_grid(other, ep, traffic.expert_tp))
    ]
    return sorted(found, key=lambda one: (one.leaving_bytes, one.order))
