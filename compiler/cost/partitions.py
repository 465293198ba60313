"""What ZeRO keeps of the gradients of a stage, and what it takes while it reduces them in backward.

DeepSpeed flattens the parameters of a group in the model's order and cuts them into shards (runtime/zero/
stage_1_and_2.py). Sums in the type of the weights are kept whole of each parameter that lies in a rank's shard, if only
in part (`grads_in_partition`), and those of a further micro-batch lie beside them until they are added. fp32 sums of
16-bit gradients are kept of the shard alone. Gradients go into a bucket, which is there from the first gradient of a
backward pass on, and are reduced when the next one does not fit.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from parcompile.layout.pipeline import Stage
from parcompile.layout.shards import GroupKind, group_kind, padded_numel
from parcompile.model import Parameter
from parcompile.model.derived_rows import parameter_table
from parcompile.model.shape import ModelShape

from .workload import RankPlace, Workload

LARGEST_BUCKET = 500_000_000
"""DeepSpeed's own default for reduce_bucket_size, in elements."""
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Of buckets that are reduced under backward: as Megatron-LM has them, of which the last one has nothing to hide it."""


class _Flat(NamedTuple):
    """A parameter of a rank."""

    numel: int
    is_dealt: bool
    kind: GroupKind
    layer: int
    """The place of its layer in the stage."""


class _Kept(NamedTuple):
    """Of a rank, the parameters that lie in its shard at least in part."""

    numel: int
    last: int
    """The place of the last of them in the model's order."""
    rank: int
    """The first that has these."""


_Runs = Sequence[tuple[int, _Kept]]
"""What ranks have, each from a rank on: neighbours that have the same are one entry, of a million ranks few."""


def largest_bucket(work: Workload) -> int:
    """Elements that a bucket takes at most."""
    hidden = max(SMALLEST_BUCKET, BUCKET_PER_RANK * work.shards)
    return min(hidden, LARGEST_BUCKET) if work.overlaps_gradients else LARGEST_BUCKET


def keeps_whole_sums(work: Workload) -> bool:
    """Whether a rank keeps the sums of whole parameters at stage 2."""
    return work.framework == "deepspeed" and work.zero_stage == 2 and _are_of_weights(work)


def _are_of_weights(work: Workload) -> bool:
    """Whether sums of a shard are of the type of the weights, and of whole parameters."""
    return work.gradient_bytes == work.element_bytes and not work.on_host


def kept_numel(work: Workload, stage: Stage, place: RankPlace | None = None) -> int:
    """Elements of the sums that a rank keeps whole; without a place of the rank that takes most."""
    return sum(one.numel for one in _of_place(work, stage, place))


@lru_cache(maxsize=256)
def _of_place(work: Workload, stage: Stage, place: RankPlace | None) -> tuple[_Kept, _Kept]:
    dense, dealt = _kept(work, stage)
    if place is not None:
        return _of_rank(dense, place.shard), _of_rank(dealt, place.expert_shard)
    buckets = _buckets(work, stage)

    def most(run: tuple[int, _Kept]) -> tuple[int, int]:
        """What is kept, and what reductions take with it beside."""
        one = run[1]
        beside = [max(bucket.numels) + one.numel * (bucket.first > one.last) for bucket in buckets]
        # The first of the last parameters is reduced first.
        return one.numel + max(one.numel, *beside), one.last

    return max(dense, key=most)[1], max(dealt, key=most)[1]


def _of_rank(runs: _Runs, rank: int) -> _Kept:
    return runs[bisect.bisect_right(runs, rank, key=lambda run: run[0]) - 1][1]


@lru_cache(maxsize=256)
def _kept(work: Workload, stage: Stage) -> tuple[_Runs, _Runs]:
    """Of the ranks that share dense layers, and of those that share experts which are dealt over ep."""
    every, changes = _flattened(work, stage), (dict[int, list[int]](), dict[int, list[int]]())
    for number, (one, (start, stop)) in enumerate(zip(every, _ranks_of(work, stage), strict=True)):
        changes[one.is_dealt].setdefault(start, []).append(number)
        changes[one.is_dealt].setdefault(stop, []).append(~number)
    return _swept(every, changes[0]), _swept(every, changes[1])


