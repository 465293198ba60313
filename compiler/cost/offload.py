"""The optimizer on the host: its bytes there, what crosses to it in a step, and the time of both.

Counted in DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py) as the runtime runs it, for a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parcompile.layout.groups import Axis
from parcompile.layout.pipeline import Stage
from parcompile.layout.shards import MASTER_BYTES
from parcompile.units import format_bytes

from .workload import Workload

HOST_BYTES_PER_S = (8e9, 25e9, 50e9)
"""What a rank's threads move through the host's memory: low, likely and high. One thread was seen to reach 40e9; the
last is a rank's share of two sockets among eight (DGX A100: 16 channels of DDR4-3200). No step of this runtime was
measured on a server: the interval is wide for it."""
LINK_SHARE = (0.4, 0.75, 0.9)
"""What copies between host and accelerator reach of their link, from pages that may move to page-locked ones."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of a rank in its host's memory, beside its process itself, and those that cross the link in a step.

    `gradient_bytes` are of the shard in fp32, at ZeRO stage 3 also their sums; `copy_bytes` the shard in the type of
    the weights, on its way back. `pinned_bytes` of all are page-locked.
    """

    master_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    copy_bytes: int
    pinned_bytes: int
    to_host_bytes: int
    from_host_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it, for the whole run."""
        return self.master_bytes + self.optimizer_bytes + self.gradient_bytes + self.copy_bytes


@lru_cache(maxsize=256)
def _of_stage(work: Workload, stage: Stage) -> HostMemory:
    groups, width, sums = work.sharded(stage), work.element_bytes, work.gradient_bytes
    shard, passes = groups.shard_numel, 0
    master, moments, gradients = shard * MASTER_BYTES, shard * work.state_bytes, shard * MASTER_BYTES
    if work.shards_weights:
        # Sums lie beside, and are added up on the accelerator, to which they go and from which they come.
        pinned, copies, passes = gradients + shard * sums, 0, work.micro_batches
        gradients, back, again = pinned, shard * sums, shard * sums
    else:
        copies, back, again = shard * width, shard * MASTER_BYTES, shard * width
        pinned = master + gradients + copies
        if work.zero_stage == 2 and sums == width:
            passes = work.micro_batches - 1
    return HostMemory(
        master_bytes=master,
        optimizer_bytes=moments,
        gradient_bytes=gradients,
        copy_bytes=copies,
        pinned_bytes=pinned if work.pins_memory else 0,
        to_host_bytes=shard * MASTER_BYTES + passes * back,
        from_host_bytes=shard * width + passes * again,
    )


def host_memory(work: Workload, stage: Stage | None = None) -> HostMemory | None:
    """Of a rank of `stage`; left out, of the stage that takes most. None: the optimizer is on the accelerator.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    if not work.on_host:
        return None
    return max((_of_stage(work, one) for one in (work.stages if stage is None else (stage,))), key=_total)


def node_bytes(work: Workload) -> int:
    """What the ranks of one node take of their host together, of the node that takes most.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    if not work.on_host:
        return 0
    stride, per_node = work.stride(Axis.PP), work.gpus_per_node
    totals = [_of_stage(work, one).total_bytes for one in work.stages]
    # Behind so many nodes the stages come again in the same order.
    nodes = range(min(work.nodes, stride * work.pp // per_node + 1))
    return max(
        sum(totals[rank // stride % work.pp] for rank in range(one * per_node, (one + 1) * per_node)) for one in nodes
    )


def host_text(work: Workload) -> str | None:
    """What the host holds and what crosses to it, in words; None without offload.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    held = host_memory(work)
    if held is None:
        return None
    node, sent, back = (format_bytes(one) for one in (node_bytes(work), held.to_host_bytes, held.from_host_bytes))
    pinned = f", {format_bytes(held.pinned_bytes, held.total_bytes)} of it page-locked" if held.pinned_bytes else ""
    return (
        f"{format_bytes(held.total_bytes)} of each rank{pinned}: master weights, optimizer state, gradients; "
        f"{node} on a node; {sent} to the host and {back} back in a step"
    )


def host_seconds(work: Workload) -> tuple[float, float, float] | None:
    """Low, likely and high seconds that a step waits for copies and for the optimizer on the host; None without."""
    held = host_memory(work)
    if held is None:
        return None
    link = work.machine.host_link.bytes_per_s
    # A fused step reads the weight, the gradient and the state of each element, and writes all but the gradient.
    moved = held.master_bytes // MASTER_BYTES * (3 * MASTER_BYTES + 2 * work.state_bytes)

    def seconds(share: float, rate: float) -> float:
        return (held.to_host_bytes + held.from_host_bytes) / (link * share) + moved / rate

    low, likely, high = (seconds(*one) for one in zip(reversed(LINK_SHARE), reversed(HOST_BYTES_PER_S), strict=True))
    return low, likely, high


def _total(held: HostMemory) -> int:
    return held.total_bytes
