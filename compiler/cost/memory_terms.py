"""What a rank of each stage holds at its peak, as terms that the coefficients of memory multiply."""

from __future__ import annotations

from dataclasses import dataclass

from parcompile.layout.optimizer import ADAM_STATE_BYTES, MASTER_BYTES
from parcompile.layout.stages import Stage
from parcompile.model.catalogue import SCALED_INPUTS, WEIGHTED_IN_TYPE
from parcompile.model.shape import ModelShape

from .activations import ROW_COPIES, LayerBytes, eager_layer_bytes, layer_bytes, score_bytes
from .collectives import routed_layers
from .indexer import choice_bytes, frozen_bytes, scoring_bytes
from .kinds import mean_over_layers
from .layer_inputs import NORM_BYTES, parts_bytes, projection_bytes, table_gradient_bytes
from .memory import LARGEST_BUCKET, has_bucket, held_memory, keeps_both_gradients
from .recurrent import backward_bytes, exchanged_bytes, forward_bytes, kept_bytes
from .shared_blocks import kept_of_use, uses
from .stage_exchanges import buffer_bytes, stream_bytes
from .streams import added_bytes, head_bytes
from .workload import FRAMEWORKS, Workload

LOSS_CHUNK_ELEMENTS = 2**25
"""Logits that the loss holds in fp32 at a time, on an accelerator."""


