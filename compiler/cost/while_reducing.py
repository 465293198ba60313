"""What a rank holds while gradients are reduced in a backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

from parcompile.model.shape import ModelShape

from .blocks import head_bytes
from .collectives import hidden_bytes, norms_mlp_output
from .held import Held, add_choices, all_kept, are_alike, each_sort, in_flight_of, layer_sorts, recomputed
from .kept import LayerBytes
from .layer_passes import behind_mlp_bytes, last_norm_bytes, waiting_gradient_bytes
from .recurrent import kept_bytes
from .reductions import Reduction
from .workload import Workload

_BEGUN = 0.9
"""Of a layer in whose backward pass gradients are reduced, what has to be left of it that its largest moment is too."""
FIRST_AND_LAST = 2
"""Micro-batches of a step in which none is between the first and the last."""


def reduced_before_embedding(work: Workload, every: Sequence[Reduction]) -> float:
    """What reductions added before the embedding goes backward: their sums, less gradients that they let go of.

    Its own gradient starts the last but one, where the last is of it alone.
    """
    if len(every) <= 1:
        return 0.0
    is_single = every[-1].is_single
    before = every[: -2 if is_single else -1]
    found = (before[-1].behind if before else 0.0) - every[-2].size * is_single
    # In a step's micro-batches between the first and the last all gradients are held.
    return found if work.zero_stage == 2 or work.micro_batches <= FIRST_AND_LAST else max(0.0, found)


def while_reducing(one: Held, kept: float, one_layer: float, in_flight: float, moments: Moments) -> float:
    """Activations and what reductions take beside them, at the largest moment in which gradients are reduced.

    `kept` is all that layers keep; where they are recomputed, with the largest `one_layer` and what it has `in_flight`.
    """
    work, stage, most, found = one.work, one.stage, len(one.stage.layers), 0.0
    waiting, again = waiting_gradient_bytes(work, stage), work.recomputes_layers
    beyond = (one.sparse.mlp - one.dense.mlp) * one.tokens
    whole = one_layer + in_flight - behind_mlp_bytes(work) if again else 0.0
    of_each = (kept - whole) / max(most, 1)
    layers_of = {} if are_alike(work.shape) else _layers_of(one)
    numbers = layer_sorts(work.shape)
    sums = [*accumulate([layers_of[numbers[layer]].size for layer in stage.layers], initial=0.0)] if layers_of else []

    def held_by(layers: float) -> float:
        if again or not layers_of:
            return of_each * layers
        begun = max(1, math.ceil(layers))
        return kept - sums[-1] + sums[begun] - (begun - layers) * (sums[begun] - sums[begun - 1])

    behind, came = last_norm_bytes(work) + head_bytes(work, stage) * (not again), hidden_bytes(work)
    share_left = _share_left(one, one.dense), _share_left(one, one.sparse)
    of_layer = [one_layer - (one.routed > 0 and not with_experts) * beyond for with_experts in (False, True)]
    for each in moments.begun:
        if each.place is None:
            begun, held = behind, float(most)
        else:
            here = layers_of.get(each.sort)
            part = (here.share_left if here else share_left[each.sort])(each.left) * each.is_in_layer
            begun = (here.size if here else of_layer[each.sort]) * part * again + came * each.is_in_layer
            held = each.place + part
        found = max(found, each.taken + held_by(held) + begun + waiting * each.is_in_layer)
    # Sums that are there by then lie beside the layer that goes backward next, or is about to; so does the bucket.
    later = in_flight_of(one, 0.0)
    whole_of = lru_cache(partial(_whole_of, one))
    for beside, layers, next_sorts in moments.between:
        there = math.ceil(layers)
        if layers_of:
            last = max([layers_of[sort].size * again + layers_of[sort].in_flight for sort in next_sorts])
            last -= behind_mlp_bytes(work) * again
        elif again:
            is_largest = not one.routed or work.shape.routed(stage.layers[:there])
            last = whole - in_flight + later if is_largest else whole_of(stage.layers[:there])
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
    sort: int
    """Of that layer; where layers differ by their MLPs alone, whether it has experts."""


class _Between(NamedTuple):
    """A moment between two reductions."""

    beside: float
    """Bytes beside what the layers hold that are left."""
    layers: float
    """The number of these."""
    next_sorts: frozenset[int]
    """Of layers that go backward before the second reduction; none where layers differ by their MLPs alone."""


class Moments(NamedTuple):
    """Of a backward pass those in which most may be held: most that are less than another in every respect are gone."""

    begun: Sequence[_Begun]
    between: Sequence[_Between]


@lru_cache(maxsize=256)
def moments_of(shape: ModelShape, layers: range, reductions: Sequence[Reduction]) -> Moments:
    """The moments of a stage's backward pass in which most may be held."""
    most, begun, between = len(layers), list[_Begun](), list[_Between]()
    every = layer_sorts(shape)
    sorts = every[layers.start : layers.stop]
    if are_alike(shape):
        with_experts = {every[layer]: shape.routed(range(layer, layer + 1)) for layer in layers}
        sorts = [with_experts[sort] for sort in sorts]
    for each in reductions:
        place = max(0, math.ceil(each.layers) - 1) if each.layers <= most else None
        sort = sorts[place] if sorts and place is not None else 0
        begun.append(_Begun(each.taken, each.layers > 0, place, each.left, sort))
    for each, following in pairwise(reductions):
        held = min(each.layers, most)
        left, begins = math.ceil(held) - 1, held - math.ceil(held) + 1 > _BEGUN
        begins = begins and not each.by_dealt
        if math.ceil(following.layers) <= left > 0 or (begins and held > 0):
            beside, count = each.behind - each.filled * (not begins), held if begins else left
            there = math.ceil(count)
            stop = min(max(0, math.ceil(following.layers) - 1), there - 1)
            between.append(_Between(beside, count, frozenset(() if are_alike(shape) else sorts[stop:there])))
    return Moments(_largest(begun, _has_begun_later), _largest(between, _lies_later))


