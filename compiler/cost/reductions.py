"""What ZeRO keeps of the gradients of a stage, and what it takes while it reduces them in backward.

Sums in the type of the weights are kept whole of each parameter that lies in a rank's shard, if only in part
(`grads_in_partition`, runtime/zero/stage_1_and_2.py), and those of a further micro-batch lie beside them until they are
added. fp32 sums of 16-bit gradients are kept of the shard alone. Gradients go into a bucket, which is there from the
first gradient of a backward pass on, and are reduced when the next one does not fit.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from parcompile.layout.pipeline import Stage
from parcompile.model.derived_rows import parameter_table

from .partitions import Flat, Kept, Partition, Role, Spread, partition
from .workload import RankPlace, Workload

LARGEST_BUCKET = 500_000_000
"""DeepSpeed's own default for reduce_bucket_size, in elements."""
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Of buckets at stages 1 and 2: as Megatron-LM has them where it overlaps, so that latency does not bound them."""


def largest_bucket(work: Workload) -> int:
    """Elements that a bucket takes at most."""
    if work.reduce_bucket is not None:
        return work.reduce_bucket
    size = max(SMALLEST_BUCKET, BUCKET_PER_RANK * work.shards)
    if work.zero_stage == 2 and work.overlaps_gradients:  # see there: a bucket takes every gradient
        size = max(size, *(work.layout(row).local_numel for row in parameter_table(work.shape) if row.trained))
    return LARGEST_BUCKET if work.shards_weights else min(size, LARGEST_BUCKET)


def reduces_in_backward(work: Workload) -> bool:
    """Whether gradients are reduced while layers before them still hold what they keep."""
    return work.zero_stage == 2 or (work.zero_stage == 1 and work.overlaps_gradients)


def keeps_whole_sums(work: Workload) -> bool:
    """Whether a rank keeps the sums of whole parameters at stage 2."""
    same = work.gradient_bytes == work.element_bytes
    return work.framework == "deepspeed" and work.zero_stage == 2 and same and not work.on_host


def kept_numel(work: Workload, stage: Stage, place: RankPlace | None = None) -> int:
    """Elements of the sums that a rank keeps whole; without a place of the rank that takes most."""
    return sum(one.numel for one in _of_place(work, stage, place))


def _of_place(work: Workload, stage: Stage, place: RankPlace | None) -> tuple[Kept, Kept]:
    found = partition(work, stage)
    if place is None:
        return _fullest(found, largest_bucket(work), reduces_in_backward(work))
    return found.kept_by(place)


@lru_cache(maxsize=256)
def _fullest(owned: Partition, size: int, in_backward: bool) -> tuple[Kept, Kept]:
    dense, dealt = owned.kept
    buckets = _fill(owned, size, in_backward)
    places = [-bucket.first for bucket in buckets]
    largest = [*accumulate([max(bucket.numels) for bucket in buckets], max, initial=0)]

    def most(run: tuple[int, Kept]) -> tuple[int, int]:
        """What is kept, and what reductions take with it beside."""
        one = run[1]
        beside = one.numel + largest[bisect.bisect_left(places, -one.last)]
        # The first of the last parameters is reduced first.
        return one.numel + max(one.numel, largest[-1], beside), one.last

    return max(dense, key=most)[1], max(dealt, key=most)[1]


class Reduction(NamedTuple):
    """A moment of a backward pass in which gradients are reduced."""

    layers: float
    """Of the stage, those that still hold what they keep for backward, one of them in part; more than it has where none
    has begun."""
    taken: float
    """Bytes beside these, the bucket and the sums; less sums that are not there yet."""
    behind: float
    """The same behind it."""
    filled: float
    """Bytes of gradients that lie in the next bucket alone when the next whole layer goes backward: at stage 1."""
    is_single: bool
    """Whether it is of one parameter."""
    size: float
    """Bytes of gradients that lie in the bucket alone by then: at stage 1."""
    by_dealt: bool
    """Whether the gradient that does not fit is that of dealt experts, whose layer has passed its largest moment."""
    left: tuple[float, float]
    """Of the layer that has begun, the share of attention's parameters and norms that is not reduced, and that of the
    MLP's."""