FP32_LOGITS = ("falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types whose head gives logits in fp32, of which it lets go of those in the type of the weights."""
IN_FLIGHT_COPIES = 3
"""Rows of tokens for their experts, in copies that are in memory while experts run or go backward, beyond those that a
layer keeps; counted by preflight."""


@dataclass(frozen=True, slots=True)
class StageTerms:
    """What the coefficients multiply, for one stage, in bytes (parameters in elements)."""

    stage: int
    parameters: int
    weights: float
    gradients: float
    master: float
    optimizer: float
    bucket: float
    stream: float
    attention: float
    mlp: float
    gathered: float
    logit_elements: float
    waiting_logits: float
    exchange: float
    optimizer_step: float


def memory_terms(whole: Workload) -> list[StageTerms]:
    """The terms of every stage.

    Raises:
        ValueError: the layout cannot be cut.
    """
    stages = whole.stages
    work = whole.of_stage(stages[0])
    numels = [work.stage_parameters(stage) for stage in stages]
    both = keeps_both_gradients(work.framework, work.element_bytes, work.gradient_bytes, work.zero_stage)
    bucket = min(LARGEST_BUCKET, max(numels)) if work.framework == "deepspeed" and has_bucket(work) and not both else 0
    form = eager_layer_bytes if work.framework == "deepspeed" else layer_bytes

    def keeps(shape: ModelShape, *, routed: bool) -> LayerBytes:
        return form(
            shape,
            tp=whole.tp,
            sequence_parallel=whole.sequence_parallel,
            element_bytes=whole.element_bytes,
            moe=routed,
            row_copies=_row_copies(whole),
        )

    dense, sparse = (keeps(work.busiest_shape, routed=routed) for routed in (False, work.shape.moe is not None))
    found, untrained = [], 0 if work.shape.runs is None else work.shape.runs.untrained
    for index, (stage, numel) in enumerate(zip(stages, numels, strict=True)):
        work = whole.of_stage(stage)
        held = work.in_flight(index)
        tokens = work.local_tokens
        moe_layers = routed_layers(work.shape, stage)
        trained, attending = len(stage.layers) - untrained, work.shape.attending(stage.layers)
        dense_layers = work.shape.dense(stage.layers) - untrained
        counts = {"stream": trained, "attention": attending - untrained, "gathered": trained}
        kept = {part: count * getattr(dense, part) * tokens * held for part, count in counts.items()}
        kept["mlp"] = (dense_layers * dense.mlp + moe_layers * sparse.mlp) * tokens * held
        choice = choice_bytes(work, stage) if work.framework == "deepspeed" else 0.0
        states = 0 if work.shape.recurrent is None else work.shape.recurrent.count(stage.layers)
        kept["attention"] += states * kept_bytes(work) * held
        for part in ("stream", "gathered"):
            kept[part] *= work.split_tokens / tokens
        of_own, of_whole = kept_of_use(work)
        used = uses(work.shape, stage.layers) if not work.recomputes_layers else 0
        kept["stream"] += used * of_own * work.split_tokens * held
        kept["gathered"] += used * of_whole * tokens * held
        in_flight = max(_in_flight_bytes(work, routed=moe_layers > 0), backward_bytes(work) if states else 0.0)
        found_kinds = [one for own, one in work.busiest_shape.by_kind if work.shape.kinds and {*own} & {*stage.layers}]
        behind_mlp = _behind_mlp_bytes(work)
        largest = max(
            (keeps(one, routed=moe_layers > 0) for one in found_kinds),
            key=lambda one: one.total,
            default=sparse if moe_layers else dense,
        )
        one_layer = (sparse if moe_layers else dense).total * tokens
        if work.recomputes_layers:
            # Each layer's input is kept; one layer at a time is recomputed whole.
            layers, together = bool(stage.layers), work.shape.layers_per_module
            # Of layers that are one module all: one of them has its experts.
            recomputed = (largest, *[dense] * (together - 1))
            kept = {part: sum(getattr(one, part) for one in recomputed) * tokens * layers for part in kept}
            carried = kept_bytes(work) if states else 0.0
            if uses(work.shape, stage.layers):
                # A layer with a shared block has all of them.
                kept["attention"] += carried
                kept["stream"] += of_own * work.split_tokens
                kept["gathered"] += of_whole * tokens
            elif work.shape.blocks is not None:
                # A layer is one block: the largest counts.
                kept["attention"] = max(kept["attention"] * (attending > 0), carried)
                kept["mlp"] *= dense_layers + moe_layers > 0
                kept["attention" if kept["mlp"] > kept["attention"] else "mlp"] = 0.0
            else:
                beside = attending == len(stage.layers)
                kept["attention"] = kept["attention"] + carried if beside else max(kept["attention"], carried)
            one_layer = sum(kept.values())
            # A layer's MLP comes behind its scan.
            in_flight = max(in_flight, forward_bytes(work) - kept["mlp"] if states else 0.0)
            inputs = _input_bytes(work)
            kept["stream"] += (len(stage.layers) - untrained) / together * inputs * held
            if work.shape.hyper_streams:
                kept["stream"] -= layers * inputs  # of that one layer, which its first mixture keeps
            if work.framework == "deepspeed" and layers:
                kept["attention"] += attending * _kept_attention(work) * tokens * held
                kept["attention"] += states * exchanged_bytes(work) * held
                kept["mlp"] += in_flight - behind_mlp
        kept["attention"] += choice * held
        if work.framework == "deepspeed":
            # The parts of a second embedding are those of all layers, also where one layer is recomputed.
            parts = parts_bytes(work) if work.recomputes_layers else 0.0
            kept["stream"] += (projection_bytes(work, stage) + parts) * held + head_bytes(work, stage)
        if FRAMEWORKS[work.framework].stores_scores:
            scores = tokens * score_bytes(work.shape, tp=work.tp, sequence_length=work.sequence_length)
            # Recomputed, those of one layer at a time.
            kept["attention"] += scores * (
                work.shape.attending(stage.layers) * held if work.recompute == "none" else bool(stage.layers)
            )
        logits = tokens * work.padded_vocabulary / work.tp if stage.has_head else 0.0
        if work.framework == "deepspeed":
            layer = one_layer + in_flight - behind_mlp if stage.layers else 0.0
            # While the indexer of the last layer scores, no logits are there yet; of compressed keys, nor is what the
            # layer keeps behind its attention, or computes again.
            later = 0.0
            if work.shape.low_rank is not None:
                last = sparse if moe_layers else dense
                later = layer if work.recomputes_layers else last.mlp * tokens + last.stream / 2 * work.split_tokens
            scoring = scoring_bytes(work, stage) + sum(kept.values()) - later
            kept["stream"] += _ends_bytes(work, stage, logits, recomputed_layer=layer, in_flight=in_flight)
            taken = sum(kept.values()) + 2 * work.element_bytes * logits + _loss_chunk_bytes(work, logits)
            kept["stream"] += max(0.0, _embedding_backward_bytes(work, stage) - taken, scoring - taken)
        if work.framework == "deepspeed":
            exchange = buffer_bytes(work, index)
        else:
            exchange = tokens * work.shape.hidden_size * work.element_bytes * held if work.pp > 1 else 0.0
        found.append(
            StageTerms(
                index,
                numel,
                *_static(work, stage, numel),
                bucket * work.element_bytes,
                kept["stream"],
                kept["attention"],
                kept["mlp"],
                kept["gathered"],
                logits,
                logits * work.element_bytes * max(held - 1, 0) + _loss_chunk_bytes(work, logits),
                exchange,
                _optimizer_step_bytes(work, stage, numel, bucket * work.element_bytes)
                if work.framework == "deepspeed"
                else 0.0,
            )
        )
    return found


def _row_copies(work: Workload) -> float:
    """Dealt experts get the rows of all ranks with slices of them; a tensor-parallel rank gets back those it sent.

    What experts give is kept where scores weight it. Where they scale what experts take, a token that travels is kept.
    """
    if work.ep > 1:
        return (work.expert_slices + 1) / work.tp
    return ROW_COPIES - (work.shape.model_type in SCALED_INPUTS)


def _in_flight_bytes(work: Workload, *, routed: bool) -> float:
    """Gradients of activations and of one weight while an MLP runs backward, beyond what it has let go of."""
    h, tokens, moe = work.shape.hidden_size, work.local_tokens, work.busiest_shape.moe
    if not routed or moe is None:
        width = max((one.intermediate_size for _, one in work.shape.by_kind), default=0) / work.tp
        return work.element_bytes * (tokens * (h + 2 * width) + h * width)
    # The first projection's gradient, of all experts in one tensor, when the product and the output are gone.
    projections = 2 if work.shape.gated_mlp else 1
    slices = work.tp if work.ep == 1 else work.expert_slices
    width = moe.intermediate_size / slices
    experts, rows = moe.num_choices / work.ep, moe.num_experts_per_token * tokens * slices / work.tp
    of_weight = work.element_bytes * width * (experts * projections * h - 2 * rows)
    if work.ep == 1:
        # With many tokens the peak is where rows are weighted, by what a router gives in fp32 or casts.
        width = work.element_bytes if work.shape.model_type in WEIGHTED_IN_TYPE else 4
        return max(of_weight, IN_FLIGHT_COPIES * width * rows * h)
    # Of the rows that came, which ranks with slices gather; and of this rank's, weighted in fp32 when they are back.
    came = (IN_FLIGHT_COPIES + (slices > 1)) * work.element_bytes * rows * h
    return max(0.0, of_weight) + came + 4 * rows / slices * h


def _input_bytes(work: Workload) -> float:
    """What goes into a layer of a micro-batch: all residual streams of a rank's tokens."""
    share = work.tp if work.sequence_parallel else 1
    return work.shape.residual_streams * work.shape.hidden_size * stream_bytes(work) * work.split_tokens / share


def _behind_mlp_bytes(work: Workload) -> float:
    """What a layer keeps behind its MLP, and has let go of when that runs backward.

    These are Gemma's norm, gate and its norm, and what is added to several residual streams.
    """
    shape, inputs = work.shape, work.shape.layer_inputs
    if not work.recomputes_layers:
        return 0.0
    share = work.tp if work.sequence_parallel else 1
    of_token = added_bytes(shape, work.element_bytes)
    if inputs is not None:
        of_token += (2 * NORM_BYTES + work.element_bytes) * shape.hidden_size + 4 * work.element_bytes * inputs.width
    return work.split_tokens * of_token / share


def _ends_bytes(work: Workload, stage: Stage, logits: float, *, recomputed_layer: float, in_flight: float) -> float:
    """What the two ends of a forward add in the runtime: the head's inputs, and the first gradients of backward.

    Logits with their gradient; what the head's backward holds (the gradients of logits, weight and input; under
    sequence parallelism the gathered input and its gradient, each twice while they are laid out anew); the gradients in
    front of the last norm (two in the type of the weights and three in fp32); what is in flight in the last MLP, or
    with full recomputation a layer: these do not stand in memory together, the largest counts. The gradient of a tied
    head waits for that of the embedding. Logits and layers are counted elsewhere, so what is returned may be negative.
    """
    width, hidden = work.element_bytes, work.split_tokens * work.shape.hidden_size
    share = work.tp if work.sequence_parallel else 1
    weight = width * work.shape.hidden_size * work.padded_vocabulary / work.tp
    waiting = weight if _is_tied(work, stage) else 0.0
    chunk = _loss_chunk_bytes(work, logits)
    counted, loss = 2 * width * logits + chunk, 2 * _logit_bytes(work) * logits + chunk
    normed = head = 0.0
    if stage.has_head:
        normed = hidden * (4 + 2 * width) / share
        inputs = hidden * (4 + 1 / share) if share > 1 else hidden
        head = max(loss, width * (logits + inputs) + weight)
    if work.recomputes_layers:
        return max(recomputed_layer + waiting, normed + head) - recomputed_layer - counted
    return max(normed + head, normed + hidden * (2 * width + 3 * 4) / share + waiting, in_flight + waiting) - counted


def _logit_bytes(work: Workload) -> int:
    """Of a logit and of its gradient."""
    return max(work.element_bytes, 4) if work.shape.model_type in FP32_LOGITS else work.element_bytes


def _embedding_backward_bytes(work: Workload, stage: Stage) -> float:
    """The gradient of the embedding, when all else is gone; of a tied one, that of the head and the sum of both too."""
    if not stage.has_embedding:
        return 0.0
    weight, tied = work.element_bytes * work.shape.hidden_size * work.padded_vocabulary / work.tp, _is_tied(work, stage)
    # A second embedding goes backward first; the gradient of a tied head waits meanwhile.
    return max(weight * (3 if tied else 1), table_gradient_bytes(work, stage) + weight * tied)


def _is_tied(work: Workload, stage: Stage) -> bool:
    return work.shape.tie_word_embeddings and stage.has_embedding and stage.has_head


def _kept_attention(work: Workload) -> float:
    """Output and log-sum-exp for each token, which recomputation does not compute again."""
    mla = work.shape.mla
    width = mean_over_layers(work.shape, lambda one: one.value_dim) if mla is None else mla.v_head_dim
    return work.shape.num_attention_heads / work.tp * (width * work.element_bytes + 4)


def _loss_chunk_bytes(work: Workload, logits: float) -> float:
    return 4 * min(logits, LOSS_CHUNK_ELEMENTS) if work.framework == "deepspeed" else 0.0


def _static(work: Workload, stage: Stage, numel: int) -> tuple[float, float, float, float]:
    """Weights, gradients, master weights and optimizer state in bytes, without the bucket."""
    if work.framework == "deepspeed":
        held = held_memory(work, stage, 0)
        weights = held.weight_bytes + frozen_bytes(work, stage)
        return weights, held.gradient_bytes, held.master_bytes, held.optimizer_bytes
    dealt = work.dealt_parameters(stage)
    shard = (numel - dealt) / work.shards + dealt / work.expert_shards if work.zero_stage >= 1 else numel
    return (
        numel * work.element_bytes / (work.shards if work.zero_stage >= 3 else 1),
        numel * work.gradient_bytes / (work.shards if work.zero_stage >= 2 else 1),
        shard * MASTER_BYTES,
        shard * ADAM_STATE_BYTES,
    )


def _optimizer_step_bytes(work: Workload, stage: Stage, numel: int, bucket: float) -> float:
    """What the end of a step takes, when activations are gone: the reduction of gradients, or the optimizer.

    The optimizer's part is less gradients and bucket that were let go of. Adam computes its denominator beside the
    moments (on CPU in two tensors), in fp32, one group of parameters after the other. ZeRO stage 1 copies the gradients
    of its shard, in fp32 (runtime/zero/stage_1_and_2.py); BF16_Optimizer holds them in fp32 already.
    """
    groups = work.sharded(stage)
    shard, dealt = groups.shard_numel, work.dealt_parameters(stage)
    dealt = -(-dealt // work.expert_shards) if work.zero_stage else dealt
    largest = max(dealt, shard - dealt)
    adam = MASTER_BYTES * largest * (2 if work.machine.name == "cpu" else 1)
    if keeps_both_gradients(work.framework, work.element_bytes, work.gradient_bytes, work.zero_stage):
        return adam
    if not work.zero_stage:
        # Gradients stay where they are; an fp32 copy of 16-bit ones is made.
        return adam if work.gradient_bytes == MASTER_BYTES else MASTER_BYTES * shard + adam
    gradients = numel / (work.shards if work.zero_stage >= 2 else 1) * work.gradient_bytes
    # Over cp a bucket of 16-bit gradients is summed in a copy in fp32.
    copied = MASTER_BYTES / work.element_bytes * bucket if work.cp > 1 and work.element_bytes < MASTER_BYTES else 0.0
    return max(copied, MASTER_BYTES * largest + adam - gradients - bucket)
