"""Which order of the axes keeps traffic inside the nodes, and what the other orders would send between them.

Traffic is counted per rank and optimizer step. What a family of groups sends counts as leaving the node for the share
of its groups that lie on more than one: the slowest link of a ring sets its pace, whatever the others do.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from .cost.communication import tensor_parallel_traffic
from .cost.context import AttentionSizes, exchanges
from .layout.context import ContextParallel
from .layout.families import Slice
from .layout.grid import AXES, Grid
from .layout.groups import GROUP_AXES
from .layout.topology import Reach, reach
from .model.shape import ModelShape

DENSE_AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in one optimizer step, by the groups that carry them."""

    tp: int
    cp: int
    dp_cp: int
    pp: int
    cp_levels: tuple[tuple[int, int, int], ...] = ()
    """Of each level of context parallelism: ranks, the distance of neighbours in places of the cp group, bytes."""

    def by_group(self) -> dict[str, int]:
        """The bytes under the names of the groups."""
        return {"tp": self.tp, "cp": self.cp, "dp-cp": self.dp_cp, "pp": self.pp}


def step_traffic(
    shape: ModelShape,
    sizes: Mapping[str, int],
    *,
    num_layers: int,
    virtual_stages: int = 1,
    rank_numel: int,
    sequence_length: int,
    micro_batch_size: int,
    micro_batches: int,
    element_bytes: int,
    gradient_bytes: int,
    context: ContextParallel,
    on_gpu: bool = True,
    recomputed: bool = False,
) -> Traffic:
    """What a rank sends in a step.

    It holds `num_layers` layers in `virtual_stages` stages and `rank_numel` parameters; `element_bytes` are those of
    weights and activations, `gradient_bytes` those of a reduced gradient. Over dp · cp DeepSpeed's ZeRO stage 1
    all-reduces gradients, 2 (N − 1) / N of them, and gathers weights. What layers and loss send beside their
    activations is too little to decide an order: `cost.collectives` counts it. `context`, `on_gpu` and `recomputed` are
    as in `cost.context.exchanges`.
    """
    tp, cp, dp, pp = (sizes.get(axis, 1) for axis in DENSE_AXES)
    local_length = sequence_length // cp
    common = {"num_layers": num_layers, "micro_batch_size": micro_batch_size, "element_bytes": element_bytes}
    tensor = tensor_parallel_traffic(sequence_length=local_length, hidden_size=shape.hidden_size, tp=tp, **common)
    attention = AttentionSizes.of(shape, tp, local_length * micro_batch_size, element_bytes)
    passes = num_layers * micro_batches
    levels = tuple(
        (one.ranks, one.stride, int(one.wire_bytes) * passes)
        for one in exchanges(attention, context, on_gpu=on_gpu, recomputed=recomputed)
    )
    shards = dp * cp
    boundary = local_length * micro_batch_size * shape.hidden_size * element_bytes
    return Traffic(
        tp=tensor.wire_bytes * micro_batches,
        cp=sum(size for _, _, size in levels),
        dp_cp=int(rank_numel * (2 * gradient_bytes + element_bytes) * Fraction(shards - 1, shards)),
        pp=boundary * micro_batches * virtual_stages if pp > 1 else 0,
        cp_levels=levels,
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """One order of the axes: how far its groups reach, and the bytes that leave the node."""

    order: tuple[str, ...]
    reaches: Mapping[str, Reach]
    leaving_bytes: int

    def keeps(self, name: str) -> bool:
        """Whether every group of this name lies on one node."""
        return self.reaches[name].leaving_node == 0


def placement(grid: Grid, per_node: int, traffic: Traffic) -> Placement:
    """How a grid lies on the machines."""
    reaches = {name: reach(Slice(grid, GROUP_AXES[name]), per_node) for name in traffic.by_group()}
    sent = [(reaches[name], size) for name, size in traffic.by_group().items() if name != "cp"]
    cp = grid.size(("cp",))
    for ranks, stride, size in traffic.cp_levels:
        level = grid.factored("cp", ("within", "level", "beyond"), (stride, ranks, cp // (stride * ranks)))
        sent.append((reach(Slice(level, ("level",)), per_node), size))
    leaving = sum((Fraction(size * far.leaving_node, far.count) for far, size in sent), Fraction(0))
    return Placement(grid.order, reaches, int(leaving))


def alternatives(grid: Grid, per_node: int, traffic: Traffic) -> list[Placement]:
    """Every other order of the axes that puts ranks elsewhere, the one that sends least between nodes first.

    Axes of size 1 keep the end of the default order, so that no two of the orders are the same grid.
    """
    sizes = {axis: grid.size((axis,)) for axis in DENSE_AXES}
    large = [axis for axis in AXES if sizes.get(axis, 1) > 1]
    small = [axis for axis in AXES if axis not in large]
    here = tuple(axis for axis in grid.order if axis in large)
    found = [
        placement(Grid.of((*order, *small), sizes), per_node, traffic)
        for order in itertools.permutations(large)
        if order != here
    ]
    return sorted(found, key=lambda one: (one.leaving_bytes, one.order))