class _Reducing(NamedTuple):
    """What the reductions of a stage depend on: many layouts of a search have the same."""

    owned: Partition
    bucket: int
    in_backward: bool
    zero_stage: int
    element_bytes: int
    gradient_bytes: int
    message_bytes: int
    several: bool
    """The step has several micro-batches."""
    on_host: bool
    shard: int
    """Elements of a rank's shard, of which so many are of dealt experts:"""
    dealt: int

    @property
    def is_whole(self) -> bool:
        """Sums are of the type of the weights, and of whole parameters."""
        return self.gradient_bytes == self.element_bytes

    @property
    def buckets(self) -> Sequence[_Bucket]:
        """What is reduced together."""
        return _fill(self.owned, self.bucket, self.in_backward)


def reductions(work: Workload, stage: Stage, place: RankPlace | None = None) -> tuple[Reduction, ...]:
    """The reductions of a micro-batch at stage 2: of a step's only one, or of one behind another; at stage 1 of a step.

    A bucket is copied as a whole where it goes to several ranks, or is added to fp32 sums piece by piece, and once more
    in the type of the messages. What goes to those that share dense layers does so apart from dealt experts. A
    parameter that no bucket takes is reduced where it is.
    """
    kept, in_backward = _of_place(work, stage, place), reduces_in_backward(work)
    dealt = -(-work.dealt_parameters(stage) // work.expert_shards)
    reducing = _Reducing(
        *(partition(work, stage), largest_bucket(work), in_backward, work.zero_stage, work.element_bytes),
        *(work.gradient_bytes, work.message_bytes, work.micro_batches > 1, work.on_host),
        *(work.sharded(stage).shard_numel, dealt),
    )
    return _reductions(reducing, kept)


@lru_cache(maxsize=256)
def _reductions(one: _Reducing, kept: tuple[Kept, Kept]) -> tuple[Reduction, ...]:
    taken = _taken_at_stage_1 if one.zero_stage == 1 else _taken_at_stage_2
    each = zip(one.buckets, taken(one, kept), strict=True)
    width = one.gradient_bytes * (one.zero_stage == 1 and one.in_backward)
    return tuple(
        Reduction(
            layers=bucket.layers,
            taken=float(at),
            behind=float(behind),
            filled=width * bucket.rest,
            is_single=bucket.stop - bucket.first == 1,
            size=float(width * sum(bucket.numels) * (not bucket.is_large)),
            by_dealt=bucket.by_dealt,
            left=bucket.left,
        )
        for bucket, (at, behind) in each
    )


def head_in_bucket(work: Workload, stage: Stage) -> float:
    """Bytes of the head's gradients, where stage 1 takes them into a bucket before the last layer goes backward."""
    if work.zero_stage != 1 or not reduces_in_backward(work) or not stage.has_head:
        return 0.0
    table = parameter_table(work.shape)
    numel = sum(work.layout(row).local_numel for row in table.after if row.trained)
    return float(work.gradient_bytes * numel * (numel <= largest_bucket(work)))


def taken_at_end(work: Workload, stage: Stage, place: RankPlace | None = None) -> float:
    """Bytes that stage 1 takes at most while it reduces behind backward, beside the bucket; 0 where it does not."""
    if work.zero_stage != 1 or reduces_in_backward(work):
        return 0.0
    return max((one.taken for one in reductions(work, stage, place)), default=0.0)


def left_at_step(work: Workload, stage: Stage, place: RankPlace | None = None) -> float:
    """Bytes of other ranks' gradients that a rank still has at stage 1 when the norm is computed, beside the bucket.

    Those that no bucket takes, where sums are of another type than the weights (`grad_accum`).
    """
    if work.zero_stage != 1 or work.gradient_bytes == work.element_bytes:
        return 0.0
    return float(work.gradient_bytes * _left_at_step(partition(work, stage), largest_bucket(work), place))


@lru_cache(maxsize=256)
def _left_at_step(owned: Partition, size: int, place: RankPlace | None) -> int:
    every = zip(owned.every, owned.spread, strict=True)
    large, left = [pair for pair in every if pair[0].numel > size], 0
    for which, ranks in enumerate((owned.shards, owned.expert_shards)):
        own = [pair for pair in large if pair[0].is_dealt == which]
        # Which of them a rank has a part of changes where one begins or ends.
        changes = {0, *(rank for _, at in own for rank in (at.start, at.stop) if rank < ranks)}
        places = changes if place is None else {(place.shard, place.expert_shard)[which]}
        left += max(sum(one.numel for one, at in own if not at.start <= rank < at.stop) for rank in places)
    return left


def _taken_at_stage_1(one: _Reducing, kept: tuple[Kept, Kept]) -> Iterator[tuple[float, float]]:
    """Beside the sums of all gradients; what is reduced is let go of, where no bucket takes it by ranks that own it."""
    width, places, large, begun = one.gradient_bytes, one.owned.spread, 0, False
    own = [part.numel for part in kept] if one.is_whole else [one.shard - one.dealt, one.dealt]
    dense, experts = [0 if one.on_host else width * numel for numel in own]
    for bucket, copied in zip(one.buckets, _copies(one, width), strict=True):
        has_dense, has_experts = True, bucket.numels[1] > 0
        if one.in_backward:
            has_dense, has_experts = bucket.first <= kept[0].last, bucket.first <= kept[1].last
        elif one.is_whole:
            has_dense, has_experts = bucket.stop > kept[0].first >= 0, has_experts and bucket.stop > kept[1].first >= 0
        if one.is_whole:  # one tensor for all, behind the first bucket with a part of it
            beside = (dense + experts) * (has_dense or has_experts)
            taken = max(copied + (dense + experts) * begun, beside)
            begun |= has_dense or has_experts
        else:
            beside = dense * has_dense + experts * has_experts
            taken = copied + beside
        size = width * sum(bucket.numels)
        let_go = large + width * bucket.before + size * (not bucket.is_large)
        taken -= let_go
        if bucket.is_large and _is_own(bucket, places, kept):
            large, let_go = large + size, let_go + size
        yield taken, beside - let_go


def _taken_at_stage_2(one: _Reducing, kept: tuple[Kept, Kept]) -> Iterator[tuple[float, float]]:
    """Beside the sums of what a rank owns, which are there from the first of its gradients on."""
    width, whole = one.element_bytes, one.is_whole and not one.on_host
    sums = [(width * sum(part.numel for part in kept), max(part.last for part in kept))]
    if not whole:  # of dense layers, and of dealt experts
        numels = (0, 0) if one.is_whole else (one.shard - one.dealt, one.dealt)
        sums = [(one.gradient_bytes * numel, part.last) for numel, part in zip(numels, kept, strict=True)]
    large, places = 0, one.owned.spread

    def begun(place: int) -> int:
        """Bytes of sums that are there when the gradient of a parameter has come, beside those that are counted."""
        there = sum([size * (place <= last) for size, last in sums])
        if one.several:
            return there * whole
        return there - sum(size for size, _ in sums)

    for bucket, copied in zip(one.buckets, _copies(one, width), strict=True):
        # fp32 sums are there before the copies, those in the type of the weights behind them.
        beside = begun(bucket.stop), begun(bucket.first)
        size = width * sum(bucket.numels)
        apart = large + width * bucket.waiting + size * bucket.is_large
        # What no bucket takes stays with a rank that owns it, where sums are of another type.
        large += size * (bucket.is_large and not whole and not one.on_host and _is_own(bucket, places, kept))
        yield apart + max(copied + beside[not whole], beside[1]), beside[1] + large


def _is_own(bucket: _Bucket, places: Sequence[Spread], kept: tuple[Kept, Kept]) -> bool:
    """Whether the rank owns a part of the first parameter of a bucket."""
    at = places[bucket.first]
    return at.start <= kept[bucket.numels[1] > 0].rank < at.stop


def _copies(one: _Reducing, width: int) -> Iterator[int]:
    """Bytes of each bucket, of numbers of `width` bytes, that are copied to be reduced."""
    wider, places = one.message_bytes * (one.message_bytes > width), one.owned.spread
    in_pieces = (not one.is_whole or ranks > 1 for ranks in (one.owned.shards, one.owned.expert_shards))
    dense, dealt = (width * pieces + wider for pieces in in_pieces)

    def is_one_slice(bucket: _Bucket) -> bool:
        """Whether all of it goes to one rank: fp32 sums of several parameters are added to one by one."""
        in_one = places[bucket.first].start + 1 == places[bucket.stop - 1].stop and not bucket.numels[1]
        return in_one and (one.is_whole or bucket.stop - bucket.first == 1)

    for bucket in one.buckets:
        if bucket.is_large:
            at = places[bucket.first]
            yield _large_copy(sum(bucket.numels), at.begin, at.shard, one.bucket, width, wider)
        elif is_one_slice(bucket):
            yield bucket.numels[0] * wider
        else:
            yield max(bucket.numels[0] * dense, bucket.numels[1] * dealt)


def _large_copy(numel: int, begin: int, shard: int, size: int, width: int, wider: int) -> int:
    """The same of a parameter that begins there in a shard: as many shards together as are more than a bucket takes."""
    first, several = min(shard - begin, numel), size // shard + 1
    begins = min(numel, first + shard * ((size - first) // shard + 1)) if first <= size else first
    follows = min(several * shard, numel - begins)
    # A single piece is no copy.
    joined = max(begins * (begins > first), follows * (follows > shard))
    return width * joined + wider * max(begins, follows)


class _Bucket(NamedTuple):
    layers: float
    """That are left when it is reduced."""
    first: int
    """The place of the first of its parameters in the model's order; the last one is before `stop`."""
    stop: int
    numels: tuple[int, int]
    """Elements of dense layers, and of dealt experts."""
    waiting: int
    """Elements of the gradient that does not fit."""
    is_large: bool
    """Whether it is a single parameter that no bucket takes."""
    before: int
    """Elements of those that are reduced before; large ones are let go of elsewhere."""
    rest: int
    """Elements of the last one's layer that are not reduced yet."""
    left: tuple[float, float]
    """Of that layer, the shares that are left of attention and norms, and of the MLP."""
    by_dealt: bool
    """Whether the gradient that does not fit is of dealt experts."""


def _backward(every: Sequence[Flat]) -> Sequence[int]:
    """The places of parameters in the order in which their gradients come."""
    routed = dict[int, list[int]]()
    for number, one in enumerate(every):
        if one.role is Role.ROUTED:
            routed.setdefault(one.layer, []).append(number)

    def place(number: int) -> tuple[int, float, int]:
        # What stands before the layers or behind them may be registered elsewhere.
        one = every[number]
        if one.layer not in routed or one.role in (Role.ROUTED, Role.OTHERS):
            return one.layer, number, number
        if one.role is Role.SHARED:
            return one.layer, routed[one.layer][-1] + 0.5, number
        # What is left of the block is the router.
        return one.layer, routed[one.layer][0] - (0.25 if one.role is Role.MLP else 0.5), number

    return sorted(range(len(every)), key=place, reverse=True)


@lru_cache(maxsize=256)
def _fill(owned: Partition, size: int, in_backward: bool) -> Sequence[_Bucket]:
    """What is reduced together: in the order of backward, or behind it dense layers first, and then dealt experts.

    Behind it, of buckets that are alike the first and the last stand for all: more is let go of before the later ones.
    """
    every, found, of_layer = owned.every, list[_Bucket](), Counter[int]()
    of_part = Counter[tuple[int, bool]]()
    if in_backward:
        order = [number for number in _backward(every) if every[number].role is not Role.SUMMED]
    else:
        order = sorted(range(len(every)), key=lambda number: every[number].is_dealt)
    for one in [every[number] for number in order]:
        of_layer[one.layer] += one.numel
        of_part[one.layer, one.role is not Role.OTHERS] += one.numel
    parts_left = Counter(of_part)
    left, filled, total, members, before = Counter(of_layer), [0, 0], 0, list[int](), 0

    def fill(layers: float, waiting: int, rest: int, by_dealt: bool) -> int:
        """Elements that a bucket has taken."""
        is_large, numels = total > size, (filled[0], filled[1])
        place = max(0, math.ceil(layers) - 1)
        attention, mlp = [parts_left[place, part] / max(of_part[place, part], 1) for part in (False, True)]
        ends = min(members), max(members) + 1
        found.append(_Bucket(layers, *ends, numels, waiting, is_large, before, rest, (attention, mlp), by_dealt))
        return 0 if is_large else total

    for number in order:
        one = every[number]
        if members and total + one.numel > size:
            layers = max(0.0, one.layer + left[one.layer] / of_layer[one.layer])
            rest = left[one.layer] * (one.numel <= size)
            before += fill(layers * in_backward, one.numel, rest, one.is_dealt)
            filled, members, total = [0, 0], [], 0
        members.append(number)
        filled[one.is_dealt] += one.numel
        total += one.numel
        left[one.layer] -= one.numel
        parts_left[one.layer, one.role is not Role.OTHERS] -= one.numel
    if members:
        fill(0, 0, 0, False)
    if in_backward:
        return found
    first, last = ({(one.numels, one.is_large): one for one in order} for order in (found[::-1], found))
    ends = {*first.values(), *last.values()}
    return [one for one in found if one in ends]
