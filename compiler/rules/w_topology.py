"""How the groups lie on the machines: tensor and context parallelism want to stay on a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parcompile.cost.step import timing
from parcompile.cost.traffic import Placement, Traffic, placement, step_traffic
from parcompile.cost.workload import Workload
from parcompile.diagnostics import Fix, Path, Safety, Severity
from parcompile.layout.groups import DENSE_AXES, Axis, Grid
from parcompile.machines.accelerator import accelerators
from parcompile.spec.resolve import Resolution, Unavailable
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes, format_seconds

from .arithmetic import axis_path
from .registry import EXPERTS_RULE, Finding, rule

if TYPE_CHECKING:
    from parcompile.cost.executions import Execution

_ORDER = ("parallelism", "order")


def _grid(spec: Resolution) -> Grid:
    grid = Grid.of(spec.order, {axis: spec.axis(axis) for axis in DENSE_AXES})
    if grid.world_size != spec.world_size or len(set(spec.order)) != len(spec.order):
        raise Unavailable("parallelism")  # W001 or W004 speaks of it
    return grid


def _traffic(spec: Resolution) -> Traffic:
    if spec.axis(Axis.DP) * spec.axis(Axis.CP) % spec.axis(Axis.EP):
        raise Unavailable("parallelism")  # W003 speaks of it
    try:
        return step_traffic(workload_of(spec.spec()))
    except ValueError:
        raise Unavailable("model") from None


def _timed(spec: Resolution) -> Workload:
    """The step of a spec on a machine that is known.

    Raises:
        Unavailable: another rule says what is wrong with the file that describes the machine.
    """
    if spec.cluster.preset is None and spec.cluster.accelerator not in accelerators():
        raise Unavailable("cluster")
    return workload_of(spec.spec())


def _leaving(spec: Resolution) -> Iterator[tuple[Axis, Placement, Execution | None]]:
    """Each of tp and cp whose groups leave the node, with the order of a search where that is faster and keeps it."""
    per_node = spec.cluster.gpus_per_node
    if spec.cluster.nodes == 1:
        return
    grid, traffic = _grid(spec), _traffic(spec)
    here = placement(grid, per_node, traffic)
    leaving = [axis for axis in (Axis.TP, Axis.CP) if not here.keeps(axis)]
    if not leaving:
        return
    # Only here: groups of most specs stay on a node.
    from parcompile.cost.context_time import EQUAL
    from parcompile.cost.executions import best_order

    work = _timed(spec)
    best = best_order(work)
    faster = best.step.seconds * EQUAL < timing(work).step.seconds
    there = placement(Grid.of(best.work.order, {axis: spec.axis(axis) for axis in DENSE_AXES}), per_node, traffic)
    for axis in leaving:
        yield axis, here, best if faster and there.keeps(axis) else None


@rule("W010", severity=Severity.WARNING)
def order_keeps_groups_on_a_node(spec: Resolution) -> Iterator[Finding]:
    """Fires when the order that a search gives this layout keeps groups of tp or cp on a node and is faster."""
    for axis, here, better in _leaving(spec):
        if better is None:
            continue
        found, order = here.reaches[axis], "-".join(better.work.order)
        seconds = timing(_timed(spec)).step.seconds
        yield Finding(
            f"{found.leaving_node} of {found.count} {axis} groups span {found.nodes[1]} nodes: with "
            f"order {'-'.join(here.order)} each rank sends {format_bytes(here.leaving_bytes)} per step in groups that "
            f"leave it, and a step takes about {format_seconds(seconds)}; with order {order} "
            f"{format_seconds(better.step.seconds)}",
            _place(spec, axis),
            help=f"write order {order}",
            fixes=(Fix.setting(_ORDER, order, Safety.CHANGES_COST),),
        )


@rule("W011", severity=Severity.INFO)
def ring_over_nodes_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Says how far the ring reaches and what it sends."""
    for axis, here, better in _leaving(spec):
        if axis is Axis.CP and better is None:
            found, size = here.reaches[Axis.CP], _traffic(spec).cp
            yield Finding(
                f"tp {spec.axis(Axis.TP)} · cp {spec.axis(Axis.CP)} on nodes of {spec.cluster.gpus_per_node}: "
                f"{found.leaving_node} of {found.count} cp groups lie on {found.nodes[1]} nodes; each rank sends "
                f"{format_bytes(size)} per step in its cp group",
                _place(spec, Axis.CP),
            )


@rule(EXPERTS_RULE, severity=Severity.WARNING)
def experts_stay_on_a_node(spec: Resolution) -> Iterator[Finding]:
    """Fires when groups of ep lie on several nodes; says what they send and the share of a step that it takes."""
    if spec.axis(Axis.EP) == 1 or spec.cluster.nodes == 1:
        return
    traffic = _traffic(spec)
    here = placement(_grid(spec), spec.cluster.gpus_per_node, traffic)
    if here.keeps(Axis.EP):
        return
    found, step = here.reaches[Axis.EP], timing(_timed(spec)).step
    yield Finding(
        f"{found.leaving_node} of {found.count} ep groups span {found.nodes[1]} nodes: each rank sends "
        f"{format_bytes(traffic.ep)} per step in its ep group, which takes about {step.expert / step.seconds:.0%} of "
        "the step",
        axis_path(Axis.EP),
        help=f"keep tp · ep within the {spec.cluster.gpus_per_node} ranks of a node",
    )


def _place(spec: Resolution, axis: Axis) -> Path:
    return _ORDER if spec.given(*_ORDER) else axis_path(axis)
