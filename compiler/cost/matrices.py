"""What Muon sends and takes at the end of a step: matrices on their way to their owners, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from parcompile.layout.groups import EXPERT_DP, Axis
from parcompile.layout.matrices import newton_schulz_work, pieces, rounds, takes_muon
from parcompile.layout.pipeline import Stage
from parcompile.layout.shards import MASTER_BYTES
from parcompile.model.derived_rows import parameter_table
from parcompile.model.table import within

from .workload import Workload


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands among those that share the states of a dense layer, of an expert, and among those of tp."""

    shard: int = 0
    expert_shard: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """A matrix, or a stack of them, as a rank of tp has it."""

    shape: tuple[int, ...]
    is_cut: bool
    is_dealt: bool


def matrix_messages(work: Workload, stage: Stage, place: RankPlace) -> dict[str, tuple[int, float]]:
    """Messages and bytes of a rank of a stage in a step, by group; see `runtime/optimizers.py`."""
    found: dict[str, tuple[int, float]] = {}

    def send(group: str, elements: int) -> None:
        messages, size = found.get(group, (0, 0.0))
        found[group] = messages + 1, size + MASTER_BYTES * elements

    every = list(_held(work, stage)) if work.muon else []
    for group, ranks, own in (("dp-cp", work.shards, place.shard), (EXPERT_DP, work.expert_shards, place.expert_shard)):
        held = [one for one in every if one.is_dealt is (group == EXPERT_DP)]
        numels = [math.prod(one.shape) for one in held]
        parts = pieces(numels, ranks, of_each=work.shards_weights)
        sizes = [
            numel if not work.zero_stage else stop - start
            for numel, (start, stop) in zip(numels, (one[own] for one in parts), strict=True)
        ]
        works = [newton_schulz_work(one.shape) for one in held]
        for turn in rounds(works, [one.is_cut for one in held], ranks, work.tp):
            mine = [owner for owner in turn if owner.shard == own]
            if ranks > 1 and work.zero_stage:
                send(group, sum(sizes[owner.matrix] for owner in turn if owner not in mine))
            if turn[0].tp is not None and mine:
                send(Axis.TP, sum(numels[owner.matrix] for owner in mine if owner.tp != place.tp))
                send(Axis.TP, sum((work.tp - 1) * numels[owner.matrix] for owner in mine if owner.tp == place.tp))
            if ranks > 1:
                back = (
                    (numels[one.matrix] - sizes[one.matrix]) if work.zero_stage else (ranks - 1) * numels[one.matrix]
                    for one in mine
                )
                send(group, sum(back))
    return found


def _held(work: Workload, stage: Stage) -> Iterator[_Held]:
    """The matrices of a stage, in the order in which the model registers them."""
    table = parameter_table(work.shape)
    together = table.layers_per_module
    for first in range(0, table.num_layers, together):
        for parameter in table.layer:
            if not takes_muon(parameter):
                continue
            layout = work.layout(parameter)
            cut = layout.ranges is not None and len(layout.ranges) > 1
            for layer in within(parameter.layers, range(first, first + together)):
                if layer in stage.layers:
                    yield _Held(layout.local_shape, cut, layout.ep > 1)
