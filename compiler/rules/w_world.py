"""The world is the product of the axes, which the order names once each; and how their groups lie on the machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from parcompile.cost.step import timing
from parcompile.cost.traffic import Placement, Traffic, placement, step_traffic
from parcompile.cost.workload import Workload
from parcompile.diagnostics import Fix, Related, Safety
from parcompile.layout.groups import AXES, DENSE_AXES, FACTORS, Axis, Grid, Reach, divisors
from parcompile.machines import accelerators
from parcompile.spec.resolve import Resolution, Unavailable

from . import Finding, also, axis_path, layout_change, listed, nearest_divisors, rule


@rule("W001")
def axes_multiply_to_the_world(spec: Resolution) -> Iterator[Finding]:
    if len(spec.auto_axes) > 1:
        return
    world, cluster = spec.world_size, spec.cluster
    fixed = [axis for axis in FACTORS if axis not in spec.auto_axes]
    sizes = {axis: spec.axis(axis) for axis in fixed}
    product = math.prod(sizes.values())
    equation = " · ".join(f"{axis} {size}" for axis, size in sizes.items())
    machines = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} · {cluster.gpus_per_node} GPUs = {world}"
    given = [axis for axis in fixed if spec.given(*axis_path(axis)) and sizes[axis] > 1]
    path = axis_path(given[0]) if given else ("cluster", "gpus_per_node")
    related = also(spec, ("cluster", "nodes"), ("cluster", "gpus_per_node"), *map(axis_path, given[1:]))
    if spec.auto_axes and world % product:
        yield Finding(
            f"{equation} = {product} does not divide the world of {machines}: {world} / {product} is not whole",
            path,
            help=f'the axes beside the "auto" {spec.auto_axes[0]} have to multiply to a divisor of {world}: '
            f"{listed(divisors(world))}",
            fixes=_resized(spec, given, sizes),
            related=related,
        )
    elif not spec.auto_axes and product != world:
        fixes = _resized(spec, given, sizes)
        hint = f"tp · cp · pp · dp has to be {world}"
        without_dp = product // sizes[Axis.DP]
        if world % without_dp == 0:
            fits = world // without_dp
            hint = f'write dp {fits}, or "auto": {world} / {without_dp} = {fits}'
            fixes = (_resize(spec, Axis.DP, fits), *(fix for fix in fixes if fix.edits[0].path[-1] != Axis.DP))
        yield Finding(f"{equation} = {product} ≠ world of {machines}", path, help=hint, fixes=fixes, related=related)


def _resized(spec: Resolution, given: list[Axis], sizes: dict[Axis, int]) -> tuple[Fix, ...]:
    """Other sizes of one axis with which the product fits, the smallest change first."""
    found: list[tuple[int, Fix]] = []
    for axis in given:
        rest = math.prod(size for other, size in sizes.items() if other != axis)
        if spec.world_size % rest == 0:
            room = spec.world_size // rest
            near = nearest_divisors(sizes[axis], room, count=2) if spec.auto_axes else (room,)
            found += [(abs(size - sizes[axis]), _resize(spec, axis, size)) for size in near if size != sizes[axis]]
    return tuple(fix for _, fix in sorted(found, key=lambda one: (one[0], one[1].title)))


def _resize(spec: Resolution, axis: Axis, size: int) -> Fix:
    return Fix.setting(axis_path(axis), size, layout_change(spec))


# The order names each axis once, in a way that the targets know.

_ORDER = ("parallelism", "order")
_MEGATRON_ORDERS = (AXES, (Axis.TP, Axis.CP, Axis.EP, Axis.PP, Axis.DP))


def _reordered(order: str, message: str, hint: str, related: tuple[Related, ...] = ()) -> Finding:
    return Finding(message, _ORDER, hint, (Fix.setting(_ORDER, order, Safety.CHANGES_COST),), related)


@rule("W004")
def order_names_each_axis_once(spec: Resolution) -> Iterator[Finding]:
    if not spec.given(*_ORDER):
        return
    named = str(spec.get(*_ORDER)).split("-")
    twice = [axis for axis in AXES if named.count(axis) > 1]
    if twice:
        once = "-".join(dict.fromkeys(named))
        message = f"{', '.join(twice)} stands twice in the order {'-'.join(named)}"
        yield _reordered(once, message, f"name each axis once: {once}")
    missing = [axis for axis in AXES if axis not in named and spec.axis(axis) > 1]
    if missing:
        sizes = ", ".join(f"{axis} {spec.axis(axis)}" for axis in missing)
        full = "-".join(chain(dict.fromkeys(named), missing))
        hint = f"name every axis that is larger than 1, for example {full}"
        related = also(spec, *map(axis_path, missing))
        yield _reordered(full, f"the order {'-'.join(named)} leaves out {sizes}", hint, related)


@rule("W006", targets=("megatron",))
def megatron_pipelines_are_outermost(spec: Resolution) -> Iterator[Finding]:
    pp, cp, ep, order = spec.axis(Axis.PP), spec.axis(Axis.CP), spec.axis(Axis.EP), spec.order
    outside = [axis for axis in order[order.index(Axis.PP) + 1 :] if spec.axis(axis) > 1]
    if pp > 1 and outside and cp != ep:
        dp, inner = spec.axis(Axis.DP), (axis for axis in order if axis is not Axis.PP)
        message = f"the order {'-'.join(order)} with pp {pp}, and dp {dp} ≠ expert-dp {dp} · cp {cp} / ep {ep}"
        hint, related = "move pp to the end of the order", also(spec, axis_path(Axis.PP))
        yield _reordered("-".join((*inner, Axis.PP)), message, hint, related)


@rule("W007", targets=("megatron",))
def megatron_knows_the_order(spec: Resolution) -> Iterator[Finding]:
    larger = tuple(axis for axis in spec.order if spec.axis(axis) > 1)
    known = [tuple(axis for axis in order if axis in larger) for order in _MEGATRON_ORDERS]
    if larger not in known:
        right = "-".join(_MEGATRON_ORDERS[0])
        message = f"the order {'-'.join(larger)} is not {' or '.join(dict.fromkeys('-'.join(one) for one in known))}"
        yield _reordered(right, message, f"write {right}")


def dense_grid(spec: Resolution) -> Grid:
    """Where ranks stand in dense layers.

    Raises:
        Unavailable: the order names an axis twice.
    """
    if len(set(spec.order)) != len(spec.order):
        raise Unavailable("parallelism")  # W004 speaks of it
    return Grid.of(spec.order, {axis: spec.axis(axis) for axis in DENSE_AXES})


def _grid(spec: Resolution) -> Grid:
    grid = dense_grid(spec)
    if grid.world_size != spec.world_size:
        raise Unavailable("parallelism")  # W001 speaks of it
    return grid


def traffic(spec: Resolution) -> Traffic:
    if spec.axis(Axis.DP) * spec.axis(Axis.CP) % spec.axis(Axis.EP):
        raise Unavailable("parallelism")  # W003 speaks of it
    try:
        return step_traffic(spec.work)
    except ValueError:
        raise Unavailable("model") from None


def timed(spec: Resolution) -> Workload:
    """The step of a spec on a machine that is known.

    Raises:
        Unavailable: another rule says what is wrong with the file that describes the machine.
    """
    if spec.cluster.preset is None and spec.cluster.accelerator not in accelerators():
        raise Unavailable("cluster")
    return spec.work


class Leaving(NamedTuple):
    """An axis whose groups leave the node: how far they reach, of what placement.

    With the order of a search and its seconds, where that is faster and keeps the groups.
    """

    axis: Axis
    found: Reach
    here: Placement
    order: str = ""
    seconds: float = 0.0


def leaving_groups(spec: Resolution) -> Iterator[Leaving]:
    """Those of tp and cp."""
    per_node = spec.cluster.gpus_per_node
    if spec.cluster.nodes == 1:
        return
    grid, sent = _grid(spec), traffic(spec)
    here = placement(grid, per_node, sent)
    leaving = [axis for axis in (Axis.TP, Axis.CP) if not here.keeps(axis)]
    if not leaving:
        return
    # Only here: groups of most specs stay on a node.
    from parcompile.cost.context_time import EQUAL
    from parcompile.cost.executions import best_order

    work = timed(spec)
    best = best_order(work)
    faster = best.step.seconds * EQUAL < timing(work).step.seconds
    there = placement(Grid.of(best.work.order, {axis: spec.axis(axis) for axis in DENSE_AXES}), per_node, sent)
    for axis in leaving:
        better = ("-".join(best.work.order), best.step.seconds) if faster and there.keeps(axis) else ()
        yield Leaving(axis, here.reaches[axis], here, *better)


def leaving_experts(spec: Resolution) -> Iterator[Reach]:
    """How far groups of ep reach that leave the node."""
    if spec.axis(Axis.EP) > 1 and spec.cluster.nodes > 1:
        here = placement(_grid(spec), spec.cluster.gpus_per_node, traffic(spec))
        if not here.keeps(Axis.EP):
            yield here.reaches[Axis.EP]
