"""What a rank of each stage holds at its peak, as terms that the coefficients of memory multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from parcompile.layout.pipeline import Stage

from .activations import score_bytes
from .blocks import front_bytes, head_bytes, late_gradient, parts_bytes
from .collectives import buffer_bytes, routed_layers
from .held import Held, add_choices, all_kept, has_kinds, in_flight_of, recomputed
from .kept import rotary_table_bytes
from .layer_passes import (
    behind_mlp_bytes,
    between_runs_bytes,
    counted_logits,
    embedding_backward_bytes,
    ends_bytes,
    loss_chunk_bytes,
    received_bytes,
)
from .memory import bucket_bytes, bucket_numel, gathered_numels, optimizer_step_bytes, static_terms
from .recurrent import scoring_bytes
from .reductions import Reduction, head_in_bucket, reduces_in_backward, reductions
from .while_reducing import FIRST_AND_LAST, Moments, moments_of, reduced_before_embedding, while_reducing
from .workload import FRAMEWORKS, RankPlace, Workload


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
    gathered_weights: float = 0.0


def memory_terms(whole: Workload, *, fullest: bool = False, place: RankPlace | None = None) -> list[StageTerms]:
    """The terms of every stage; with `fullest`, of those only that may hold most. Without a place of its fullest rank.

    Raises:
        ValueError: the layout cannot be cut.
    """
    stages = range(len(whole.stages))
    works = {word: _recomputing(whole, word) for word in {whole.recompute_of(index) for index in stages}}
    # What does not depend on these is asked for once.
    several = min(whole.micro_batches, 2) if whole.zero_stage == 2 else 1
    every = _static(whole.having(micro_batch=1, micro_batches=several, recompute="none"), place)
    shown = _unlike(whole, every) if fullest else stages
    return [_terms(Held.of(works[whole.recompute_of(index)], index), every[index]) for index in shown]


class _Static(NamedTuple):
    """What a stage holds, whatever its micro-batch and its recomputation."""

    kind: tuple[object, ...]
    """Stages of a kind have equal layers."""
    numel: int
    held: tuple[float, float, float, float]
    bucket: float
    optimizer_step: float
    gathered_weights: float
    reductions: tuple[Reduction, ...]
    """In a backward pass."""
    moments: Moments
    in_bucket: float
    """Bytes of gradients that lie in the bucket alone when the last layer goes backward."""


@lru_cache(maxsize=16)
def _static(work: Workload, place: RankPlace | None) -> list[_Static]:
    numels = [numel for numel, _ in work.stage_numels]
    eager = work.framework == "deepspeed"
    bucket = bucket_bytes(work, bucket_numel(work)) if eager else 0
    known: dict[object, _Static] = {}
    found = []
    for stage, numel in zip(work.stages, numels, strict=True):
        kind = (numel, len(stage.layers), routed_layers(work.shape, stage), stage.has_embedding, stage.has_head)
        alike = kind if has_kinds(work.shape) else stage
        if alike not in known:
            reduced = reductions(work, stage, place) if eager and reduces_in_backward(work) else ()
            known[alike] = _Static(
                kind,
                numel,
                static_terms(work, stage, numel, place),
                bucket,
                optimizer_step_bytes(work, stage, numel, bucket, place) if eager else 0.0,
                work.element_bytes * sum(gathered_numels(work, stage)[::2]),
                reduced,
                moments_of(work.shape, stage.layers, reduced),
                head_in_bucket(work, stage) if eager else 0.0,
            )
        found.append(known[alike])
    return found


def _recomputing(whole: Workload, word: str) -> Workload:
    return whole if word == whole.recompute else replace(whole, recompute=word)


def _unlike(whole: Workload, every: Sequence[_Static]) -> Sequence[int]:
    """The first of stages with equal layers: it holds the activations of the most micro-batches."""
    if not has_kinds(whole.shape):
        return range(len(every))
    found: dict[object, int] = {}
    for index, one in enumerate(every):
        found.setdefault((one.kind, whole.recompute_of(index)), index)
    return [*found.values()]


def _terms(one: Held, static: _Static) -> StageTerms:
    """The terms of a stage."""
    work, stage, tokens = one.work, one.stage, one.tokens
    logits = tokens * work.head_columns if stage.has_head else 0.0
    kept, reducing = _at_peak(one, logits, static)
    if one.eager:
        exchange = buffer_bytes(work, one.index)
    else:
        exchange = tokens * work.shape.hidden_size * work.element_bytes * one.copies if work.pp > 1 else 0.0
    return StageTerms(
        one.index,
        static.numel,
        *static.held,
        static.bucket,
        kept["stream"],
        kept["attention"],
        kept["mlp"],
        kept["gathered"],
        0.0 if work.linear_loss else logits,
        _waiting_logits(one, logits),
        exchange,
        max(static.optimizer_step, reducing),
        static.gathered_weights,
    )


def _waiting_logits(one: Held, logits: float) -> float:
    """Logits of other micro-batches, and what the loss has of those of this one."""
    waiting = 0.0 if one.work.linear_loss else logits * one.work.element_bytes * max(one.copies - 1, 0)
    return waiting + loss_chunk_bytes(one.work, logits)


def _at_peak(one: Held, logits: float, static: _Static) -> tuple[dict[str, float], float]:
    """What is held of activations, by part, at the largest moment of a step, and when gradients are reduced in it."""
    work, stage = one.work, one.stage
    bucket = static.bucket if work.zero_stage == 2 else 0.0
    if work.recomputes_layers:
        in_turn = work.zero_stage == 2 or work.micro_batches <= FIRST_AND_LAST
        kept, one_layer, in_flight = recomputed(one, bucket, static.reductions if in_turn else ())
    else:
        in_flight = in_flight_of(one, bucket)
        kept, one_layer = all_kept(one), (one.sparse if one.routed else one.dense).total * one.tokens
    add_choices(one, kept)
    if one.eager:
        # The parts of a second embedding are those of all layers, also where one layer is recomputed.
        parts = parts_bytes(work) if work.recomputes_layers else 0.0
        before = front_bytes(work, stage) + received_bytes(work, stage) + parts + between_runs_bytes(work, stage)
        before += rotary_table_bytes(work.shape, work.element_bytes) * one.tokens * bool(stage.layers)
        kept["stream"] += before * one.copies
    if FRAMEWORKS[work.framework].stores_scores:
        scores = one.tokens * score_bytes(work.shape, tp=work.tp, sequence_length=work.sequence_length)
        # Recomputed, those of one layer at a time.
        kept["attention"] += scores * (
            work.shape.attending(stage.layers) * one.copies if work.recompute == "none" else bool(stage.layers)
        )
    reducing = (
        while_reducing(one, sum(kept.values()), one_layer, in_flight, static.moments) if static.reductions else 0.0
    )
    if one.eager:
        # With full recomputation it is gone when a layer is computed again.
        kept["stream"] += head_bytes(work, stage) * (not work.recomputes_layers)
        reduced = reduced_before_embedding(work, static.reductions)
        _add_ends(one, kept, logits, one_layer, in_flight, absent=_absent(work, static, stage), reduced=reduced)
        _add_runs(one, kept, logits, static.numel)
    return kept, reducing


def _absent(work: Workload, static: _Static, stage: Stage) -> tuple[float, float, float]:
    """What is counted as held and is not there yet: while the loss goes backward, behind that, and when the head has.

    At ZeRO stage 2 these are the bucket, which is there from the first gradient on, and the sums of a step's only
    micro-batch, which are there from the first reduction on. At stage 1 the gradients of the head lie in the bucket
    in a step's last micro-batch; in one between the first and the last all gradients are held.
    """
    if work.zero_stage != 2 or not static.reductions:
        behind = static.in_bucket * (work.micro_batches <= FIRST_AND_LAST)
        return 0.0, behind, behind
    sums, first = static.held[1] if work.micro_batches == 1 else 0.0, static.reductions[0]
    # A head that no bucket takes is reduced before the last norm goes on backward, and may stay.
    return static.bucket + sums, sums, -first.behind if first.layers > len(stage.layers) else sums


def _add_runs(one: Held, kept: dict[str, float], logits: float, numel: int) -> None:
    """Adds what waits of stacks that run several times, where the moment before their first runs is the largest.

    All of them have run backward by then but for one run each, and their gradients wait for these.
    """
    runs, work, stage = one.work.shape.stack.runs, one.work, one.stage
    if runs is None or runs.trained_stacks <= len(runs.stacks):
        return
    tables = stage.has_embedding + (stage.has_head and not work.shape.tie_word_embeddings)
    waiting = work.element_bytes * (numel - tables * work.padded_vocabulary * work.shape.hidden_size / work.tp)
    held = sum(kept.values())
    left = waiting + held * len(runs.stacks) / runs.trained_stacks
    kept["stream"] += max(0.0, left - held - counted_logits(work, logits))


def _add_ends(
    one: Held,
    kept: dict[str, float],
    logits: float,
    one_layer: float,
    in_flight: float,
    *,
    absent: tuple[float, float, float],
    reduced: float,
) -> None:
    """Adds what is held at the ends of a stage beside `kept`, where another moment is the largest."""
    work, stage = one.work, one.stage
    layer = one_layer + in_flight - behind_mlp_bytes(work) if stage.layers else 0.0
    # While the last layer chooses keys by scores, no logits are there yet, nor is what it computes again; of compressed
    # keys, nor is what the layer keeps behind its attention.
    later = layer * work.recomputes_layers
    if work.shape.heads.low_rank is not None and not work.recomputes_layers:
        last = one.sparse if one.routed else one.dense
        later = last.mlp * one.tokens + last.stream / 2 * work.split_tokens
    scoring = scoring_bytes(work, stage)
    scoring += (sum(kept.values()) - later - absent[0]) * (scoring > 0)
    # Of micro-batches that go backward later.
    waiting = (sum(kept.values()) - work.recomputes_layers * layer) * (1 - 1 / max(one.copies, 1))
    kept["stream"] += ends_bytes(work, stage, logits, recomputed_layer=layer, in_flight=in_flight, absent=absent)
    taken = sum(kept.values()) + counted_logits(work, logits)
    # The gradient of a table comes when the layers before it are still to go backward.
    table, before = late_gradient(work, stage)
    table += sum(kept.values()) * before / max(len(stage.layers), 1)
    embedding = embedding_backward_bytes(work, stage) + (waiting + reduced) * stage.has_embedding
    kept["stream"] += max(0.0, embedding - taken, scoring - taken, table - taken)
