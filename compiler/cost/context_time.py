"""The seconds that each implementation of context parallelism costs beyond balanced attention, and which to choose.

A ring hides its exchanges behind the attention of all steps but the last, an all-gather behind all groups of heads but
one, an exchange of heads for tokens behind nothing. What is merged, repeated or put in order is read and written at the
memory's rate. All figures are those of one rank, one layer and one micro-batch, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from parcompile.layout.groups import Axis
from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout, heads_fault, level_sizes
from parcompile.model.layer_parts import ATTENTION

from .blocks import handed_bytes, window_exchanges
from .coefficients import time_values
from .context_exchanges import (
    SUM_BYTES,
    AttentionSizes,
    ContextExchange,
    Heads,
    exchanges,
    heads_of_rank,
    hops_of,
    passes_of,
    runs_on_gpu,
    sizes_of,
)
from .flops import attention_flops_per_token
from .workload import Workload

MESSAGE_SECONDS = {"cpu": 1.5e-4}
"""Shortest time of one message, by accelerator: gloo between two processes, measured."""
GPU_MESSAGE_SECONDS = 2e-5
"""The same on GPUs: the order of magnitude of one NCCL call, not measured here."""
EQUAL = 1.02
"""Implementations whose attention takes so little longer than the fastest count as equally fast."""


class ContextCost(NamedTuple):
    """Seconds of one implementation beyond attention that is perfectly balanced and sends nothing."""

    context: ContextParallel
    wire_bytes: float
    exposed: float
    copies: float
    imbalance: float
    hidden: float
    """Seconds of exchanges that run behind attention: no part of the cost."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.exposed + self.copies + self.imbalance


def context_cost(work: Workload, context: ContextParallel, values: Mapping[str, float]) -> ContextCost:
    """What one implementation costs on a layout; `values` are the fitted coefficients of time.

    Of layers of different shapes the mean: each exchange hides behind the attention of its own layer.
    """
    if work.shape.kinds:
        kinds = [(len(layers), replace(work, shape=one)) for layers, one in work.shape.by_kind]
        return _mean([(count, context_cost(one, context, values)) for count, one in kinds])
    if not work.shape.attends:
        return ContextCost(context, 0.0, 0.0, 0.0, 0.0, 0.0)
    sizes = sizes_of(work)
    sent = exchanges(
        sizes,
        context,
        on_gpu=runs_on_gpu(work),
        recomputed=work.recomputes(ATTENTION),
        hops=hops_of(work, context),
    )
    attention = attention_seconds(work, values)
    balance = float(context.balance(CpLayout(work.cp_layout)))
    exposed = behind = 0.0
    for one in sent:
        seconds = _seconds(work, one, values)
        if one.neighbours:
            # The exchanges of an inner and of an outer ring take turns: each hides behind its share of the steps.
            hops = sum(other.messages for other in sent if other.neighbours)
            hidden = attention * (1 - 1 / context.ring_ranks) * one.messages / hops
        elif context.implementation is CpImplementation.ALL_GATHER:
            passes = passes_of(sizes, context, on_gpu=runs_on_gpu(work))
            hidden = min(attention, seconds) * (1 - 1 / passes)
        else:
            hidden = 0.0
        exposed += max(0.0, seconds - hidden)
        behind += min(seconds, hidden)
    return ContextCost(
        context,
        sum(one.wire_bytes for one in sent),
        exposed,
        _copied_bytes(sizes, context) / work.machine.memory_bytes_per_s,
        attention * (1 / balance - 1),
        behind,
    )


def _mean(found: Sequence[tuple[int, ContextCost]]) -> ContextCost:
    """The mean of the costs of kinds of layers, by how many layers are of each."""
    layers = sum(count for count, _ in found)

    def of(value: Callable[[ContextCost], float]) -> float:
        return sum(count * value(cost) for count, cost in found) / layers

    return ContextCost(
        found[0][1].context,
        wire_bytes=of(lambda cost: cost.wire_bytes),
        exposed=of(lambda cost: cost.exposed),
        copies=of(lambda cost: cost.copies),
        imbalance=of(lambda cost: cost.imbalance),
        hidden=of(lambda cost: cost.hidden),
    )


def attention_seconds(work: Workload, values: Mapping[str, float]) -> float:
    """Forward and backward of one layer's attention of a micro-batch, dealt evenly."""
    flops = 3 * attention_flops_per_token(work.shape, work.attended_length) * work.local_tokens
    return flops / work.tp / work.machine.matmul_flops_per_s(work.element_bytes) / values["attention"]


def state_seconds(work: Workload, values: Mapping[str, float]) -> float:
    """A state's way through all pieces of a sequence and back, in a layer: the mean. Halos travel at once."""
    pieces = 2 if work.cp_layout == "zigzag" else 1
    # The two pieces in the middle of a zigzag are on one rank.
    way, seconds = 2 * pieces * (work.cp - 1), 0.0
    for one in work.shape.parts if work.cp > 1 else ():
        state, halo = handed_bytes(work, one)
        if one.states:
            count = way + (2 if halo else 0)
            chain = ContextExchange(Axis.CP, "chain", work.cp, 1, count, way * state + 2 * halo, neighbours=True)
            seconds += one.share(work.shape.num_hidden_layers) * _seconds(work, chain, values)
    return seconds


def window_seconds(work: Workload, values: Mapping[str, float]) -> float:
    """Tokens of windows, and the keys that stand for them, in a layer and micro-batch: the mean. Nothing hides them."""
    layers = work.shape.num_hidden_layers
    found = window_exchanges(work, range(layers))
    return sum(_seconds(work, one, values) for one in found) / layers / work.micro_batches


