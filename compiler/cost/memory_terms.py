"""What a rank of each stage holds at its peak, as terms that the coefficients of memory multiply."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

from parcompile.layout.pipeline import Stage
from parcompile.model import within
from parcompile.model.shape import ModelShape

from .activations import layer_bytes, score_bytes
from .blocks import (
    front_bytes,
    head_bytes,
    kept_apart,
    late_gradient,
    parts_bytes,
    uses,
)
from .collectives import buffer_bytes, hidden_bytes, norms_mlp_output, routed_layers
from .kept import BESIDE, LayerBytes, mean_bytes, rotary_table_bytes, sort_bytes, sorts
from .layer_passes import (
    attention_in_flight,
    attention_sizes,
    behind_mlp_bytes,
    between_runs_bytes,
    counted_logits,
    dealt_rows,
    embedding_backward_bytes,
    ends_bytes,
    entering_bytes,
    gathered_again_bytes,
    in_flight_bytes,
    input_bytes,
    keeps_input,
    kept_attention,
    kept_layers,
    last_norm_bytes,
    leaving_bytes,
    loss_chunk_bytes,
    norm_in_flight,
    parts_in_flight,
    parts_left,
    received_bytes,
    router_bytes,
    row_copies,
    streams_in_flight,
    tiled_bytes,
    waiting_gradient_bytes,
)
from .memory import (
    bucket_bytes,
    bucket_numel,
    gathered_numels,
    optimizer_step_bytes,
    static_terms,
)
from .parameters import is_even
from .recurrent import (
    backward_bytes,
    choice_bytes,
    exchanged_bytes,
    forward_bytes,
    hiding_bytes,
    kept_bytes,
    let_go_bytes,
    scoring_bytes,
)
from .reductions import Reduction, head_in_bucket, reduces_in_backward, reductions
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


@dataclass(frozen=True, slots=True)
class _Held:
    """A stage, and what one layer of it keeps: with a dense MLP, with experts, and the most of the kinds of layers."""

    work: Workload
    stage: Stage
    index: int
    copies: float
    """Micro-batches whose activations are held at the peak."""
    dense: LayerBytes
    sparse: LayerBytes
    largest: LayerBytes

    @classmethod
    def of(cls, work: Workload, index: int, stage: Stage | None = None) -> _Held:
        """Of a step with what the stage recomputes, or of some layers of the stage."""
        stage = work.stages[index] if stage is None else stage
        shape, routed = work.shape_of_rows, routed_layers(work.shape, stage) > 0
        cut = (work.tp, work.sequence_parallel, work.element_bytes)
        if work.framework == "deepspeed":

            def held(layer: LayerBytes, *, of_experts: bool) -> LayerBytes:
                return gathered_again_bytes(work, dealt_rows(work, layer) if of_experts else tiled_bytes(work, layer))

            dense, sparse = (held(mean_bytes(shape, stage.layers, moe, *cut), of_experts=moe) for moe in (False, True))
            each = [] if shape.stack.blocks else sorts(shape, stage.layers)
            kinds = (held(sort_bytes(one, *cut), of_experts=one.routed) for _, one in each)
        else:
            form = partial(
                layer_bytes,
                tp=work.tp,
                sequence_parallel=work.sequence_parallel,
                element_bytes=work.element_bytes,
                row_copies=row_copies(work),
            )
            dense, sparse = (form(shape, moe=one) for one in (False, work.shape.moe is not None))
            dense, sparse = (gathered_again_bytes(work, one) for one in (tiled_bytes(work, dense), sparse))
            own = [one for own, one in shape.by_kind if len(within(own, stage.layers))] if work.shape.kinds else []
            every = (form(one, moe=True) if routed else tiled_bytes(work, form(one)) for one in own)
            kinds = (gathered_again_bytes(work, one) for one in every)
        largest = max(kinds, key=lambda one: one.total, default=sparse if routed else dense)
        return cls(work, stage, index, work.in_flight(index), dense, sparse, largest)

    @property
    def eager(self) -> bool:
        """Run by DeepSpeed, with transformers' layers."""
        return self.work.framework == "deepspeed"

    @property
    def tokens(self) -> int:
        return self.work.local_tokens

    @property
    def untrained(self) -> int:
        """Layers that run without autograd."""
        return 0 if self.work.shape.stack.runs is None else self.work.shape.stack.runs.untrained

    @property
    def routed(self) -> int:
        return routed_layers(self.work.shape, self.stage)

    @property
    def dense_layers(self) -> int:
        return self.work.shape.dense(self.stage.layers) - self.untrained

    @property
    def attending(self) -> int:
        return self.work.shape.attending(self.stage.layers)

    @property
    def states(self) -> int:
        """Layers that carry a state."""
        return sum(one.count(self.stage.layers) for one in self.work.shape.parts if one.states)

    @property
    def with_blocks(self) -> range:
        return self.stage.layers if self.eager else range(0)


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
    return [_terms(_Held.of(works[whole.recompute_of(index)], index), every[index]) for index in shown]


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
    moments: _Moments
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
        alike = kind if _has_kinds(work.shape) else stage
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
                _moments(work.shape, stage.layers, reduced),
                head_in_bucket(work, stage) if eager else 0.0,
            )
        found.append(known[alike])
    return found


