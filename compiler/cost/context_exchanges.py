"""What each implementation of context parallelism sends: one rank, one layer and one micro-batch, both passes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from parcompile.layout.groups import CP_LEVELS, Axis
from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout, chunk_ids, heads_per_pass
from parcompile.model.families import FAMILIES
from parcompile.model.key_types import fields_of
from parcompile.model.layer_parts import ATTENTION
from parcompile.model.shape import ModelShape

from .workload import Workload

SUM_BYTES = 4
"""Outputs and gradients of blocks are summed in fp32."""

Heads = tuple[tuple[int, int], ...]
"""Query and key/value heads of a tensor-parallel rank, for each kind of layer that attends."""


class AttentionSizes(NamedTuple):
    """Attention of one layer and micro-batch on a rank, before ranks exchange anything."""

    tokens: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    element_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, tp: int, tokens: int, element_bytes: int) -> AttentionSizes:
        """Those of a tensor-parallel rank with `tokens` tokens of a micro-batch."""
        key_dim, value_dim = shape.head_dim, shape.value_dim
        if shape.attention.projections is not None:
            key_dim, value_dim = shape.attention.projections.key_dim, shape.attention.projections.value_dim
        heads, kv_heads = max(1, shape.num_attention_heads // tp), max(1, shape.num_key_value_heads // tp)
        return cls(tokens, heads, kv_heads, key_dim, value_dim, element_bytes)

    def kv_bytes(self, kv_heads: int) -> int:
        """Keys and values of so many heads."""
        return self.tokens * kv_heads * (self.key_dim + self.value_dim) * self.element_bytes

    @property
    def q_bytes(self) -> int:
        """Queries and outputs."""
        return self.tokens * self.heads * (self.key_dim + self.value_dim) * self.element_bytes

    @property
    def output_numel(self) -> int:
        """Elements of the output."""
        return self.tokens * self.heads * self.value_dim


def heads_of_rank(shape: ModelShape, tp: int) -> Heads:
    """Those of a model."""
    found = (AttentionSizes.of(one, tp, 1, 1) for _, one in shape.by_kind)
    return tuple(dict.fromkeys((one.heads, one.kv_heads) for one in found))


class ContextExchange(NamedTuple):
    """What a rank sends within groups of `ranks` ranks that lie `stride` places of the cp group apart.

    `group` is "cp", or of an implementation with two levels "cp-inner" or "cp-outer".
    `neighbours`: from one to the next, so that one link of a group carries all of it; else straight to every rank.
    """

    group: str
    operation: str
    ranks: int
    stride: int
    messages: int
    wire_bytes: float
    neighbours: bool


def exchanges(
    sizes: AttentionSizes,
    context: ContextParallel,
    *,
    on_gpu: bool,
    recomputed: bool = False,
    trained: bool = True,
    hops: int | None = None,
) -> tuple[ContextExchange, ...]:
    """All messages of one implementation, the inner level first; nothing for one rank.

    Keys travel in forward and in backward, there with their gradients in fp32. `recomputed`: activations are
    recomputed in backward; the runtime keeps what attention computed, but exchanges heads once more. What is not
    `trained` runs forward only. `hops`: those of a ring or an all-gather, where a window leaves some out.
    """
    found: list[ContextExchange] = []
    swapped, places, inner = context.head_ranks, context.ring_ranks, context.inner_ranks
    kv_heads = max(sizes.kv_heads, swapped)
    inner_group, outer_group = CP_LEVELS if context.sizes else (Axis.CP, Axis.CP)
    if swapped > 1:
        one_way = (sizes.q_bytes + sizes.kv_bytes(kv_heads)) * (swapped - 1) / swapped
        rounds = (3 if recomputed else 2) if trained else 1
        name = "all-to-all of heads for tokens"
        found.append(ContextExchange(inner_group, name, swapped, 1, 4 * rounds, rounds * one_way, neighbours=False))
    if places == 1:
        return tuple(found)
    bytes_per_hop = sizes.kv_bytes(kv_heads) * (2 + SUM_BYTES / sizes.element_bytes if trained else 1)
    messages_per_hop = (3 if trained else 1) * passes_of(sizes, context, on_gpu=on_gpu)

    def travel(group: str, operation: str, ranks: int, stride: int, hops: int) -> ContextExchange:
        messages, around = hops * messages_per_hop, context.implementation is not CpImplementation.ALL_GATHER
        return ContextExchange(group, operation, ranks, stride, messages, hops * bytes_per_hop, neighbours=around)

    needed = places - 1 if hops is None else hops
    if context.implementation is CpImplementation.ALL_GATHER:
        found.append(travel(Axis.CP, "all-gather of keys and values", places, 1, needed))
    elif context.implementation is CpImplementation.DOUBLE_RING:
        outer = places // inner
        found.append(travel(inner_group, "inner ring of keys and values", inner, 1, outer * (inner - 1)))
        found.append(travel(outer_group, "outer ring of keys and values", outer, inner, outer - 1))
    else:
        found.append(travel(outer_group, "ring of keys and values", places, swapped, needed))
    return tuple(one for one in found if one.messages)


def hops_of(work: Workload, context: ContextParallel) -> int:
    """How often keys of layers of one kind move on, or how many ranks' are gathered: as far as a window reaches.

    All the way where only some of these layers may have the window, and in a double ring.
    """
    shape, places = work.shape, context.ring_ranks
    window = shape.attention.sliding_window
    if window is None or window >= work.sequence_length or _mixes_windows(shape.model_type):
        return places - 1
    # A window of the token itself leaves no hop. One is counted: every kind of layers has the same messages.
    return windowed_hops(CpLayout(work.cp_layout), places, work.sequence_length, max(window, 2))


def _mixes_windows(model_type: str) -> bool:
    """Whether layers of one shape may differ in whether they have the window."""
    return FAMILIES[model_type].layer_shapes is None and "layer_types" in fields_of(model_type)


@functools.lru_cache(maxsize=256)
def windowed_hops(layout: CpLayout, places: int, length: int, window: int) -> int:
    """How often keys move on in a ring of so many places: steps in which any query sees any key, but the first one."""
    if layout is CpLayout.STRIPED:
        return min(places, window) - 1
    pieces = layout.chunks_per_rank * places
    reach = min(pieces - 1, -(-(window - 1) * pieces // length))
    if reach >= places:
        return places - 1
    holders = {piece: place for place in range(places) for piece in chunk_ids(layout, places, place)}
    steps = {
        (holders[piece] - holders[piece - back]) % places
        for back in range(1, reach + 1)
        for piece in range(back, pieces)
    }
    return len(steps - {0})


def passes_of(sizes: AttentionSizes, context: ContextParallel, *, on_gpu: bool) -> int:
    """Groups of key/value heads that travel one after the other."""
    swapped = context.head_ranks
    kv_heads, heads = max(sizes.kv_heads, swapped) // swapped, sizes.heads // swapped
    tokens = sizes.tokens * swapped
    per_head = tokens * (sizes.key_dim + sizes.value_dim) * sizes.element_bytes
    at_once = heads_per_pass(kv_heads, per_head, tokens * max(1, heads // kv_heads), fills_device=on_gpu)
    return kv_heads // at_once


def context_exchanges(work: Workload, *, trained: bool = True) -> tuple[ContextExchange, ...]:
    """The messages of one layer and micro-batch of a layout; of layers of different shapes the mean."""

    def of_kind(shape: ModelShape) -> tuple[ContextExchange, ...]:
        return exchanges(
            _sizes(shape, work),
            work.context,
            on_gpu=runs_on_gpu(work),
            recomputed=work.recomputes(ATTENTION),
            trained=trained,
            hops=hops_of(replace(work, shape=shape), work.context),
        )

    kinds = [(len(layers), of_kind(one)) for layers, one in work.shape.by_kind]
    if len(kinds) == 1:
        return kinds[0][1]
    counts = [count for count, _ in kinds]

    def mean(values: Iterable[float]) -> float:
        return sum(count * value for count, value in zip(counts, values, strict=True)) / sum(counts)

    return tuple(
        same[0]._replace(
            messages=round(mean(one.messages for one in same)), wire_bytes=mean(one.wire_bytes for one in same)
        )
        for same in zip(*(found for _, found in kinds), strict=True)
    )


def _sizes(shape: ModelShape, work: Workload) -> AttentionSizes:
    return AttentionSizes.of(shape, work.tp, work.local_tokens, work.element_bytes)


def sizes_of(work: Workload) -> AttentionSizes:
    """Attention of a rank of a layout."""
    return _sizes(work.shape, work)


def runs_on_gpu(work: Workload) -> bool:
    """Whether kernels are launched on a GPU, which they should fill."""
    return work.accelerator != "cpu"