@lru_cache(maxsize=256)
def _ranks_of(work: Workload, stage: Stage) -> Sequence[tuple[int, int]]:
    """Of each parameter the first of the ranks in whose shards it lies, and the one behind the last."""
    every, groups = _flattened(work, stage), dict[tuple[bool, GroupKind], list[int]]()
    for number, one in enumerate(every):
        groups.setdefault((one.is_dealt, one.kind), []).append(number)
    found = [(0, 0)] * len(every)
    for (is_dealt, _), members in groups.items():
        ranks, stop = work.expert_shards if is_dealt else work.shards, 0
        shard = padded_numel(sum([every[number].numel for number in members]), ranks) // ranks
        for number in members:
            start, stop = stop, stop + every[number].numel
            found[number] = start // shard, -(-stop // shard)
    return found


def _swept(every: Sequence[_Flat], changes: Mapping[int, Sequence[int]]) -> _Runs:
    """From the ranks at which parameters begin (their number) and end (its complement), what each rank has."""
    here, runs = set[int](), [(0, _Kept(0, -1, 0))]
    for rank in sorted(changes):
        for change in changes[rank]:
            (here.add if change >= 0 else here.discard)(max(change, ~change))
        runs.append((rank, _Kept(sum([every[number].numel for number in here]), max(here, default=-1), rank)))
    return runs


@lru_cache(maxsize=256)
def _flattened(work: Workload, stage: Stage) -> tuple[_Flat, ...]:
    """The parameters that a rank of a stage trains, in the model's order."""
    rows, order = _trained(work.shape, stage)
    of_row = list[tuple[int, bool, GroupKind]]()
    for row in rows:
        layout, kind = work.layout(row), group_kind(row, muon=work.muon, no_weight_decay=work.no_weight_decay)
        of_row.append((layout.local_numel, layout.ep > 1, kind))
    new = tuple.__new__  # as `_Flat(...)`, of thousands of parameters for each layout of a search
    return tuple([new(_Flat, (*of_row[row], layer)) for row, layer in order])


@lru_cache(maxsize=64)
def _trained(shape: ModelShape, stage: Stage) -> tuple[Sequence[Parameter], Sequence[tuple[int, int]]]:
    """Rows of trained parameters; and of each parameter its row's number and its layer's place, in order."""
    table, rows, order = parameter_table(shape), dict[int, Parameter](), list[tuple[int, int]]()
    places, before = dict[int, int](), {id(row) for row in table.before}
    for row, layer in table.in_order():
        is_before = id(row) in before
        at_end = stage.has_embedding if is_before else stage.has_head
        if row.trained and (at_end if layer is None else layer in stage.layers):
            end = -1 if is_before else len(stage.layers)
            rows[id(row)] = row
            order.append(
                (places.setdefault(id(row), len(places)), end if layer is None else layer - stage.layers.start)
            )
    return tuple(rows.values()), order


