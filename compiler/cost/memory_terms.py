"""What a rank of each stage holds at its peak, as terms that the coefficients of memory multiply."""

from __future__ import annotations

from dataclasses import dataclass

from parcompile.model.shape import ModelShape

from .activations import LayerBytes, eager_layer_bytes, layer_bytes, score_bytes
from .blocks import kept_by_blocks, kept_by_one, late_gradient
from .collectives import routed_layers
from .ends import embedding_backward_bytes, ends_bytes, loss_chunk_bytes
from .indexer import choice_bytes, scoring_bytes
from .layer_inputs import parts_bytes, projection_bytes
from .layer_passes import behind_mlp_bytes, in_flight_bytes, input_bytes, kept_attention, row_copies
from .memory import LARGEST_BUCKET, has_bucket, keeps_both_gradients, optimizer_step_bytes, static_terms
from .recurrent import backward_bytes, exchanged_bytes, forward_bytes, kept_bytes, let_go_bytes
from .shared_blocks import kept_of_use, uses
from .stage_exchanges import buffer_bytes
from .streams import head_bytes
from .workload import FRAMEWORKS, Workload


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
            row_copies=row_copies(whole),
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
            # A sequence that is shorter than cp leaves ranks without a token: other rules refuse it.
            kept[part] *= work.split_tokens / max(1, tokens)
        of_own, of_whole = kept_of_use(work)
        used = uses(work.shape, stage.layers) if not work.recomputes_layers else 0
        kept["stream"] += used * of_own * work.split_tokens * held
        kept["gathered"] += used * of_whole * tokens * held
        with_blocks = stage.layers if work.framework == "deepspeed" else range(0)
        kept["stream"] += kept_by_blocks(work, with_blocks) * held
        in_flight, together = in_flight_bytes(work, routed=moe_layers > 0), work.shape.layers_per_module
        if together > 1 and moe_layers:
            # The experts of a module go backward when its other layers, and the MLP of their own, are gone.
            gone = ((together - 1) * dense.total + dense.mlp) * tokens
            in_flight = max(in_flight_bytes(work, routed=False), in_flight - gone)
        if states:
            in_flight = max(in_flight, backward_bytes(work) - let_go_bytes(work, stage, dense, sparse))
        found_kinds = [one for own, one in work.busiest_shape.by_kind if work.shape.kinds and {*own} & {*stage.layers}]
        behind_mlp = behind_mlp_bytes(work)
        largest = max(
            (keeps(one, routed=moe_layers > 0) for one in found_kinds),
            key=lambda one: one.total,
            default=sparse if moe_layers else dense,
        )
        one_layer = (sparse if moe_layers else dense).total * tokens
        if work.recomputes_layers:
            # Each layer's input is kept; one layer at a time is recomputed whole.
            layers = bool(stage.layers)
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
            kept["stream"] += kept_by_one(work, with_blocks)
            one_layer = sum(kept.values())
            # A layer's MLP comes behind its scan.
            in_flight = max(in_flight, forward_bytes(work) - kept["mlp"] if states else 0.0)
            inputs = input_bytes(work)
            kept["stream"] += (len(stage.layers) - untrained) / together * inputs * held
            if work.shape.hyper_streams:
                kept["stream"] -= layers * inputs  # of that one layer, which its first mixture keeps
            if work.framework == "deepspeed" and layers:
                kept["attention"] += attending * kept_attention(work) * tokens * held
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
            kept["stream"] += ends_bytes(work, stage, logits, recomputed_layer=layer, in_flight=in_flight)
            taken = sum(kept.values()) + 2 * work.element_bytes * logits + loss_chunk_bytes(work, logits)
            # The gradient of a table comes when the layers before it are still to go backward.
            table, before = late_gradient(work, stage)
            table += sum(kept.values()) * before / max(len(stage.layers), 1)
            kept["stream"] += max(0.0, embedding_backward_bytes(work, stage) - taken, scoring - taken, table - taken)
        if work.framework == "deepspeed":
            exchange = buffer_bytes(work, index)
        else:
            exchange = tokens * work.shape.hidden_size * work.element_bytes * held if work.pp > 1 else 0.0
        found.append(
            StageTerms(
                index,
                numel,
                *static_terms(work, stage, numel),
                bucket * work.element_bytes,
                kept["stream"],
                kept["attention"],
                kept["mlp"],
                kept["gathered"],
                logits,
                logits * work.element_bytes * max(held - 1, 0) + loss_chunk_bytes(work, logits),
                exchange,
                optimizer_step_bytes(work, stage, numel, bucket * work.element_bytes)
                if work.framework == "deepspeed"
                else 0.0,
            )
        )
    return found
