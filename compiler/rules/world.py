"""The world is the product of the axes, and the order names each axis once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from parcompile.diagnostics import Edit, Fix, Safety, Severity
from parcompile.layout.grid import AXES
from parcompile.resolve import Resolution

from .registry import Finding, rule

_DENSE = ("tp", "cp", "pp", "dp")


@rule(
    "W001",
    "the axes do not multiply to the world size",
    """The world has nodes · gpus_per_node ranks, as declared in the spec and never as counted on some machine, and each rank has exactly
    one place on the grid: tp · cp · pp · dp = world size.""",
    sources=("Megatron-LM arguments.py; parallel_state.py", "gpt-neox#1251"),
)
def axes_multiply_to_the_world(spec: Resolution) -> Iterator[Finding]:
    """Fires when the product differs, or does not leave a whole number for the "auto" axis."""
    if len(spec.auto_axes) > 1:
        return
    world, cluster = spec.world_size, spec.cluster
    fixed = [axis for axis in _DENSE if axis not in spec.auto_axes]
    product = 1
    for axis in fixed:
        product *= spec.axis(axis)
    equation = " · ".join(f"{axis} {spec.axis(axis)}" for axis in fixed)
    machines = f"{cluster.nodes} nodes · {cluster.gpus_per_node} GPUs = {world}"
    place = next((axis for axis in fixed if spec.given("parallelism", axis) and spec.axis(axis) > 1), None)
    path = ("parallelism", place) if place else ("cluster", "gpus_per_node")
    if spec.auto_axes and world % product:
        yield Finding(
            f"{equation} = {product} does not divide the world of {machines}: {world} / {product} is not whole",
            path,
            help=f'the axes beside the "auto" {spec.auto_axes[0]} have to multiply to a divisor of {world}',
        )
    elif not spec.auto_axes and product != world:
        without_dp = product // spec.axis("dp")
        fixes: tuple[Fix, ...] = ()
        hint = f"tp · cp · pp · dp has to be {world}"
        if world % without_dp == 0:
            fits = world // without_dp
            hint = f'write dp {fits}, or "auto": {world} / {without_dp} = {fits}'
            edit = Edit(("parallelism", "dp"), fits)
            fixes = (Fix(f"set dp to {fits}", Safety.CHANGES_NUMERICS, (edit,)),)
        yield Finding(f"{equation} = {product} ≠ world of {machines}", path, help=hint, fixes=fixes)


@rule(
    "W002",
    'more than one axis is "auto"',
    """One axis can be inferred from the world size; two cannot. Choosing several is a search over layouts.""",
)
def one_axis_is_auto(spec: Resolution) -> Iterator[Finding]:
    """Fires when two axes or more are "auto"."""
    if len(spec.auto_axes) > 1:
        named = " and ".join(f'{axis} "auto"' for axis in spec.auto_axes)
        yield Finding(
            f"{named}: only one axis can follow from the world size",
            ("parallelism", spec.auto_axes[1]),
            help=f"write a number for all but one of {', '.join(spec.auto_axes)}",
        )


@rule(
    "W003",
    "the expert grid does not cover the world",
    """Experts are laid over the same ranks on a grid of their own: tp · ep · expert-dp · pp = world size, so tp · ep · pp divides it.""",
    sources=("Megatron-LM parallel_state.py",),
)
def expert_grid_covers_the_world(spec: Resolution) -> Iterator[Finding]:
    """Fires when ep does not fit into dp · cp."""
    ep, room = spec.axis("ep"), spec.axis("dp") * spec.axis("cp")
    if room % ep:
        yield Finding(
            f"ep {ep} does not divide dp {spec.axis('dp')} · cp {spec.axis('cp')} = {room}: {room} / {ep} is not whole",
            ("parallelism", "ep"),
            help="experts are shared by ranks of dp · cp: choose ep among its divisors",
        )


@rule(
    "W004",
    "the order does not name every axis once",
    """The order lists the axes from the innermost to the outermost, each at most once; an axis may be left out only when its size is 1.""",
    sources=("Megatron-LM parallel_state.py, RankGenerator",),
)
def order_names_each_axis_once(spec: Resolution) -> Iterator[Finding]:
    """Fires on repeated axes and on axes larger than 1 that are missing."""
    named = str(spec.get("parallelism", "order", default="-".join(AXES))).split("-")
    twice = sorted({axis for axis in named if named.count(axis) > 1})
    missing = [axis for axis in AXES if axis not in named and spec.axis(axis) > 1]
    if twice:
        yield Finding(f"{', '.join(twice)} stands twice in the order", ("parallelism", "order"))
    if missing:
        sizes = ", ".join(f"{axis} {spec.axis(axis)}" for axis in missing)
        full = "-".join(chain(named, missing))
        yield Finding(
            f"the order leaves out {sizes}",
            ("parallelism", "order"),
            help=f"name every axis that is larger than 1, for example {full}",
        )


@rule(
    "W008",
    "tensor parallelism leaves the node",
    """Tensor parallelism communicates twice in every layer and direction; between nodes that is several times slower than within one.""",
    severity=Severity.WARNING,
)
def tp_stays_on_a_node(spec: Resolution) -> Iterator[Finding]:
    """Fires when a tp group is larger than a node."""
    tp, node = spec.axis("tp"), spec.cluster.gpus_per_node
    if spec.cluster.nodes > 1 and tp > node:
        yield Finding(
            f"tp {tp} > gpus_per_node {node}: every tensor-parallel collective crosses nodes",
            ("parallelism", "tp"),
            help=f"use tp {node} or less and more pp, cp or dp",
        )


@rule(
    "W005",
    "dp follows from the world size",
    """An axis that is "auto" (dp when it is left out) gets what the world leaves.""",
    severity=Severity.INFO,
)
def inferred_axis_is_shown(spec: Resolution) -> Iterator[Finding]:
    """Says what was inferred."""
    for axis in spec.auto_axes[:1]:
        size = spec.axis(axis)
        how = spec.provenance[f"parallelism.{axis}"].detail
        yield Finding(f"{axis} = {size}: {how}", ("parallelism", axis))