def buckets_of_step(work: Workload, stage: Stage, numels: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
    """At ZeRO stage 1 what is reduced together at the end of a step: elements of dense layers, and of dealt experts.

    `numels`: those of the stage; experts come behind dense layers. `size`: the elements that a bucket takes.
    """
    if sum(numels) <= size:
        yield numels
        return
    filled = [0, 0]
    for is_dealt in (False, True):
        for one in _flattened(work, stage):
            if one.is_dealt == is_dealt:
                if any(filled) and sum(filled) + one.numel > size:
                    yield filled[0], filled[1]
                    filled = [0, 0]
                filled[is_dealt] += one.numel
    yield filled[0], filled[1]


class Reduction(NamedTuple):
    """A moment of a backward pass in which gradients are reduced."""

    layers: float
    """Of the stage, those that still hold what they keep for backward, one of them in part."""
    taken: float
    """Bytes beside these, the bucket and the sums; less sums that are not there yet."""


def reductions(work: Workload, stage: Stage, place: RankPlace | None = None) -> Iterator[Reduction]:
    """The reductions of a micro-batch: of a step's only one, or of one behind another.

    A bucket is copied as a whole where it goes to several ranks, or is added to fp32 sums piece by piece, and once more
    in the type of the messages. What goes to those that share dense layers does so apart from dealt experts. At stage 1
    the sums of all gradients are there, those of the last micro-batch are reduced, and each is let go of behind that. A
    parameter that no bucket takes is reduced where it is; at stage 1 only ranks that have a part of it let go of it.
    """
    at_end = work.zero_stage == 1
    width, message = work.gradient_bytes if at_end else work.element_bytes, work.message_bytes
    whole, several = _are_of_weights(work), work.micro_batches > 1
    apart = work.gradient_bytes != work.element_bytes
    kept, largest = _of_place(work, stage, place), largest_bucket(work)
    sums, last, let_go = width * sum(one.numel for one in kept), max(one.last for one in kept), 0
    if not whole:
        sums = 0 if work.on_host and not apart else work.gradient_bytes * work.sharded(stage).shard_numel
    dealt = work.gradient_bytes * -(-work.dealt_parameters(stage) // work.expert_shards)
    shards = sums - dealt, dealt
    for bucket in _buckets(work, stage):
        is_large = max(bucket.numels) > largest
        start, stop = _ranks_of(work, stage)[bucket.first] if is_large else (0, 0)
        copied = 0
        for numel, ranks in zip(bucket.numels, (work.shards, work.expert_shards), strict=True):
            flat = width * (stop - start > 1 if is_large else apart or ranks > 1)
            copied = max(copied, numel * (flat + message * (message > width)))
        # fp32 sums are there before the copies, those in the type of the weights behind them.
        begun = bucket.stop <= last, bucket.first <= last
        if at_end and not whole:  # those of dealt experts lie apart
            beside = [
                sum(size * (place <= one.last) for size, one in zip(shards, kept, strict=True))
                for place in bucket[2:0:-1]
            ]
        elif at_end:
            beside = [sums * done for done in begun]
        else:
            beside = [sums * (done if several and whole else 0 if several else done - 1) for done in begun]
        taken = max(copied + beside[not whole], beside[1]) + (0 if at_end else bucket.waiting * width)
        own = width * sum(bucket.numels) * at_end
        yield Reduction(bucket.layers, float(taken - let_go - own * (not is_large)))
        let_go += own * (not is_large or start <= kept[bucket.numels[1] > 0].rank < stop)


class _Bucket(NamedTuple):
    layers: float
    """That are left when it is reduced."""
    first: int
    """The place of the first of its parameters in the model's order; the last one is before `stop`."""
    stop: int
    numels: tuple[int, int]
    """Elements of dense layers, and of dealt experts."""
    waiting: int = 0
    """Elements of the gradient that does not fit."""


@lru_cache(maxsize=256)
def _buckets(work: Workload, stage: Stage) -> Sequence[_Bucket]:
    """What is reduced together, in the order of backward."""
    every, found = _flattened(work, stage), list[_Bucket]()
    of_layer = Counter[int]()
    for one in every:
        of_layer[one.layer] += one.numel
    left, size = Counter(of_layer), min(largest_bucket(work), sum(of_layer.values()))
    filled, stop = [0, 0], len(every)
    for number in reversed(range(len(every))):
        one = every[number]
        if any(filled) and sum(filled) + one.numel > size:
            layers = max(0.0, min(one.layer + left[one.layer] / of_layer[one.layer], len(stage.layers)))
            found.append(_Bucket(layers, number + 1, stop, (filled[0], filled[1]), one.numel))
            filled, stop = [0, 0], number + 1
        filled[one.is_dealt] += one.numel
        left[one.layer] -= one.numel
    return (*found, _Bucket(0, 0, stop, (filled[0], filled[1])))