def _has_kinds(shape: ModelShape) -> bool:
    """Whether stages with as many layers of each sort hold the same."""
    return is_even(shape) and not shape.parts and shape.stack.runs is None


def _are_alike(shape: ModelShape) -> bool:
    """Whether layers of a stage differ by their MLPs alone, or are counted together."""
    return _has_kinds(shape) or shape.stack.runs is not None or shape.stack.layers_per_module > 1


def _recomputing(whole: Workload, word: str) -> Workload:
    return whole if word == whole.recompute else replace(whole, recompute=word)


def _unlike(whole: Workload, every: Sequence[_Static]) -> Sequence[int]:
    """The first of stages with equal layers: it holds the activations of the most micro-batches."""
    if not _has_kinds(whole.shape):
        return range(len(every))
    found: dict[object, int] = {}
    for index, one in enumerate(every):
        found.setdefault((one.kind, whole.recompute_of(index)), index)
    return [*found.values()]


def _terms(one: _Held, static: _Static) -> StageTerms:
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


def _waiting_logits(one: _Held, logits: float) -> float:
    """Logits of other micro-batches, and what the loss has of those of this one."""
    waiting = 0.0 if one.work.linear_loss else logits * one.work.element_bytes * max(one.copies - 1, 0)
    return waiting + loss_chunk_bytes(one.work, logits)


_BEGUN = 0.9
"""Of a layer in whose backward pass gradients are reduced, what has to be left of it that its largest moment is too."""


def _at_peak(one: _Held, logits: float, static: _Static) -> tuple[dict[str, float], float]:
    """What is held of activations, by part, at the largest moment of a step, and when gradients are reduced in it."""
    work, stage = one.work, one.stage
    bucket = static.bucket if work.zero_stage == 2 else 0.0
    if work.recomputes_layers:
        in_turn = work.zero_stage == 2 or work.micro_batches <= _FIRST_AND_LAST
        kept, one_layer, in_flight = _recomputed(one, bucket, static.reductions if in_turn else ())
    else:
        in_flight = _in_flight(one, bucket)
        kept, one_layer = _kept(one), (one.sparse if one.routed else one.dense).total * one.tokens
    _add_choices(one, kept)
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
    reducing = _while_reducing(one, sum(kept.values()), one_layer, in_flight, static) if static.reductions else 0.0
    if one.eager:
        # With full recomputation it is gone when a layer is computed again.
        kept["stream"] += head_bytes(work, stage) * (not work.recomputes_layers)
        reduced = _reduced_before_embedding(work, static.reductions)
        _add_ends(one, kept, logits, one_layer, in_flight, absent=_absent(work, static, stage), reduced=reduced)
        _add_runs(one, kept, logits, static.numel)
    return kept, reducing


def _reduced_before_embedding(work: Workload, every: Sequence[Reduction]) -> float:
    """What reductions added before the embedding goes backward: their sums, less gradients that they let go of.

    Its own gradient starts the last but one, where the last is of it alone.
    """
    if len(every) <= 1:
        return 0.0
    is_single = every[-1].is_single
    before = every[: -2 if is_single else -1]
    found = (before[-1].behind if before else 0.0) - every[-2].size * is_single
    # In a step's micro-batches between the first and the last all gradients are held.
    return found if work.zero_stage == 2 or work.micro_batches <= _FIRST_AND_LAST else max(0.0, found)


