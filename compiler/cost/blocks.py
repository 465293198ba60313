"""What the blocks of a model (`parcompile.model.blocks`) cost together: sums over those that stand in some layers."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.layout.stages import Stage
from parcompile.model.blocks import Exchange, Local
from parcompile.model.parameters import parameter_table

from .workload import Workload


def local(work: Workload) -> Local:
    """What a rank has of a micro-batch."""
    return Local(
        batch=work.micro_batch,
        hidden=work.shape.hidden_size,
        streams=work.shape.residual_streams,
        width=work.element_bytes,
        tokens=work.local_tokens,
        split_tokens=work.split_tokens,
        tp=work.tp,
        sequence_parallel=work.sequence_parallel,
    )


def kept_by_blocks(work: Workload, layers: range) -> float:
    """What these layers keep of a micro-batch for their blocks."""
    return sum((one.count(layers) * one.kept_bytes(local(work)) for one in work.shape.parts), 0.0)


def kept_by_one(work: Workload, layers: range) -> float:
    """The same of the layer that keeps most."""
    if not work.shape.parts:
        return 0.0
    return max(kept_by_blocks(work, range(layer, layer + 1)) for layer in layers) if layers else 0.0


def exchanges(work: Workload, layers: range, axis: str) -> Iterator[tuple[Exchange, int]]:
    """What these layers send over an axis for their blocks, and how often in a step, forward."""
    for one in work.shape.parts:
        if count := one.count(layers) * work.micro_batches:
            yield from ((found, count) for found in one.exchanges(local(work)) if found.axis == axis)


def late_gradient(work: Workload, stage: Stage) -> tuple[float, int]:
    """The largest gradient of a stage that comes late (`Block.is_late`), and how many layers stand before it."""
    found = (0.0, 0)
    for row in parameter_table(work.shape).layer if work.shape.parts else ():
        own = row.name.partition(".{layer}.")[2]
        here = sorted(set(row.layers or ()) & set(stage.layers))
        if here and any(one.is_late(own) for one in work.shape.parts):
            size = float(work.layout(row).local_numel * work.element_bytes)
            found = max(found, (size, here[-1] - stage.layers[0]))
    return found
