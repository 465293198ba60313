"""Which order of the axes keeps traffic inside the nodes, and what the other orders would send between them.

Traffic is counted per rank and optimizer step. What a family of groups sends counts as leaving the node for the share
of its groups that lie on more than one: the slowest link of a ring sets its pace, whatever the others do.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from parcompile.cost.blocks import gathered_over_cp, sent_over_cp, window_exchanges
from parcompile.cost.collectives import busiest_stage, collectives, stage_exchanges
from parcompile.cost.context_exchanges import context_exchanges
from parcompile.cost.traffic import sending_most
from parcompile.cost.workload import Workload
from parcompile.layout.grid import AXES, DENSE_AXES, Axis, Grid
from parcompile.layout.groups import EXPERT_DP, KV_REPLICA, AxisGroups, Groups, Reach, expert_grid, reach
from parcompile.layout.shards import keeps_places
from parcompile.layout.stages import Stage


@dataclass(frozen=True, slots=True)
class Traffic:
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


@dataclass(frozen=True, slots=True)
class Placement:
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