def _while_reducing(one: _Held, kept: float, one_layer: float, in_flight: float, static: _Static) -> float:
    """Activations and what reductions take beside them, at the largest moment in which gradients are reduced.

    `kept` is all that layers keep; where they are recomputed, with the largest `one_layer` and what it has `in_flight`.
    """
    work, stage, most, found = one.work, one.stage, len(one.stage.layers), 0.0
    waiting, again = waiting_gradient_bytes(work, stage), work.recomputes_layers
    beyond = (one.sparse.mlp - one.dense.mlp) * one.tokens
    whole = one_layer + in_flight - behind_mlp_bytes(work) if again else 0.0
    of_each = (kept - whole) / max(most, 1)
    layers_of = [] if _are_alike(work.shape) else _layer_by_layer(one)
    sums = [*accumulate((layer.size for layer in layers_of), initial=0.0)]

    def held_by(layers: float) -> float:
        if again or not layers_of:
            return of_each * layers
        begun = max(1, math.ceil(layers))
        return kept - sums[-1] + sums[begun] - (begun - layers) * (sums[begun] - sums[begun - 1])

    behind, came = last_norm_bytes(work) + head_bytes(work, stage) * (not again), hidden_bytes(work)
    share_left = _share_left(one, one.dense), _share_left(one, one.sparse)
    of_layer = [one_layer - (one.routed > 0 and not with_experts) * beyond for with_experts in (False, True)]
    for each in static.moments.begun:
        if each.place is None:
            begun, held = behind, float(most)
        else:
            here = layers_of[each.place] if layers_of else None
            part = (here.share_left if here else share_left[each.with_experts])(each.left) * each.is_in_layer
            begun = (here.size if here else of_layer[each.with_experts]) * part * again + came * each.is_in_layer
            held = each.place + part
        found = max(found, each.taken + held_by(held) + begun + waiting * each.is_in_layer)
    # Sums that are there by then lie beside the layer that goes backward next, or is about to; so does the bucket.
    later = _in_flight(one, 0.0)
    recomputed = lru_cache(partial(_whole_of, one))
    for beside, layers, stop in static.moments.between:
        there = math.ceil(layers)
        if layers_of:
            last = max(layer.size * again + layer.in_flight for layer in layers_of[min(stop, there - 1) : there])
            last -= behind_mlp_bytes(work) * again
        elif again:
            is_largest = not one.routed or work.shape.routed(stage.layers[:there])
            last = whole - in_flight + later if is_largest else recomputed(stage.layers[:there])
        else:
            last = later
        found = max(found, waiting + beside + held_by(layers) + last)
    return found


class _Begun(NamedTuple):
    """A reduction in the middle of a layer, or before the first of them goes backward."""

    taken: float
    """Bytes beside layers, bucket and sums."""
    is_in_layer: bool
    """Whether any layer still holds what it keeps."""
    place: int | None
    """Of the layer that has begun; None: none has."""
    left: tuple[float, float]
    with_experts: bool


class _Moments(NamedTuple):
    """Of a backward pass those in which most may be held: none of them is less than another in every respect."""

    begun: Sequence[_Begun]
    between: Sequence[tuple[float, float, int]]
    """Between two reductions: bytes beside what the layers hold that are left, their number, and what is left then."""


@lru_cache(maxsize=256)
def _moments(shape: ModelShape, layers: range, reductions: Sequence[Reduction]) -> _Moments:
    most, begun, between = len(layers), list[_Begun](), list[tuple[float, float, int]]()
    for each in reductions:
        place = max(0, math.ceil(each.layers) - 1) if each.layers <= most else None
        with_experts = place is not None and shape.routed(layers[place : place + 1]) > 0
        begun.append(_Begun(each.taken, each.layers > 0, place, each.left, with_experts))
    for each, following in pairwise(reductions):
        held = min(each.layers, most)
        left, begins = math.ceil(held) - 1, held - math.ceil(held) + 1 > _BEGUN
        begins = begins and not each.by_dealt
        if math.ceil(following.layers) <= left > 0 or (begins and held > 0):
            beside = each.behind - each.filled * (not begins)
            between.append((beside, held if begins else left, max(0, math.ceil(following.layers) - 1)))
    if _are_alike(shape):
        between = _largest(between, lambda one, other: one[1] <= other[1])
    return _Moments(_largest(begun, _is_less), between)


