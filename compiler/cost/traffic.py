"""Messages and bytes that one rank sends in a step, by group, with the link that carries them.

Ring collectives: an all-reduce of n bytes over N ranks moves 2 (N − 1) / N · n per rank, an all-gather or
reduce-scatter half of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from .context import context_exchanges
from .flops import moe_layers
from .hardware import Link
from .workload import Workload


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """What one rank of the busiest stage sends over one kind of group in a step.

    `wire_bytes` carry the ring factor; `messages` counts collective calls (or sends). `leaves_node` says whether
    a group reaches over more than one node.
    """

    group: str
    operation: str
    messages: int
    wire_bytes: float
    link: Link
    leaves_node: bool


def traffic(work: Workload) -> tuple[GroupTraffic, ...]:
    """Everything that a rank sends, the groups in the order tp, cp, ep, dp, pp; groups of one rank are left out.

    Each level of context parallelism is an entry of its own.
    """
    shape, layers = work.shape, max(len(stage.layers) for stage in work.stages)
    activation = work.local_tokens * shape.hidden_size * work.element_bytes
    found = []
    recomputed = 1 if work.recompute == "full" else 0
    if work.tp > 1:
        calls = (4 + 2 * recomputed) * layers * work.micro_batches
        ring = 2 * (work.tp - 1) / work.tp * activation
        split = work.sequence_parallel
        name = "all-gather + reduce-scatter" if split else "all-reduce"
        found.append(_group(work, "tp", name, calls * (2 if split else 1), calls * ring, work.tp))
    passes = layers * work.micro_batches
    for one in context_exchanges(work):
        stride = work.stride("cp") * one.stride
        size = passes * one.wire_bytes
        found.append(_group(work, one.group, one.operation, passes * one.messages, size, one.ranks, stride=stride))
    if work.ep > 1 and shape.moe is not None:
        sparse = min(layers, moe_layers(shape))
        calls = (4 + 2 * recomputed) * sparse * work.micro_batches
        size = activation * shape.moe.num_experts_per_token * (work.ep - 1) / work.ep
        found.append(_group(work, "ep", "all-to-all", calls, calls * size, work.ep, stride=work.tp))
    if work.shards > 1:
        numel = max(work.stage_parameters(stage) for stage in work.stages)
        share = (work.shards - 1) / work.shards
        if work.zero_stage == 0:
            operation, size = "all-reduce of gradients", 2 * work.gradient_bytes * numel * share
        else:
            size = (work.gradient_bytes + work.element_bytes) * numel * share
            operation = "reduce-scatter of gradients + all-gather of weights"
        if work.zero_stage >= 3:
            size += work.element_bytes * numel * share * work.micro_batches
        found.append(_group(work, "dp-cp", operation, 2, size, work.shards, stride=_shard_stride(work)))
    if work.pp > 1:
        sends = 2 * work.micro_batches * work.virtual_stages
        size = activation / (work.tp if work.sequence_parallel else 1)
        found.append(_group(work, "pp", "send to the next and the last stage", sends, sends * size, 2))
    return tuple(found)


def _shard_stride(work: Workload) -> int:
    strides = [work.stride(axis) for axis, size in (("dp", work.dp), ("cp", work.cp)) if size > 1]
    return min(strides)


def _group(
    work: Workload, group: str, operation: str, messages: int, size: float, ranks: int, *, stride: int | None = None
) -> GroupTraffic:
    step = work.stride(group) if stride is None else stride
    leaves = work.nodes > 1 and step * ranks > work.gpus_per_node
    link = work.machine.network_link if leaves else work.machine.node_link
    return GroupTraffic(group, operation, messages, size, link, leaves)