_COMPARED = 8
"""Moments that one is compared with: with all of them, models of very many layers would take long."""
_Moment = TypeVar("_Moment", bound=tuple[object, ...])


def _largest(moments: Iterable[_Moment], is_less: Callable[[_Moment, _Moment], bool]) -> list[_Moment]:
    """Those that take more than others, or at which more is left: `is_less` tells of the latter."""
    found = list[_Moment]()
    for one in sorted(moments, key=itemgetter(0), reverse=True):
        if not any(is_less(one, other) for other in found[-_COMPARED:]):
            found.append(one)
    return found


def _lies_later(one: _Between, other: _Between) -> bool:
    """Whether no more of the layers is left at the one moment than at the other."""
    return one.layers <= other.layers and one.next_sorts == other.next_sorts


def _has_begun_later(one: _Begun, other: _Begun) -> bool:
    """Whether no more of the layers is left at the one moment than at the other."""
    if one.place is None or other.place is None:
        return one.place is other.place and one.is_in_layer == other.is_in_layer
    return (
        one.place <= other.place
        and one.left[0] <= other.left[0]
        and one.left[1] <= other.left[1]
        and one.is_in_layer <= other.is_in_layer
        and one.sort == other.sort
    )


def _share_left(one: Held, layer: LayerBytes) -> Callable[[tuple[float, float]], float]:
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


class _Layer(NamedTuple):
    """A layer alone."""

    size: float
    """What it keeps; where it is recomputed, when it is computed again."""
    in_flight: float
    share_left: Callable[[tuple[float, float]], float]


def _layers_of(one: Held) -> dict[int, _Layer]:
    """A layer of each sort of a stage."""

    def layer(alone: Held) -> _Layer:
        share_left = _share_left(alone, alone.largest)
        if one.work.recomputes_layers:
            return _Layer(*recomputed(alone, 0.0)[1:], share_left)
        kept = all_kept(alone)
        add_choices(alone, kept)
        return _Layer(sum(kept.values()), in_flight_of(alone, 0.0), share_left)

    return {sort: layer(alone) for sort, alone in each_sort(one, one.stage.layers).items()}


def _whole_of(one: Held, layers: range) -> float:
    """What the largest of some layers of a stage takes when it is computed again, and goes backward."""
    left = Held.of(one.work, one.index, replace(one.stage, layers=layers))
    _, one_layer, in_flight = recomputed(left, 0.0)
    return one_layer + in_flight - behind_mlp_bytes(one.work)