_Moment = TypeVar("_Moment", bound=tuple[object, ...])


def _largest(moments: Iterable[_Moment], is_less: Callable[[_Moment, _Moment], bool]) -> list[_Moment]:
    """Those that are not less than one which takes as much."""
    found = list[_Moment]()
    for one in sorted(moments, key=itemgetter(0), reverse=True):
        if not any(is_less(one, other) for other in found):
            found.append(one)
    return found


def _is_less(one: _Begun, other: _Begun) -> bool:
    """Whether no more of the layers is left."""
    if one.place is None or other.place is None:
        return one.place is other.place and one.is_in_layer == other.is_in_layer
    return (
        one.place <= other.place
        and one.left[0] <= other.left[0]
        and one.left[1] <= other.left[1]
        and one.is_in_layer <= other.is_in_layer
        and one.with_experts == other.with_experts
    )


def _share_left(one: _Held, layer: LayerBytes) -> Callable[[tuple[float, float]], float]:
    """Of what a layer keeps that has begun, the share that is left, by those of its parameters (`Reduction.left`).

    Norms behind a block go backward before it, those in front behind it; a single one in front of both at the end. When
    the gradient of an MLP's first projection comes, what it kept is gone.
    """
    norms, behind = one.work.shape.norms.per_layer, norms_mlp_output(one.work.shape)
    of_state = kept_bytes(one.work) / one.tokens if one.states and not layer.attention else 0.0
    first = 1 / 3 if one.work.shape.mlp.gated else 1 / 2

    def share(parameters: tuple[float, float]) -> float:
        attention, mlp = parameters
        streams = 1.0 if norms <= 1 else (norms - behind if mlp else norms // 2 - behind) / norms
        mlp = max(0.0, mlp - first) / (1 - first)
        left = layer.stream * streams + (layer.attention + of_state) * attention + layer.mlp * mlp
        left += layer.gathered * ((mlp > 0) + (attention > 0)) / 2
        return left / (layer.total + of_state) if layer.total else 0.0

    return share


def _add_choices(one: _Held, kept: dict[str, float]) -> None:
    """Adds what layers keep of choices: of keys, and of experts by their losses."""
    kept["attention"] += choice_bytes(one.work, one.stage) * one.eager * one.copies
    kept["mlp"] += router_bytes(one.work, one.stage) * one.copies


def _each_layer(one: _Held) -> list[_Held]:
    """Each layer of a stage alone; those of a sort are one."""
    shape, found = one.work.shape, dict[object, _Held]()
    kinds = {layer: kind for kind, (own, _) in enumerate(shape.by_kind) for layer in own}
    attending, each = set(shape.attention_layers), []
    for layer in one.stage.layers:
        alone = range(layer, layer + 1)
        parts = tuple(place for place, part in enumerate(shape.parts) if part.count(alone))
        sort = kinds.get(layer), parts, layer in attending, shape.routed(alone), shape.dense(alone)
        if sort not in found:
            found[sort] = _Held.of(one.work, one.index, replace(one.stage, layers=alone))
        each.append(found[sort])
    return each


class _Layer(NamedTuple):
    """A layer alone."""

    size: float
    """What it keeps; where it is recomputed, when it is computed again."""
    in_flight: float
    share_left: Callable[[tuple[float, float]], float]


def _layer_by_layer(one: _Held) -> list[_Layer]:
    """The layers of a stage, of which those of a sort are one."""

    def layer(alone: _Held) -> _Layer:
        share_left = _share_left(alone, alone.largest)
        if one.work.recomputes_layers:
            return _Layer(*_recomputed(alone, 0.0)[1:], share_left)
        kept = _kept(alone)
        _add_choices(alone, kept)
        return _Layer(sum(kept.values()), _in_flight(alone, 0.0), share_left)

    each = _each_layer(one)
    found = {sort: layer(alone) for sort, alone in {id(alone): alone for alone in each}.items()}
    return [found[id(alone)] for alone in each]


def _whole_of(one: _Held, layers: range) -> float:
    """What the largest of some layers of a stage takes when it is computed again, and goes backward."""
    left = _Held.of(one.work, one.index, replace(one.stage, layers=layers))
    _, one_layer, in_flight = _recomputed(left, 0.0)
    return one_layer + in_flight - behind_mlp_bytes(one.work)


_FIRST_AND_LAST = 2
"""Micro-batches of a step in which none is between the first and the last."""


def _absent(work: Workload, static: _Static, stage: Stage) -> tuple[float, float, float]:
    """What is counted as held and is not there yet: while the loss goes backward, behind that, and when the head has.

    At ZeRO stage 2 these are the bucket, which is there from the first gradient on, and the sums of a step's only
    micro-batch, which are there from the first reduction on. At stage 1 the gradients of the head lie in the bucket
    in a step's last micro-batch; in one between the first and the last all gradients are held.
    """
    if work.zero_stage != 2 or not static.reductions:
        behind = static.in_bucket * (work.micro_batches <= _FIRST_AND_LAST)
        return 0.0, behind, behind
    sums, first = static.held[1] if work.micro_batches == 1 else 0.0, static.reductions[0]
    # A head that no bucket takes is reduced before the last norm goes on backward, and may stay.
    return static.bucket + sums, sums, -first.behind if first.layers > len(stage.layers) else sums


def _kept(one: _Held) -> dict[str, float]:
    """What all layers keep for backward, where nothing is recomputed."""
    work, stage, tokens, held = one.work, one.stage, one.tokens, one.copies
    trained = len(stage.layers) - one.untrained
    dense, sparse = (parts_left(work, layer) for layer in (one.dense, one.sparse))
    routed = one.routed if work.shape.stack.blocks is None else 0
    kept: dict[str, float] = {
        part: ((trained - routed) * getattr(dense, part) + routed * getattr(sparse, part)) * tokens * held
        for part in ("stream", "gathered")
    }
    kept["attention"] = (one.attending - one.untrained) * (sparse if one.routed else dense).attention * tokens * held
    kept["mlp"] = (one.dense_layers * dense.mlp + one.routed * sparse.mlp) * tokens * held
    kept["mlp"] += (one.dense_layers * dense.layer + one.routed * sparse.layer) * held
    kept["attention"] += one.states * kept_bytes(work) * held
    for part in ("stream", "gathered"):
        # A sequence that is shorter than cp leaves ranks without a token: other rules refuse it.
        kept[part] *= work.split_tokens / max(1, tokens)
    kept["stream"] += sum(count * size for count, size in kept_apart(work, one.with_blocks, BESIDE)) * held
    return kept


def _in_flight(one: _Held, bucket: float) -> float:
    """What one layer has in flight beside what it keeps, in its backward pass, which makes the `bucket`."""
    work, together = one.work, one.work.shape.stack.layers_per_module
    in_flight = in_flight_bytes(work, routed=one.routed > 0, bucket=bucket)
    if work.tp > 1 and work.sequence_parallel and not one.routed and work.mlp_tiles == 1:
        in_flight = max(in_flight, entering_bytes(work))
    if one.eager:
        layer = one.sparse if one.routed else one.dense
        if not one.routed and work.mlp_tiles == 1 and work.shape.stack.blocks is None:
            in_flight = max(in_flight, leaving_bytes(work, one.stage))
        if norms_mlp_output(work.shape):  # that norm is gone
            in_flight -= layer.stream / work.shape.norms.per_layer * work.split_tokens
        of_others = norm_in_flight(work, layer), attention_in_flight(work, one.stage, layer), streams_in_flight(work)
        in_flight = max(in_flight, *of_others)
    if together > 1 and one.routed:
        # The experts of a module go backward when its other layers, and the MLP of their own, are gone.
        gone = ((together - 1) * one.dense.total + one.dense.mlp) * one.tokens
        in_flight = max(in_flight_bytes(work, routed=False), in_flight - gone)
    if one.states:
        gone = let_go_bytes(work, one.stage, one.dense, one.sparse, one.largest)
        # What goes into a layer is there while it scans, and is added to its result.
        added = 0.0 if work.recomputes_layers or keeps_input(work) else input_bytes(work)
        in_flight = max(in_flight, max(backward_bytes(work), forward_bytes(work) + added) - gone)
    return parts_in_flight(work, one.largest, in_flight) if work.parts_again else in_flight


def _recomputed(
    one: _Held, bucket: float, reductions: Sequence[Reduction] = ()
) -> tuple[dict[str, float], float, float]:
    """Each layer's input is kept; one layer at a time is recomputed whole: all that is kept, that layer, its flight."""
    alone, in_flight, gone, stack = one, _in_flight(one, bucket), 0.0, one.work.shape.stack
    if not _are_alike(one.work.shape) and len(one.stage.layers) > 1:
        # Layers that go backward behind a reduction count with it.
        first = max(0, math.ceil(min(reductions[0].layers, len(one.stage.layers))) - 1) if reductions else 0
        last = {id(layer): (layer, place) for place, layer in enumerate(_each_layer(one)) if place >= first}
        every = ((layer, _in_flight(layer, bucket), _kept_behind(one, place)) for layer, place in last.values())
        alone, in_flight, gone = max(every, key=lambda each: sum(_again(each[0]).values()) + each[1] - each[2])
    work, stage, tokens, held, layers = one.work, one.stage, one.tokens, one.copies, bool(one.stage.layers)
    kept = _again(alone)
    one_layer = sum(kept.values())
    inputs = input_bytes(work)
    modules = (len(stage.layers) - one.untrained) / stack.layers_per_module
    kept["stream"] += kept_layers(work, modules, held) * inputs
    if work.shape.residual.streams:
        # Of that one layer, which its first mixture keeps.
        kept["stream"] -= layers * inputs
        one_layer -= layers * inputs
    if one.eager and layers:
        kept["attention"] += kept_layers(work, one.attending, held) * kept_attention(work) * tokens
        kept["attention"] += kept_layers(work, one.states, held) * exchanged_bytes(work)
        kept["mlp"] += in_flight - behind_mlp_bytes(work)
        if alone.attending and not work.moves_activations:
            # What the layer that is computed again takes and attends to is among what all layers keep.
            attended = kept_attention(work) * tokens
            taken = inputs * (keeps_input(work) and not work.shape.residual.streams)
            kept["attention"] -= attended
            kept["stream"] -= taken
            one_layer -= attended + taken
        kept["stream"] -= gone
        one_layer -= gone
    return kept, one_layer, in_flight


def _kept_behind(one: _Held, place: int) -> float:
    """What layers of a stage keep of a micro-batch that stand behind one which is computed again."""
    behind = one.stage.layers[place + 1 :]
    return sum(size * count for size, count in kept_tensors(one.work, behind)) * (not one.work.moves_activations)


def _again(one: _Held) -> dict[str, float]:
    """What the largest layer keeps, by part, when it is computed again; of a module of several all of them."""
    work, layers = one.work, bool(one.stage.layers)
    # One of them has its experts.
    recomputed = (one.largest, *[one.dense] * (work.shape.stack.layers_per_module - 1))
    kept: dict[str, float] = {
        part: sum(getattr(each, part) for each in recomputed) * one.tokens * layers
        for part in ("stream", "attention", "gathered", "mlp")
    }
    kept["mlp"] += one.largest.layer * layers
    kept["attention"] += hiding_bytes(work, one.stage) * one.eager
    carried = kept_bytes(work) if one.states else 0.0
    if uses(work.shape, one.stage.layers):
        # A layer with a shared block has all of them.
        kept["attention"] += carried
    elif work.shape.stack.blocks is not None:
        # A layer is one block: the largest counts.
        kept["attention"] = max(kept["attention"] * (one.attending > 0), carried)
        kept["mlp"] *= one.dense_layers + one.routed > 0
        kept["attention" if kept["mlp"] > kept["attention"] else "mlp"] = 0.0
    else:
        beside = one.attending == len(one.stage.layers)
        kept["attention"] = kept["attention"] + carried if beside else max(kept["attention"], carried)
    kept["stream"] += max((size for _, size in kept_apart(work, one.with_blocks, BESIDE)), default=0.0)
    return kept


def _add_runs(one: _Held, kept: dict[str, float], logits: float, numel: int) -> None:
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


def kept_tensors(work: Workload, layers: range) -> list[tuple[float, float]]:
    """Bytes of a tensor of a micro-batch that these layers keep, and how many of it: inputs, attention, states."""
    attending, shape = work.shape.attending(layers), work.shape
    return [
        (input_bytes(work), len(layers) / shape.stack.layers_per_module),
        *((size * work.local_tokens, attending) for size in attention_sizes(work)),
        (exchanged_bytes(work), sum(one.count(layers) for one in shape.parts if one.states)),
    ]


def _add_ends(
    one: _Held,
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
