"""What a step computes, stores and sends depends on these numbers only: a spec becomes one, and so does a measurement.

Symbols as in the literature: t, c, e, d, p are the sizes of tp, cp, ep, dp and pp; b the micro-batch, m the
micro-batches of a step, S the sequence, h the hidden size, f the width of the MLP, V the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from parcompile.layout.groups import AXES, DENSE_AXES, Axis, Grid, expert_grid
from parcompile.layout.pipeline import Schedule, Stage, even_stages
from parcompile.layout.sequence import ContextParallel, CpImplementation
from parcompile.layout.shards import (
    ADAM_STATE_BYTES,
    MASTER_BYTES,
    GroupKind,
    ShardedGroups,
    TensorLayout,
    expert_rows,
    loss_chunk_tokens,
    mlp_tile_length,
    padded_vocab_size,
    sharded_groups,
    shared_tokens,
    takes_muon,
    tensor_layout,
)
from parcompile.machines import Accelerator, find_accelerator
from parcompile.model import Parameter
from parcompile.model.derived_rows import dense_mlps, parameter_table, shared_inputs
from parcompile.model.families import family_of
from parcompile.model.family import types_with
from parcompile.model.layer_parts import ATTENTION, MLP, parts_of
from parcompile.model.shape import ModelShape

from .parameters import expert_numel, numels_apart, rank_parameters, trained_tensors

SHARED_FIRST = types_with("shared_first")
"""Model types whose shared expert runs before the others."""
ASSUMED_IMBALANCE = 1.0
"""Rows of the busiest ep rank over the mean of all, where nobody says it: routers that balance well come near 1."""


class RankPlace(NamedTuple):
    """Where a rank stands among those that share the states of a dense layer, of an expert, and among those of tp."""

    shard: int = 0
    expert_shard: int = 0
    tp: int = 0


class Framework(NamedTuple):
    """What a training framework does beside the formulas.

    `activations` names the set of activation coefficients. `stores_scores`: attention scores go through memory, as
    before fused attention. `keeps_attention`: attention's output is kept when a whole layer is recomputed.
    `scatters_exchange`: a tp rank hands its share of the hidden states to the next stage, whose ranks gather them
    (arXiv 2104.04473, section 4.1), also where sequence parallelism has not split them. `overlaps_exchange`: sends and
    receives run behind the passes, except while the pipeline fills and drains. `overlaps_gradients`: gradients are
    reduced behind the last backward pass, and sharded weights gathered behind the first forward pass. `varies`: whether
    gathered inputs stay in memory is a setting that measured runs do not tell.
    """

    name: str
    activations: str
    stores_scores: bool = False
    keeps_attention: bool = False
    scatters_exchange: bool = False
    overlaps_exchange: bool = False
    overlaps_gradients: bool = False
    varies: bool = False

    def recomputes_attention(self, recompute: str) -> bool:
        """Whether attention is computed again in backward; selective recomputation is that of scores."""
        return (recompute == "full" and not self.keeps_attention) or (recompute == "selective" and self.stores_scores)


FRAMEWORKS = MappingProxyType(
    {
        "deepspeed": Framework("deepspeed", "eager", keeps_attention=True, overlaps_exchange=True),
        "nanotron": Framework("nanotron", "eager", varies=True),
        "megatron": Framework(
            "megatron", "fused", scatters_exchange=True, overlaps_exchange=True, overlaps_gradients=True
        ),
        "megatron-2021": Framework("megatron-2021", "fused", stores_scores=True, scatters_exchange=True),
    }
)


@dataclass(frozen=True)
class Workload:
    """One optimizer step of one layout. Sizes are counted in ranks, sequences and tokens."""

    shape: ModelShape
    nodes: int
    gpus_per_node: int
    accelerator: str
    sequence_length: int
    micro_batch: int
    micro_batches: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: tuple[Axis, ...] = AXES
    cp_layout: str = "zigzag"
    cp_implementation: str = "ring"
    cp_sizes: tuple[int, int] | None = None
    sequence_parallel: bool = False
    recompute: str | tuple[str, ...] = "none"
    """What is recomputed in backward; where stages differ, one word for each."""
    element_bytes: int = 2
    gradient_bytes: int = 4
    zero_stage: int = 1
    vocab_divisible_by: int = 128
    virtual_stages: int = 1
    micro_batch_group: int | None = None
    stage_layers: tuple[Stage, ...] | None = None
    router_scope: str | None = None
    """The tokens over which a loss balances experts (`Router.aux_loss_scope`); None: none does."""
    router_z_loss: bool = False
    offloads_activations: bool = False
    """The host holds what recomputed layers keep."""
    linear_loss: bool = False
    """Logits exist for a chunk of tokens at a time."""
    gathers_inputs: bool = False
    """Inputs of blocks that are gathered over tp are gathered again in backward."""
    tiled_mlp: bool = False
    """What lies between the projections of dense MLPs exists for a tile of tokens at a time."""
    expert_imbalance: float | None = None
    """Rows of the busiest ep rank over the mean of all; None: `ASSUMED_IMBALANCE`."""
    expert_capacity: float | None = None
    """Rows that an expert takes of the tokens of a rank over its even share; None: all that come."""
    document_length: int | None = None
    """Tokens of each document that is packed into a sequence; None: a sequence is one document."""
    state_bytes: int = ADAM_STATE_BYTES
    """What the optimizer keeps of an element; of matrices that take Muon it keeps the momentum alone."""
    muon: bool = False
    fused: bool = False
    """Adam is one kernel, which keeps nothing beside its state."""
    no_weight_decay: str | None = None
    """What weight decay leaves out, which the optimizer has in a group of its own; None: nothing."""
    ns_steps: int = 5
    """Iterations in which Muon orthogonalises a matrix, in numbers of `ns_bytes`."""
    ns_bytes: int = 2
    framework: str = "deepspeed"
    overlap_comm: bool | None = None
    """Whether DeepSpeed reduces gradients under backward, as the spec says; None: the plan decides."""
    reduce_bucket: int | None = None
    """Elements of DeepSpeed's reduce bucket, as the spec says; None: the plan decides."""
    sub_group: int = 1_000_000_000
    """Elements of a rank that DeepSpeed steps at a time at ZeRO stage 3 (sub_group_size)."""
    preset: Accelerator | None = field(default=None, hash=False)
    """A measured machine, which `accelerator` then only resembles."""
    names_machine: bool = True
    """Whether anybody said what machine it is; otherwise nothing is claimed of what fits into its memory."""
    expert_tp: int | None = None
    """Ranks that share each routed expert; None: those of tp."""
    small_numel: int = 100_000
    """Weights up to this size stay gathered at ZeRO stage 3 (DeepSpeed's stage3_param_persistence_threshold)."""
    live_numel: int = 1_000_000_000
    """Elements that are gathered there at a time, at most (DeepSpeed's stage3_max_live_parameters)."""
    on_host: bool = False
    """The host holds master weights and optimizer state, and steps."""
    pins_memory: bool = True
    """What it exchanges with the accelerator lies in page-locked memory."""
    weights_on_host: bool = False
    """The host holds the shards of weights; each is copied to the accelerator to be gathered."""
    pins_weights: bool = False
    """They lie in page-locked memory."""

    def having(self, **values: Any) -> Workload:
        """The step with other values, as `dataclasses.replace` makes it, in a tenth of the time: for searches."""
        other = object.__new__(Workload)
        other.__dict__.update(self.__dict__, **values)
        if not _LEAVE_NUMELS.issuperset(values):
            other.__dict__.pop("stage_numels", None)
        return other

    @property
    def machine(self) -> Accelerator:
        """What a rank runs on.

        Raises:
            ValueError: there is no such preset.
        """
        return self.preset or find_accelerator(self.accelerator)

    @property
    def imbalance(self) -> float:
        """The factor by which the busiest ep rank gets more rows than the mean; 1 where each rank has all experts.

        With a capacity each rank gets equally many: as many over those of balanced experts.
        """
        if self.ep == 1:
            return 1.0
        moe, rows = self.shape.moe, self.capacity_rows
        if moe is not None and rows is not None:
            return rows * moe.num_experts * self.tp / (self.local_tokens * moe.num_experts_per_token)
        return ASSUMED_IMBALANCE if self.expert_imbalance is None else self.expert_imbalance

    @property
    def capacity_rows(self) -> int | None:
        """Rows that an expert takes of the tokens of the rank with most; None where it takes all that come."""
        if self.expert_capacity is None or self.shape.moe is None:
            return None
        moe, (_, tokens) = self.shape.moe, shared_tokens(self.local_tokens, self.tp, 0)
        return expert_rows(self.expert_capacity, tokens, moe.num_experts_per_token, moe.num_experts)

    @property
    def attended_length(self) -> int:
        """Tokens that see one another: those of a document."""
        return self.document_length or self.sequence_length

    @property
    def busiest_shape(self) -> ModelShape:
        """The model as the busiest ep rank sees it: its experts compute that many more rows of each token."""
        return _with_rows(self.shape, self.imbalance)

    @property
    def shape_of_rows(self) -> ModelShape:
        """The same with the rows that ep ranks exchange: none for experts that give back what they take."""
        moe = self.shape.moe
        share = 1.0 if moe is None or self.ep == 1 else moe.num_experts / moe.num_choices
        return _with_rows(self.shape, self.imbalance * share)

    @property
    def runs_shared_first(self) -> bool:
        """Whether a shared expert runs before the others, or while rows travel to them: so it goes backward last."""
        experts = family_of(self.shape.model_type).experts
        travels = self.ep > 1 and experts is not None and not experts.beside
        return self.shape.model_type in SHARED_FIRST or travels

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The layers of each pp rank.

        Raises:
            ValueError: the layers do not divide.
        """
        return self.stage_layers or even_stages(self.shape.num_hidden_layers, self.pp)

    def of_stage(self, stage: Stage) -> Workload:
        """The step with what this one of `stages` recomputes; where stages differ, none of them is virtual."""
        if isinstance(self.recompute, str):
            return self
        return replace(self, recompute=self.recompute[self.stages.index(stage)])

    def recompute_of(self, stage: int) -> str:
        """What the stage with this index recomputes."""
        return self.recompute if isinstance(self.recompute, str) else self.recompute[stage]

    @property
    def most_recomputed(self) -> Workload:
        """The step of a stage that recomputes whole layers, or else attention, where any does."""
        words = self.recompute_words
        again = (word for word in words if ATTENTION in parts_of(word))
        return replace(self, recompute="full" if "full" in words else next(again, words[0]))

    @property
    def recompute_words(self) -> tuple[str, ...]:
        """What is recomputed: one word, or one for each stage."""
        return (self.recompute,) if isinstance(self.recompute, str) else self.recompute

    @property
    def recompute_text(self) -> str:
        """In words: "full", or "full on stage 0, none on stages 1-3"."""
        if isinstance(self.recompute, str):
            return self.recompute
        found = []
        for word, run in groupby(enumerate(self.recompute), lambda one: one[1]):
            first, *others = (place for place, _ in run)
            found.append(f"{word} on stages {first}-{others[-1]}" if others else f"{word} on stage {first}")
        return ", ".join(found)

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are computed again in backward; where stages differ, only `of_stage` knows."""
        assert isinstance(self.recompute, str), "stages recompute different things: take the step of one of them"
        return self.recompute == "full"

    @property
    def parts_again(self) -> frozenset[str]:
        """The parts of a layer that are computed again on their own."""
        return frozenset() if self.recomputes_layers else parts_of(str(self.recompute))

    def recomputes(self, part: str) -> bool:
        """Whether a part of a layer is computed again in backward, on its own or with the layer."""
        return self.recomputes_layers or part in self.parts_again

    def gathers_again(self, part: str) -> bool:
        """Whether the input of attention, or of dense MLPs, is gathered once more, and not kept, for backward."""
        if not self.gathers_inputs or not self.sequence_parallel or self.tp == 1 or self.shards_weights:
            return False
        if self.parts_again or (part == MLP and self.mlp_tiles > 1):
            return False
        return part in shared_inputs(self.shape)

    @property
    def blocks_gathered_again(self) -> float:
        """Inputs of a layer that are gathered again, on average."""
        if not self.gathers_inputs:
            return 0.0
        dense = len(dense_mlps(self.shape)) / self.shape.num_hidden_layers
        return self.gathers_again(ATTENTION) + dense * self.gathers_again(MLP)

    @property
    def moves_activations(self) -> bool:
        """Whether what the layers keep is on the host: they are recomputed."""
        return self.offloads_activations and self.recomputes_layers

    @property
    def counts_ahead(self) -> bool:
        """Whether all micro-batches of a step go forward before it trains: to balance experts over the step."""
        return self.router_scope == "global_batch" and self.micro_batches > 1

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def local_tokens(self) -> int:
        """Tokens of one micro-batch on one rank, before sequence parallelism."""
        return self.micro_batch * self.sequence_length // self.cp

    @property
    def split_tokens(self) -> int:
        """The same, each sequence continued to a multiple of tp where sequence parallelism splits it."""
        local, share = self.sequence_length // self.cp, self.tp if self.sequence_parallel else 1
        return self.micro_batch * -(-local // share) * share

    @property
    def loss_chunks(self) -> int:
        """Chunks of tokens in which the head's product and the loss of a micro-batch run."""
        if not self.linear_loss:
            return 1
        share = self.tp if self.sequence_parallel else 1
        length = -(-(self.sequence_length // self.cp) // share)
        together = loss_chunk_tokens(self.padded_vocabulary // self.tp) // (self.micro_batch * share)
        return -(-length // max(1, together))

    @property
    def mlp_tiles(self) -> int:
        """Tiles of tokens in which the dense MLPs of a micro-batch run; 1: whole, and not computed again."""
        if not self.tiled_mlp or not dense_mlps(self.shape):
            return 1
        share = self.tp if self.sequence_parallel else 1
        length = -(-(self.sequence_length // self.cp) // share)
        return -(-length // mlp_tile_length(self.shape.hidden_size, self.micro_batch, share))

    @property
    def context(self) -> ContextParallel:
        """How attention runs over the cp ranks."""
        return ContextParallel(CpImplementation(self.cp_implementation), self.cp, self.cp_sizes)

    @property
    def global_batch(self) -> int:
        """Sequences of one step."""
        return self.micro_batch * self.micro_batches * self.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks."""
        return self.global_batch * self.sequence_length

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer state."""
        return self.dp * self.cp

    @property
    def shards_weights(self) -> bool:
        """Whether DeepSpeed gathers each weight around the modules that use it."""
        return self.framework == "deepspeed" and self.zero_stage >= 3

    @property
    def message_bytes(self) -> int:
        """Of an element of gradients that ranks of dp and cp add up: fp32 over cp, else the type of the sums."""
        return MASTER_BYTES if self.cp > 1 and self.framework == "deepspeed" else self.gradient_bytes

    @property
    def gradient_reductions(self) -> int:
        """How often a step reduces its gradients (DeepSpeed runtime/engine.py, `allreduce_gradients`)."""
        return self.micro_batches if self.framework == "deepspeed" and self.zero_stage >= 2 else 1

    @property
    def overlaps_gradients(self) -> bool:
        """Whether gradients are reduced under the backward pass that makes them (DeepSpeed's `overlap_comm`).

        On a CPU nothing runs beside it; a pipeline adds up gradients until its last backward pass is over; and where
        the host holds the optimizer, DeepSpeed's backward waits for each reduction. At stage 2 the plan leaves it out:
        a gradient that no bucket takes is let go of while the stream of the reductions may still read it.
        """
        if self.framework != "deepspeed":
            return FRAMEWORKS[self.framework].overlaps_gradients
        if self.zero_stage not in (1, 2) or self.pp > 1 or self.shards == 1:
            return False
        if self.overlap_comm is not None:
            return self.overlap_comm
        return self.zero_stage == 1 and self.machine.name != "cpu" and not self.on_host

    @property
    def sums_partial_gradients_once(self) -> bool:
        """Whether tp ranks sum what each has a part of once in a step; else in the backward of each micro-batch."""
        return self.zero_stage == 1

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding over all tp ranks."""
        return padded_vocab_size(self.shape.vocab_size, self.tp, self.vocab_divisible_by)

    @property
    def head_columns(self) -> float:
        """Numbers that the head gives on a tp rank for each token; 0 of a classifier, which looks at one of many."""
        return self.padded_vocabulary / self.tp if self.shape.head_size else 0.0

    def size(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return int(getattr(self, axis))

    def stride(self, axis: Axis) -> int:
        """Distance in ranks between neighbours along an axis."""
        distance = 1
        for other in self.order:
            if other == axis:
                return distance
            if other != Axis.EP:
                distance *= int(getattr(self, other))
        return distance

    @property
    def schedule(self) -> Schedule:
        """The passes of a step through the stages."""
        return Schedule(self.pp, self.micro_batches, self.virtual_stages, self.micro_batch_group)

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage holds at its peak; with virtual stages, their chunks added up.

        1F1B holds min(p − stage, m); interleaved it is (2 (p − stage − 1) + (v − 1) p + 1) / v, on the first stage
        1 + (p − 1) / (p · v) times as many (arXiv 2205.05198, section 4).
        """
        return self.schedule.in_flight(stage) / self.virtual_stages

    def stage_parameters(self, stage: Stage) -> int:
        """Parameters on one rank of a stage, exact.

        Raises:
            SplitError: a tensor cannot be cut over tp.
        """
        divisor = self.vocab_divisible_by
        return rank_parameters(
            self.shape, stage, self.tp, ep=self.ep, expert_tp=self.expert_tp, vocab_divisible_by=divisor
        )

    @cached_property
    def stage_numels(self) -> tuple[tuple[int, int], ...]:
        """Of each of `stages` its `stage_parameters` and `dealt_parameters`; remembered, since searches ask again.

        Raises:
            SplitError: a tensor cannot be cut over tp.
        """
        return tuple((self.stage_parameters(one), self.dealt_parameters(one)) for one in self.stages)

    def layout(self, parameter: Parameter) -> TensorLayout:
        """How the ranks of tp and ep share a parameter.

        Raises:
            SplitError: it cannot be cut over tp.
        """
        divisor = self.vocab_divisible_by
        return tensor_layout(parameter, self.tp, ep=self.ep, expert_tp=self.expert_tp, vocab_divisible_by=divisor)

    @property
    def expert_shards(self) -> int:
        """Ranks that share the optimizer state of experts that are dealt over ep."""
        return max(1, self.shards * self.tp // (self.expert_slices * self.ep))

    @property
    def expert_slices(self) -> int:
        """Ranks that share each routed expert."""
        return self.expert_tp or self.tp

    def dealt_parameters(self, stage: Stage) -> int:
        """Those of them that are experts which other ranks of ep do not hold; none where ep is 1."""
        if self.ep == 1:
            return 0
        return expert_numel(self.shape, stage, self.tp, self.ep, self.expert_tp)

    def sharded(self, stage: Stage, numel: int | None = None) -> ShardedGroups:
        """How ZeRO flattens, pads and cuts the parameters of a rank of a stage; at ZeRO stage 0 nothing is padded.

        At stage 3 DeepSpeed pads and cuts each parameter by itself.

        `numel` is how many they are, where that is known.
        """
        numel = self.stage_parameters(stage) if numel is None else numel
        if not self.zero_stage:
            return ShardedGroups(numel, numel, self.dealt_parameters(stage), sum(self.matrix_numels(stage)))
        if self.shards_weights:
            return _sharded_tensors(self, stage)
        found = ShardedGroups(0, 0, 0)
        for kind, (dealt, others) in self.parameter_groups(stage, numel).items():
            group = sharded_groups(dealt + others, self.shards, dealt, self.expert_shards)
            found += replace(group, matrix_numel=group.shard_numel) if kind.takes_muon else group
        return found

    def parameter_groups(self, stage: Stage, numel: int) -> Mapping[GroupKind, tuple[int, int]]:
        """Elements of each group of the optimizer, of the `numel` of a rank: of dealt experts, and of all else."""
        dealt = self.dealt_parameters(stage)
        if not self.has_groups:
            return {GroupKind(): (dealt, numel - dealt)}
        apart = self._apart(stage)
        experts, others = (sum(one[place] for one in apart.values()) for place in (0, 1))
        return {GroupKind(): (dealt - experts, numel - dealt - others), **apart}

    @property
    def has_groups(self) -> bool:
        """Whether the optimizer has several groups of parameters, apart from experts that are dealt over ep."""
        return self.muon or self.no_weight_decay is not None

    def matrix_numels(self, stage: Stage) -> tuple[int, int]:
        """Elements of matrices that Muon orthogonalises on a rank of a stage: of dealt experts, and of all else."""
        found = [one for kind, one in self._apart(stage).items() if kind.takes_muon] if self.muon else []
        return sum(dealt for dealt, _ in found), sum(others for _, others in found)

    def _apart(self, stage: Stage) -> Mapping[GroupKind, tuple[int, int]]:
        layout = self.tp, self.ep, self.expert_tp, self.vocab_divisible_by
        return numels_apart(self.shape, stage, *layout, self.muon, self.no_weight_decay)

    def expert_stride(self, axis: Axis) -> int:
        """Distance in ranks between neighbours along an axis of the experts' grid, on which dp is expert-dp."""
        sizes = tuple(self.size(one) for one in DENSE_AXES)
        return _expert_stride(self.order, sizes, self.ep, self.expert_tp, axis)


_LEAVE_NUMELS = frozenset(
    {"micro_batch", "micro_batches", "recompute", "zero_stage", "order", "cp_implementation", "cp_sizes"}
)
"""Values on which `stage_numels` do not depend."""


@lru_cache(maxsize=1024)
def _sharded_tensors(work: Workload, stage: Stage) -> ShardedGroups:
    padded = shard = dealt = matrices = 0
    for parameter, count in trained_tensors(parameter_table(work.shape), stage, tied=work.shape.tie_word_embeddings):
        layout = work.layout(parameter)
        ranks = work.expert_shards if layout.ep > 1 else work.shards
        each = -(-layout.local_numel // ranks)
        padded, shard = padded + count * each * ranks, shard + count * each
        dealt += count * each if layout.ep > 1 else 0
        matrices += count * each if work.muon and takes_muon(parameter) else 0
    return ShardedGroups(padded, shard, dealt, matrices)


@lru_cache(maxsize=256)
def _with_rows(shape: ModelShape, factor: float) -> ModelShape:
    """A model each of whose tokens takes that many times its experts."""
    if shape.moe is None or factor == 1.0:
        return shape
    rows: Any = shape.moe.num_experts_per_token * factor
    return replace(shape, moe=replace(shape.moe, num_experts_per_token=rows))


@lru_cache(maxsize=65536)
def _expert_stride(order: tuple[Axis, ...], sizes: tuple[int, ...], ep: int, expert_tp: int | None, axis: Axis) -> int:
    dense = Grid.of(order, dict(zip(DENSE_AXES, sizes, strict=True)))
    return expert_grid(dense, ep, expert_tp).stride(axis)
