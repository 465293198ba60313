"""Messages and bytes that one rank sends in a step, by group, with the link that carries them; see `collectives`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parcompile.layout.grid import Axis
from parcompile.layout.groups import CP_LEVELS, EMBEDDING, EXPERT_DP, KV_REPLICA
from parcompile.layout.stages import Stage
from parcompile.machines.accelerator import Link

from .blocks import sent_over_cp, window_exchanges
from .collectives import Sent, busiest_stage, collectives, stage_exchanges
from .context_exchanges import ContextExchange, context_exchanges
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
    """Everything that a rank of the busiest stage sends, group by group; groups of one rank are left out.

    Each level of context parallelism is an entry of its own.
    """
    sent = collectives(work, sending_most(work))
    sizes = {
        Axis.TP: work.tp,
        KV_REPLICA: _replicas(work),
        Axis.EP: work.ep,
        "dp-cp": work.shards,
        EXPERT_DP: work.expert_shards,
    }
    found = []
    for group, ranks in sizes.items():
        kinds = {kind: one for (name, kind), one in sent.items() if name == group}
        if kinds:
            stride = _stride(work, group)
            messages = sum(one.messages for one in kinds.values())
            size = sum(one.wire_bytes for one in kinds.values())
            found.append(_group(work, group, _operation(group, kinds), messages, size, ranks, stride))
    attending = max(work.stages, key=lambda stage: _exchanged(work, stage))
    passes = work.shape.attending(attending.layers) * work.micro_batches
    for one in context_exchanges(work.of_stage(attending)):
        stride = work.stride(Axis.CP) * one.stride
        size = passes * one.wire_bytes
        found.append(_group(work, one.group, one.operation, passes * one.messages, size, one.ranks, stride))
    messages, size = max(sent_over_cp(work, stage.layers) for stage in work.stages)
    if messages:
        stride = work.stride(Axis.CP)
        found.append(_group(work, Axis.CP, "states from piece to piece", messages, size, work.cp, stride))
    every = max((window_exchanges(work.of_stage(stage), stage.layers) for stage in work.stages), key=_sizes)
    if every:
        operation, messages = "tokens and keys of windows", sum(one.messages for one in every)
        found.append(_group(work, Axis.CP, operation, messages, _sizes(every), work.cp, work.stride(Axis.CP)))
    if work.pp > 1:
        between = stage_exchanges(work, busiest_stage(work))[Axis.PP, "send"]
        operation, stride = "send to the next stage and the one before", work.stride(Axis.PP)
        found.append(_group(work, Axis.PP, operation, between.messages, between.wire_bytes, 2, stride))
        tied = stage_exchanges(work, 0).get((EMBEDDING, "all-reduce"))
        if tied is not None:
            operation, stride = "all-reduce of the tied embedding's gradient", (work.pp - 1) * stride
            found.append(_group(work, EMBEDDING, operation, tied.messages, tied.wire_bytes, 2, stride))
    return tuple(sorted(found, key=lambda one: _ORDER.index(one.group)))


_ORDER = (Axis.TP, KV_REPLICA, Axis.CP, *CP_LEVELS, Axis.EP, "dp-cp", EXPERT_DP, Axis.PP, EMBEDDING)


def sending_most(work: Workload) -> Stage:
    """The stage whose ranks send most bytes in their groups, without what attention sends over cp."""
    return max(_distinct(work), key=lambda stage: sum(one.wire_bytes for one in collectives(work, stage).values()))


def _distinct(work: Workload) -> list[Stage]:
    """Stages that may send most: of those that recompute the same the longest, the first and the last."""
    stages = work.stages
    words = (work.recompute,) * len(stages) if isinstance(work.recompute, str) else work.recompute
    longest = [
        max((stage for stage, of in zip(stages, words, strict=True) if of == word), key=lambda one: len(one.layers))
        for word in dict.fromkeys(words)
    ]
    return list(dict.fromkeys((stages[0], *longest, stages[-1])))


def _exchanged(work: Workload, stage: Stage) -> float:
    """Bytes that the attention of a stage exchanges for one micro-batch; without cp, how often it attends."""
    sent = _sizes(context_exchanges(work.of_stage(stage)))
    return work.shape.attending(stage.layers) * (sent or 1)


def _sizes(exchanges: Iterable[ContextExchange]) -> float:
    return sum(one.wire_bytes for one in exchanges)


def _replicas(work: Workload) -> int:
    """Ranks that hold the same kv heads."""
    return work.shape.kv_replicas(work.tp)


def _operation(group: str, kinds: Mapping[str, Sent]) -> str:
    if group in ("dp-cp", EXPERT_DP):
        first, *rest = (f"{kind} of {'weights' if kind == 'all-gather' else 'gradients'}" for kind in kinds)
        return " + ".join((first, *rest)) + (" of experts" if group == EXPERT_DP else "")
    if group == KV_REPLICA:
        return "all-reduce of gradients"
    return " + ".join(sorted(kinds))


def _stride(work: Workload, group: str) -> int:
    """Distance in ranks between neighbours of a group."""
    if group in (Axis.EP, EXPERT_DP):
        return work.expert_stride(Axis.EP if group == Axis.EP else Axis.DP)
    if group != "dp-cp":
        return work.stride(Axis.TP)
    return min((work.stride(axis) for axis in (Axis.DP, Axis.CP) if work.size(axis) > 1), default=1)


def _group(
    work: Workload, group: str, operation: str, messages: int, size: float, ranks: int, stride: int
) -> GroupTraffic:
    leaves = work.nodes > 1 and stride * ranks > work.gpus_per_node
    link = work.machine.network_link if leaves else work.machine.node_link
    return GroupTraffic(group, operation, messages, size, link, leaves)
