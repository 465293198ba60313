"""Static bytes of a rank: what is held for the whole run. Activations come on top."""

from __future__ import annotations

from typing import NamedTuple

from parcompile.layout.pipeline import Stage
from parcompile.layout.shards import MASTER_BYTES, MOMENTUM_BYTES, takes_muon
from parcompile.model import within
from parcompile.model.derived_rows import parameter_table
from parcompile.model.family import by_type
from parcompile.model.tables.expression import evaluate

from .parameters import trained_tensors
from .partitions import partition
from .reductions import keeps_whole_sums, kept_numel, largest_bucket, left_at_step, taken_at_end
from .workload import RankPlace, Workload

FP64_BYTES = 8
"""Of a number while DeepSpeed takes the norm of gradients."""


class StaticMemory(NamedTuple):
    """Bytes that a rank of one stage holds, as DeepSpeed's engine allocates them.

    Stage 2 shards gradients like the optimizer state, or keeps whole parameters of them (`reductions`); stage 3 shards
    also weights, of which those that are gathered are no part of it.

    Weights and the padding of the flattened group are in the type of the weights; the optimizer holds fp32 master
    weights and two fp32 moments of its shard of the padded group.
    """

    numel: int
    padded_numel: int
    shard_numel: int
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    optimizer_bytes: int
    bucket_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        parts = (self.weight_bytes, self.gradient_bytes, self.master_bytes, self.optimizer_bytes, self.bucket_bytes)
        return sum(parts)