def _seconds(work: Workload, one: ContextExchange, values: Mapping[str, float]) -> float:
    machine = work.machine
    inside = machine.node_link.bytes_per_s * values["node_link"]
    port = machine.network_link.bytes_per_s * values["network_link"]
    stride = work.stride(Axis.CP) * one.stride
    near = max(1, min(one.ranks, work.gpus_per_node // stride))
    link = machine.node_link if near == one.ranks else machine.network_link
    latency = one.messages * (link.latency_seconds or MESSAGE_SECONDS.get(work.accelerator, GPU_MESSAGE_SECONDS))
    if work.nodes == 1 or near == one.ranks:
        return latency + one.wire_bytes / inside
    if one.neighbours:
        # All wait for the message that crosses to the next node, which goes through one rank's port.
        return latency + one.wire_bytes / min(inside, port)
    crossing = (one.ranks - near) / (one.ranks - 1)
    return latency + one.wire_bytes * max(crossing / port, (1 - crossing) / inside)


def _copied_bytes(sizes: AttentionSizes, context: ContextParallel) -> float:
    """Bytes that are read and written beside the kernels: merging blocks, packing messages, putting tokens in order."""
    if context.cp == 1:
        return 0.0
    swapped, later = context.head_ranks, context.ring_ranks - 1
    keys = sizes.kv_bytes(max(sizes.kv_heads, swapped))
    sums = keys * SUM_BYTES / sizes.element_bytes
    total = 0.0
    if swapped > 1:
        # Cut, joined and put in order, each read and written, there and back.
        total += 2 * 3 * 2 * (sizes.q_bytes + keys)
    if context.implementation is CpImplementation.ALL_GATHER:
        total += 2 * 2 * (later + 1) * keys + 2 * 2 * later * sums
    elif later:
        # A block's output is read and the fp32 sum read and written; so are gradients of queries, and keys' in turn.
        total += later * 2 * sizes.output_numel * (sizes.element_bytes + 2 * SUM_BYTES) + later * 4 * sums
    return total


Refused = tuple[CpImplementation, tuple[int, int] | None, str]
"""An implementation that is not possible, with its sizes, and why."""


def candidates(work: Workload) -> tuple[list[ContextParallel], list[Refused]]:
    """Every implementation that the layout allows, with all sizes of its levels; and why the others are refused."""
    heads = heads_of_rank(work.shape, work.tp)
    found: list[ContextParallel] = []
    refused: list[Refused] = []
    for kind in CpImplementation:
        levels: list[tuple[int, int] | None] = [*level_sizes(work.cp)] if kind.has_levels else [None]
        if not levels:
            refused.append((kind, None, f"cp {work.cp} has no two factors above 1"))
        for level in levels:
            one = ContextParallel(kind, work.cp, level)
            fault = context_fault(one, heads, CpLayout(work.cp_layout), windows=bool(work.shape.window_rates))
            if fault is None:
                found.append(one)
            else:
                refused.append((kind, level, fault))
    return found, refused


def context_fault(context: ContextParallel, heads: Heads, layout: CpLayout, *, windows: bool = False) -> str | None:
    """Why an implementation cannot run with these heads and this layout; None when it can.

    `windows`: keys stand for windows of tokens.
    """
    if windows and context.head_ranks > 1:
        return f"{context.implementation.value} cannot exchange tokens whose queries see keys of windows"
    if context.implementation is CpImplementation.USP and layout is CpLayout.STRIPED:
        return "usp cannot run striped chunks"
    return exchange_fault(heads, context.head_ranks) if context.head_ranks > 1 else None


def exchange_fault(heads: Heads, ranks: int) -> str | None:
    """Why so many ranks cannot exchange the heads of some kind of layer for tokens; None when they can."""
    return next((fault for one in heads if (fault := heads_fault(*one, ranks)) is not None), None)


def costs(work: Workload, among: list[ContextParallel], values: Mapping[str, float] | None = None) -> list[ContextCost]:
    """The costs of some implementations, the fastest first; of equal ones the one that fills a node best.

    `values` are coefficients of time to use instead of those of the package. Where stages recompute different things,
    those of a stage that recomputes most.
    """

    def place(one: ContextCost) -> tuple[float, bool, int]:
        inner = (one.context.sizes or (1, 1))[0]
        return one.seconds, inner * work.stride(Axis.CP) > work.gpus_per_node, -inner

    used = time_values(work) if values is None else values
    found = (context_cost(work.most_recomputed, one, used) for one in among)
    return sorted(found, key=place)


def cheapest(work: Workload, among: list[ContextParallel]) -> ContextCost:
    """What to choose of some implementations."""
    return simplest(costs(work, among), attention_seconds(work, time_values(work)))


def simplest(ranked: list[ContextCost], attention: float) -> ContextCost:
    """Of those whose attention takes at most `EQUAL` times the shortest, the simplest; `ranked` as `costs` gives them.

    The order of `CpImplementation` is that of simplicity and of memory.
    """
    close = [one for one in ranked if attention + one.seconds <= EQUAL * (attention + ranked[0].seconds)]
    order = list(CpImplementation)
    return min(close, key=lambda one: (order.index(one.context.implementation), close.index(one)))


def choices(work: Workload) -> list[dict[str, Any]]:
    """Every implementation as the plan lists it: those that are possible by their seconds, then the others."""
    if work.cp == 1 or not work.shape.attends:
        return []
    possible, refused = candidates(work)
    return [
        {
            "name": one.context.implementation.value,
            "sizes": one.context.sizes,
            "wire_bytes": round(one.wire_bytes),
            "seconds": float(f"{one.seconds:.4g}"),
            "refused": None,
        }
        for one in costs(work, possible)
    ] + [
        {"name": one.value, "sizes": sizes, "wire_bytes": None, "seconds": None, "refused": why}
        for one, sizes, why in refused
    ]
