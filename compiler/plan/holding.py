"""Which parameters the ranks of a pipeline stage hold: names as the whole model has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from parcompile.layout.groups import EXPERT_DP, Axis
from parcompile.layout.pipeline import Stage

if TYPE_CHECKING:
    from .plan import Plan


def layer_numbers(stages: Sequence[Stage]) -> list[int]:
    """The layers of these (virtual) stages, in order."""
    return [layer for stage in stages for layer in stage.layers]


def module_numbers(layers: Sequence[int], layers_per_module: int) -> list[int]:
    """What the model calls the modules of these layers, in order."""
    return list(dict.fromkeys(layer // layers_per_module for layer in layers))


class Holding:
    """What a pp rank holds of a plan's model.

    Args:
        plan: the plan.
        pp_rank: the place in the pipeline.
    """

    def __init__(self, plan: Plan, pp_rank: int) -> None:
        table = plan.parameters
        self.stages = plan.spec.virtual_stages[pp_rank]
        self._modules = frozenset(module_numbers(layer_numbers(self.stages), table.layers_per_module))
        self._layer_prefix = table.layer[0].name.partition("{layer}")[0]
        self._before = frozenset(row.name for row in table.before)
        self._after = frozenset(row.name for row in table.after)
        embedding = next(row.name for row in table.before if row.split is not None and row.split.pads_vocabulary)
        self._tied = embedding if plan.spec.model.shape.tie_word_embeddings else None
        self._names = tuple(name for name, _ in table.expanded())

    @property
    def has_embedding(self) -> bool:
        """Whether what comes before the layers is here."""
        return any(stage.has_embedding for stage in self.stages)

    @property
    def has_head(self) -> bool:
        """Whether what comes after the layers is here."""
        return any(stage.has_head for stage in self.stages)

    @property
    def names(self) -> list[str]:
        """What is held, in the order of the model."""
        return [name for name in self._names if name in self]

    def __contains__(self, name: str) -> bool:
        """Whether a parameter of the whole model is here. A tied embedding is the head's weight too."""
        if name.startswith(self._layer_prefix):
            return int(name.removeprefix(self._layer_prefix).partition(".")[0]) in self._modules
        if name in self._before:
            return self.has_embedding or (name == self._tied and self.has_head)
        return self.has_head

    def has_buffer(self, name: str) -> bool:
        """Whether a buffer is here: with its layer, or with the module whose parameters are; others are everywhere."""
        if name.startswith(self._layer_prefix):
            return name in self
        owner = name.rpartition(".")[0]
        ends = [row for row in (*self._before, *self._after) if row.rpartition(".")[0] == owner]
        return not ends or any(row in self for row in ends)


class ModelParallelPlace(NamedTuple):
    """Where a rank stands among those that share one copy of the model."""

    pp: int
    tp: int


def model_parallel_places(plan: Plan) -> list[ModelParallelPlace]:
    """The places of model-parallel ranks (DeepSpeed's name for tp × pp, by which it numbers files), in their order."""
    grid = plan.groups.grid
    places = (grid.coordinates(rank) for rank in plan.groups.of_rank("tp-pp", 0))
    return [ModelParallelPlace(place[Axis.PP], place[Axis.TP]) for place in places]


class ExpertPlace(NamedTuple):
    """Which experts the rank of an optimizer shard has, and which part of their states."""

    ep: int
    expert_dp: int


def expert_places(plan: Plan, tp_rank: int = 0) -> list[ExpertPlace]:
    """Of each shard of a tp rank's optimizer states, in their order: where its rank stands in the groups of experts.

    There are dp · cp shards. At ZeRO stage 0 there is one for each ep rank, of which the first has all other states
    too. All tp ranks have the same, unless they hold other experts (`expert_tp`).
    """
    groups = plan.groups
    if not plan.spec.zero_stage:
        return [ExpertPlace(ep_rank, 0) for ep_rank in range(groups.ep)]
    if groups.ep == 1:
        return [ExpertPlace(0, shard) for shard in range(plan.spec.parallelism.zero_shards)]

    def place(rank: int, name: str) -> int:
        return groups.of_rank(name, rank).index(rank)

    first = groups.of_rank(Axis.TP, 0)[tp_rank]
    return [ExpertPlace(place(rank, Axis.EP), place(rank, EXPERT_DP)) for rank in groups.of_rank("dp-cp", first)]


def further_ep_ranks(plan: Plan, tp_rank: int) -> list[int]:
    """The ep ranks of a tp rank's shards, beside that of the first, which writes the file of weights."""
    _, *others = dict.fromkeys(place.ep for place in expert_places(plan, tp_rank))
    return sorted(others)