def static_memory(work: Workload, stage: Stage | None = None, place: RankPlace | None = None) -> StaticMemory:
    """The static bytes of a rank of `stage`; left out, of that which holds most; without a place of the fullest rank.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    if stage is not None:
        return held_memory(work, stage, bucket_numel(work), place=place)
    apart = work.muon or work.shards_weights  # then more counts than how many parameters stages have
    stages = {(*held, apart and one): one for held, one in zip(work.stage_numels, work.stages, strict=True)}
    held = (held_memory(work, one, bucket_numel(work), numel) for (numel, *_), one in stages.items())
    return max(held, key=lambda memory: memory.total_bytes)


def held_memory(
    work: Workload, stage: Stage, bucket: int, numel: int | None = None, place: RankPlace | None = None
) -> StaticMemory:
    """The static bytes of a rank of `stage` with a reduce bucket of `bucket` elements; it trains `numel` parameters."""
    numel = work.stage_parameters(stage) if numel is None else numel
    groups = work.sharded(stage, numel)
    padded, shard = groups.padded_numel, groups.shard_numel
    width, sum_width = work.element_bytes, work.gradient_bytes
    gradients = numel * sum_width
    if work.zero_stage >= 2:
        gradients = sum_width * (kept_numel(work, stage, place) if keeps_whole_sums(work) else shard)
    if work.on_host:
        # The host adds them up where it can; sums in another type stay here, and those of stage 1 until the step.
        apart = width != sum_width
        gradients = 0 if work.zero_stage == 3 or (work.zero_stage == 2 and not apart) else gradients
    return StaticMemory(
        numel=numel,
        padded_numel=padded,
        shard_numel=shard,
        weight_bytes=0 if work.weights_on_host else (shard if work.zero_stage >= 3 else padded) * width,
        gradient_bytes=gradients,
        master_bytes=0 if work.on_host or is_own_master(work) else shard * MASTER_BYTES,
        optimizer_bytes=0 if work.on_host else shard * work.state_bytes - groups.matrix_numel * _second_moment(work),
        bucket_bytes=bucket_bytes(work, bucket),
    )


def bucket_bytes(work: Workload, elements: int) -> int:
    """A reduce bucket of so many elements, in which gradients are copied to be reduced; without one 0.

    There are two where gradients are reduced under backward: one is filled while the other is reduced.
    Its numbers are of the type of the sums at stage 1, and of the weights at stage 2. At stage 3 they are of the type
    of the messages (`get_param_comm_dtype`, DeepSpeed's runtime/zero/stage3.py).
    """
    if not has_bucket(work):
        return 0
    widths = {1: work.gradient_bytes, 2: work.element_bytes, 3: work.message_bytes}
    is_double = work.overlaps_gradients or (bool(work.overlap_comm) and work.pp == 1 and work.zero_stage < 3)
    return elements * widths[work.zero_stage] * (1 + is_double)


def is_own_master(work: Workload) -> bool:
    """Whether the optimizer updates the weights themselves: in fp32 without ZeRO."""
    return work.zero_stage == 0 and work.element_bytes == MASTER_BYTES


def has_bucket(work: Workload) -> bool:
    """Whether gradients are copied to be reduced; at ZeRO stage 0 they lie in one tensor, and are reduced in place."""
    return work.zero_stage > 0


def gathered_numels(work: Workload, stage: Stage) -> tuple[int, int, int]:
    """At ZeRO stage 3, elements that are gathered: of small weights, of all others, and of these at most at a time.

    Before each module DeepSpeed gathers another bucket ahead, until as many are live as may be, and keeps where forward
    turns to backward what it has looked at for backward (runtime/zero/partitioned_param_coordinator.py). A head that
    leaves its product to the loss stays gathered beside these.
    """
    if not work.shards_weights:
        return 0, 0, 0
    small = others = largest = 0
    for parameter, count in trained_tensors(parameter_table(work.shape), stage, tied=work.shape.tie_word_embeddings):
        numel = work.layout(parameter).local_numel
        if numel <= work.small_numel:
            small += numel * count
        else:
            others, largest = others + numel * count, max(largest, numel)
    head = work.padded_vocabulary // work.tp * work.shape.hidden_size * (work.linear_loss and stage.has_head)
    head *= not work.shape.tie_word_embeddings
    return small, others, min(others, max(largest, work.live_numel) + head)


def gathers_anew(work: Workload, stage: Stage) -> bool:
    """Whether weights of a recomputed layer are gathered once more for its backward pass: fewer may be live."""
    return work.live_numel * len(stage.layers) < gathered_numels(work, stage)[1]


def bucket_numel(work: Workload) -> int:
    """The reduce bucket: no larger than the largest stage's parameters, since DeepSpeed allocates all of it."""
    if work.reduce_bucket is not None:
        return work.reduce_bucket
    return min(largest_bucket(work), max(numel for numel, _ in work.stage_numels))


def untrained_bytes(work: Workload, stage: Stage) -> float:
    """The weights of layers of a stage that get no gradient: every tp rank holds them whole."""
    rows = (one for one in parameter_table(work.shape).layer if not one.trained and one.expert_dim is None)
    held = (one.numel * len(within(one.layers, stage.layers)) for one in rows)
    return float(work.element_bytes * sum(held))


_BUFFERS = by_type("buffers")
"""Masks and tables that a class registers: in each layer or once in a stage, of the type of the weights or of a mask,
and how many numbers."""


def registered_bytes(work: Workload, stage: Stage) -> float:
    """Masks and tables of positions that are no parameters: every rank holds them whole."""
    if work.shape.model_type not in _BUFFERS:
        return 0.0
    where, kind, numbers = _BUFFERS[work.shape.model_type]
    sizes = {"positions": work.shape.max_position_embeddings, "hidden_size": work.shape.hidden_size}
    width = work.element_bytes if kind == "number" else 1
    return float(width * evaluate(numbers, sizes) * (len(stage.layers) if where == "layer" else 1))


def static_terms(
    work: Workload, stage: Stage, numel: int, place: RankPlace | None = None
) -> tuple[float, float, float, float]:
    """Weights, gradients, master weights and optimizer state in bytes, without the bucket."""
    if work.framework == "deepspeed":
        held = held_memory(work, stage, 0, numel, place)
        untrained = 0.0 if work.weights_on_host else untrained_bytes(work, stage)
        untrained = untrained / (work.shards if work.shards_weights else 1) + registered_bytes(work, stage)
        weights = held.weight_bytes + untrained
        return weights, held.gradient_bytes, held.master_bytes, held.optimizer_bytes
    dealt = work.dealt_parameters(stage)
    shard = (numel - dealt) / work.shards + dealt / work.expert_shards if work.zero_stage >= 1 else numel
    return (
        numel * work.element_bytes / (work.shards if work.zero_stage >= 3 else 1),
        numel * work.gradient_bytes / (work.shards if work.zero_stage >= 2 else 1),
        shard * MASTER_BYTES,
        shard * (work.state_bytes - _second_moment(work) * _share_of_matrices(work, stage, numel)),
    )


def _second_moment(work: Workload) -> int:
    """Bytes of an element that AdamW keeps and Muon does not."""
    return work.state_bytes - MOMENTUM_BYTES if work.muon else 0


def _share_of_matrices(work: Workload, stage: Stage, numel: int) -> float:
    return sum(work.matrix_numels(stage)) / max(numel, 1)


def _largest_turn_bytes(work: Workload, stage: Stage) -> float:
    """What orthogonalising the largest matrix, or stack, takes in fp32: slices, the whole, and three of the iteration.

    In bf16 the iteration takes half as much, which a margin of one matrix is.
    """
    rows = trained_tensors(parameter_table(work.shape), stage)
    layouts = [work.layout(row) for row, _ in rows if takes_muon(row)]
    whole = [one.local_numel * (len(one.ranges) if one.ranges else 1) for one in layouts]
    return 5.0 * MASTER_BYTES * max(whole, default=0)


def optimizer_step_bytes(
    work: Workload, stage: Stage, numel: int, bucket: float, place: RankPlace | None = None
) -> float:
    """What the end of a step takes, when activations are gone: the optimizer, or at stage 1 a reduction of gradients.

    The optimizer's part is less gradients and bucket that were let go of. An Adam that is not fused computes its
    denominator beside the moments (on CPU in two tensors), in fp32, one group of parameters after the other. ZeRO stage
    1 copies the gradients of its shard, in fp32. The norm takes a copy in fp64 of what a shard has of one parameter
    (`get_grad_norm_direct`, runtime/zero/stage_1_and_2.py).
    """
    groups = work.sharded(stage, numel)
    shard, dealt = groups.shard_numel, work.dealt_parameters(stage)
    dealt = -(-dealt // work.expert_shards) if work.zero_stage else dealt
    largest = max(dealt, shard - dealt)
    if work.shards_weights:  # whole parameters, until they are that many: up to one more is not counted
        largest = min(largest, max(work.sub_group, 1))
    adam: float = 0.0 if work.fused else MASTER_BYTES * largest * (2 if work.machine.name == "cpu" else 1)
    if work.muon:
        # AdamW has what is no matrix; the update of matrices takes the place of their gradient.
        share = 1 - sum(work.matrix_numels(stage)) / max(numel, 1)
        adam = max(share * adam, _largest_turn_bytes(work, stage))
    copied = taken_at_end(work, stage, place)
    if work.on_host:
        return 0.0 if work.shards_weights else copied
    if not work.zero_stage:
        # Gradients stay where they are; an fp32 copy of 16-bit ones is made.
        return adam if work.gradient_bytes == MASTER_BYTES else MASTER_BYTES * shard + adam
    if work.shards_weights:
        # Gradients and bucket stay; those of a group are copied for the optimizer, and Adam's part comes beside. Of
        # gathered weights the small ones stay.
        return MASTER_BYTES * largest + adam - work.element_bytes * gathered_numels(work, stage)[2]
    owned = partition(work, stage)
    pieces = owned.largest if place is None else owned.largest_pieces(place)
    norm = FP64_BYTES * max(map(min, pieces, (shard - dealt, dealt)))
    if work.zero_stage == 2 and not keeps_whole_sums(work):
        return max(adam, norm) - bucket  # the optimizer takes the sums themselves
    gradients = held_memory(work, stage, 0, numel, place).gradient_bytes
    # They are joined in their type and then copied, and let go of behind that: at stage 2 those of all groups together.
    joined = work.gradient_bytes + (MASTER_BYTES if work.gradient_bytes < MASTER_BYTES else 0)
    # What a rank does not own is let go of before; sums in the type of the weights are whole parameters.
    is_whole = work.gradient_bytes == work.element_bytes and not work.on_host
    own = work.gradient_bytes * (kept_numel(work, stage, place) if is_whole else shard)
    own = own if work.zero_stage == 1 else gradients
    if work.zero_stage == 2 and dealt:
        gradients = own = 0
    taken = max(joined * largest + own, norm + own, MASTER_BYTES * largest + adam)
    found = max(copied, taken - gradients - bucket)
    if work.zero_stage == 1 and work.shards > 1 and not is_whole:
        # At the norm, sums of other ranks' parameters still lie in the bucket.
        found = max(found, norm + own + left_at_step(work, stage, place) - gradients)
    return found
