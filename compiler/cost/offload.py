"""What is on the host: its bytes there, what crosses to it in a step, and the time of both, for a rank.

The optimizer is counted in DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py) as the runtime runs it.
Activations are those that recomputed layers keep, as `runtime/inject/host_activations.py` moves them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from parcompile.layout.groups import Axis
from parcompile.layout.pipeline import Stage
from parcompile.layout.shards import MASTER_BYTES, page_locked_pieces
from parcompile.units import format_bytes

from .held import kept_tensors
from .memory import gathers_anew, untrained_bytes
from .workload import Workload

HOST_BYTES_PER_S = (8e9, 25e9, 50e9)
"""What a rank's threads move through the host's memory: low, likely and high. One thread was seen to reach 40e9; the
last is a rank's share of two sockets among eight (DGX A100: 16 channels of DDR4-3200). No step of this runtime was
measured on a server: the interval is wide for it."""
LINK_SHARE = (0.4, 0.75, 0.9)
"""What copies between host and accelerator reach of their link, from pages that may move to page-locked ones."""


class HostMemory(NamedTuple):
    """Bytes of a rank in its host's memory, beside its process itself, and those that cross the link in a step.

    `weight_bytes` are of shards of weights; `gradient_bytes` of the shard in fp32, at ZeRO stage 3 also their sums;
    `copy_bytes` the shard in the type of the weights, on its way back. `pinned_bytes` of all are page-locked.
    """

    weight_bytes: int
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
        states = self.master_bytes + self.optimizer_bytes + self.gradient_bytes + self.copy_bytes
        return self.weight_bytes + states


class HostActivations(NamedTuple):
    """Bytes of a rank that recomputed layers keep in its host's memory at the peak, and those that cross in a step.

    For GPUs all are page-locked, of which torch takes powers of two for each tensor (CachingHostAllocator).
    """

    total_bytes: int
    to_host_bytes: int
    from_host_bytes: int


def host_activations(work: Workload, stage: Stage | None = None) -> HostActivations | None:
    """Of a rank of `stage`; left out, of the stage that takes most. None: activations stay on the accelerator."""
    if not work.offloads_activations or "full" not in work.recompute_words:
        return None
    found = (_activations(work, one) for one in (work.stages if stage is None else (stage,)))
    return max(found, key=lambda held: held.total_bytes)


@lru_cache(maxsize=256)
def _activations(whole: Workload, stage: Stage) -> HostActivations:
    work, index = whole.of_stage(stage), whole.stages.index(stage)
    if not work.recomputes_layers:
        return HostActivations(0, 0, 0)
    tensors = kept_tensors(work, stage.layers)
    moved = sum(size * count for size, count in tensors) * work.micro_batches
    held = sum(_page_locked(work, size) * count for size, count in tensors) * work.in_flight(index)
    # Without other micro-batches in between, what the last layer keeps is still here.
    back = moved * (1 - 1 / max(1, len(stage.layers))) if work.pp == 1 else moved
    return HostActivations(round(held), round(moved), round(back))


def _page_locked(work: Workload, size: float) -> float:
    """What torch takes for a tensor of so many bytes."""
    if work.machine.name == "cpu":
        return size
    return float(sum(1 << (piece - 1).bit_length() for piece in page_locked_pieces(math.ceil(size))))


@lru_cache(maxsize=256)
def _of_stage(work: Workload, stage: Stage) -> HostMemory:
    groups, width, sums = work.sharded(stage), work.element_bytes, work.gradient_bytes
    shard, passes = groups.shard_numel, 0
    weights = gathered = 0
    if work.weights_on_host:
        weights = shard * width + math.ceil(untrained_bytes(work, stage) / work.shards)
        gathered = weights * work.micro_batches * (2 + gathers_anew(work, stage))
    if not work.on_host:
        pinned = weights if work.pins_weights else 0
        return HostMemory(weights, 0, 0, 0, 0, pinned, to_host_bytes=weights, from_host_bytes=gathered)
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
        weight_bytes=weights,
        master_bytes=master,
        optimizer_bytes=moments,
        gradient_bytes=gradients,
        copy_bytes=copies,
        pinned_bytes=(pinned if work.pins_memory else 0) + (weights if work.pins_weights else 0),
        to_host_bytes=shard * MASTER_BYTES + passes * back,
        from_host_bytes=(gathered if weights else shard * width) + passes * again,
    )


def host_memory(work: Workload, stage: Stage | None = None) -> HostMemory | None:
    """Of a rank of `stage`; left out, of the stage that takes most. None: optimizer and weights are elsewhere.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    if not (work.on_host or work.weights_on_host):
        return None
    return max((_of_stage(work, one) for one in (work.stages if stage is None else (stage,))), key=_total)


def node_bytes(work: Workload) -> int:
    """What the ranks of one node take of their host together, of the node that takes most.

    Raises:
        SplitError: a tensor cannot be cut over tp.
    """
    if not (work.on_host or work.weights_on_host or work.offloads_activations):
        return 0
    stride, per_node = work.stride(Axis.PP), work.gpus_per_node
    each = ((host_memory(work, one), host_activations(work, one)) for one in work.stages)
    totals = [sum(held.total_bytes for held in both if held is not None) for both in each]
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
    held, kept, said = host_memory(work), host_activations(work), []
    if held is not None:
        pinned = f", {format_bytes(held.pinned_bytes, held.total_bytes)} of it page-locked" if held.pinned_bytes else ""
        parts = ["weights"] * work.weights_on_host + ["master weights, optimizer state, gradients"] * work.on_host
        said.append(f"{format_bytes(held.total_bytes)} of each rank{pinned}: {', '.join(parts)}")
    if kept is not None:
        said.append(f"{format_bytes(kept.total_bytes)} of each rank, page-locked: what recomputed layers keep")
    every = [one for one in (held, kept) if one is not None]
    if not every:
        return None
    sent, back = (sum(one.to_host_bytes for one in every), sum(one.from_host_bytes for one in every))
    said += [f"{format_bytes(node_bytes(work))} on a node"]
    return f"{'; '.join(said)}; {format_bytes(sent)} to the host and {format_bytes(back)} back in a step"


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


def copy_seconds(work: Workload, layer_seconds: float) -> tuple[float, float, float]:
    """Low, likely and high seconds that a recomputed layer of a micro-batch waits for copies of what it keeps.

    A quarter of its work is its forward pass, which hides the copies to the host; the rest hides those back.
    """
    layers, link = range(work.shape.num_hidden_layers), work.machine.host_link.bytes_per_s
    size = sum(size * count for size, count in kept_tensors(work, layers)) / len(layers)

    def exposed(share: float) -> float:
        copies = size / (link * share)
        return max(0.0, copies - layer_seconds / 4) + max(0.0, copies - layer_seconds * 3 / 4)

    low, likely, high = map(exposed, reversed(LINK_SHARE))
    return low, likely, high


def _total(held: HostMemory) -> int:
    return held.total_bytes
