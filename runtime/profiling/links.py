"""Rate and latency of the links between ranks: each collective by size, in a node and between nodes.

Rates of one rank on its own device: matrix products, fused attention, memory, and how fast kernels are launched.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from parcompile.runtime.transport import start_all_gather, start_all_reduce, start_reduce_scatter

NODE, NETWORK = "node", "network"
CPU_BYTES = (2**10, 2**15, 2**20, 2**24)
DEVICE_BYTES = (2**10, 2**15, 2**20, 2**24, 2**28)
PAIR_BYTES = 2**22
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "ring exchange")
MOST_CALLS = 200


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One collective over one class of links. `wire_bytes` are what each rank sends of a message of `size` bytes."""

    link: str
    collective: str
    ranks: int
    size: int
    wire_bytes: float
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """What a rank puts on the wire."""
        return self.wire_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class PairRate:
    """What two ranks sent each other at a time, each way, over a class of links."""

    link: str
    rank: int
    peer: int
    bytes_per_s: float


def link_classes(nodes: Sequence[str]) -> dict[str, list[list[int]]]:
    """The groups over which each class of links is measured; `nodes` names that of each rank.

    In a node: its ranks. Between nodes: the ranks of the same place on every node, all places at once, as a training
    run uses them. A class of groups of one rank is left out.

    Raises:
        ValueError: the nodes have different numbers of ranks.
    """
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    counts = {node: len(ranks) for node, ranks in members.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"nodes have different numbers of ranks: {counts}; start as many on each")
    found = {NODE: list(members.values()), NETWORK: [list(ranks) for ranks in zip(*members.values(), strict=True)]}
    return {name: groups for name, groups in found.items() if len(groups[0]) > 1}


def link_rates(device: torch.device, nodes: Sequence[str], seconds: float) -> list[LinkRate]:
    """Every collective of every class of links, in about that many seconds, as the slowest rank saw it.

    All ranks call it together.
    """
    found = own_link_rates(device, nodes, seconds)
    slowest = torch.tensor([one.seconds for one in found], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [replace(one, seconds=float(most)) for one, most in zip(found, slowest, strict=True)]


def own_link_rates(
    device: torch.device, nodes: Sequence[str], seconds: float, collectives: Collection[str] = COLLECTIVES
) -> list[LinkRate]:
    """These collectives as this rank sees them in its own group of each class; the same list on every rank.

    All ranks call it together.
    """
    classes = link_classes(nodes)
    sizes = CPU_BYTES if device.type == "cpu" else DEVICE_BYTES
    share = seconds / max(1, len(classes) * len(collectives) * len(sizes))
    found = []
    for name, groups in classes.items():
        with _own_group(groups) as mine:
            count = dist.get_world_size(mine)
            for size in sizes:
                for collective, (call, factor) in _collectives(device, size, mine).items():
                    if collective in collectives:
                        once = _seconds(call, device, share)
                        found.append(LinkRate(name, collective, count, size, factor * size, once))
    return found


def pair_rates(device: torch.device, nodes: Sequence[str], seconds: float) -> list[PairRate]:
    """Neighbours in a node, and the same places of neighbouring nodes: both send at a time, pair by pair.

    A rank is in one pair at a time; three rounds reach every pair around a ring. Returns those pairs in which this rank
    comes first. All ranks call it together.
    """
    rank, classes = dist.get_rank(), link_classes(nodes)
    message = torch.zeros(PAIR_BYTES // 4, device=device)
    received, found = torch.empty_like(message), []
    for name, groups in classes.items():
        with _own_group(groups) as mine:
            # NCCL opens a group's connections with its first collective, in which all have to take part.
            dist.all_reduce(message, group=mine)
            ring = dist.get_process_group_ranks(mine)
            for pairs in rounds(ring):
                peer = next((other for pair in pairs if rank in pair for other in pair if other != rank), None)

                def exchange(peer: int | None = peer, mine: dist.ProcessGroup = mine) -> None:
                    if peer is not None:
                        _send_and_receive(message, peer, received, peer, mine)

                once = _seconds(exchange, device, seconds / 3 / len(classes))
                if peer is not None and (rank, peer) in pairs:
                    found.append(PairRate(name, rank, peer, message.nbytes / once))
    return found


def rounds(ring: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours around a ring, in rounds in which each is in one pair at most; three rounds always."""
    count = len(ring)
    pairs = [(ring[index], ring[(index + 1) % count]) for index in range(count if count > 2 else count - 1)]
    last = [pairs.pop()] if len(pairs) > 1 and len(pairs) % 2 else []
    return [pairs[0::2], pairs[1::2], last]


@contextlib.contextmanager
def _own_group(groups: Sequence[list[int]]) -> Iterator[dist.ProcessGroup]:
    """This rank's group of those, for a while."""
    mine: dist.ProcessGroup | None = None
    for ranks in groups:
        created = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = created
    assert mine is not None
    try:
        yield mine
    finally:
        dist.destroy_process_group(mine)


def _collectives(
    device: torch.device, size: int, group: dist.ProcessGroup
) -> dict[str, tuple[Callable[[], object], float]]:
    """Calls on messages of `size` bytes, each with the share of them that a rank sends."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(max(1, size // 4 // ranks) * ranks, device=device)
    part, received = whole[: whole.numel() // ranks].clone(), torch.empty_like(whole)
    around = (ranks - 1) / ranks

    members = dist.get_process_group_ranks(group)
    behind, ahead = members[(rank - 1) % ranks], members[(rank + 1) % ranks]
    return {
        "all-reduce": (lambda: start_all_reduce(whole, group).wait(), 2 * around),
        "all-gather": (lambda: start_all_gather(part, group).wait(0), around),
        "reduce-scatter": (lambda: start_reduce_scatter(whole, 0, group).wait(), around),
        "ring exchange": (lambda: _send_and_receive(whole, ahead, received, behind, group), 1.0),
    }


def _send_and_receive(sent: Tensor, to: int, received: Tensor, source: int, group: dist.ProcessGroup) -> None:
    sends = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()


def _seconds(call: Callable[[], object], device: torch.device, share: float) -> float:
    """This rank's mean over calls: as many as fit into `share`, the same number on every rank."""
    call()
    calls = int(min(MOST_CALLS, max(2.0, share / _slowest(_timed(call, device, 1), device))))
    return _timed(call, device, calls)


def _timed(call: Callable[[], object], device: torch.device, calls: int) -> float:
    synchronize(device)
    dist.barrier()
    return max(_batch(call, device, calls), 1e-9)


def _slowest(seconds: float, device: torch.device) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192)
FEWEST_SIZES = 2
BATCH_SECONDS = 0.005
"""Calls are timed in batches at least this long: below it the clock and the wait for the device show."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One measurement: what ran, in which type, of which size (rows or bytes), and what it reached each second."""

    what: str
    dtype: str
    size: int
    seconds: float
    per_second: float


def compute_rates(device: torch.device, seconds: float) -> list[Rate]:
    """Everything that one rank measures by itself, in about that many seconds.

    Raises:
        RuntimeError: the device is too small or too slow for what is measured.
    """
    share = seconds / 6
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        found += matmul_rates(device, dtype, 2 * share)
    found.append(memory_rate(device, share / 2))
    found.append(attention_rate(device, share))
    found.append(layer_rate(device, share / 2))
    return found


def matmul_rates(device: torch.device, dtype: torch.dtype, seconds: float) -> list[Rate]:
    """Square products [n, n] · [n, n] by size, 2 n³ operations each; sizes end where one would take too long."""
    found: list[Rate] = []
    share = seconds / len(MATMUL_SIZES)
    for size in MATMUL_SIZES:
        if len(found) >= FEWEST_SIZES and 8 * found[-1].seconds > share:
            break
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        once = seconds_of_a_call(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, share)  # type: ignore[misc]
        found.append(Rate("matmul", _name(dtype), size, once, 2 * size**3 / once))
    return found


def memory_rate(device: torch.device, seconds: float) -> Rate:
    """Sum of two arrays far larger than a cache: two are read, one is written."""
    elements = (256 if device.type != "cpu" else 32) * 2**20
    a, b = (torch.ones(elements, device=device) for _ in range(2))
    out = torch.empty_like(a)
    once = seconds_of_a_call(lambda: torch.add(a, b, out=out), device, seconds)
    return Rate("memory", "fp32", 3 * a.nbytes, once, 3 * a.nbytes / once)


def attention_rate(device: torch.device, seconds: float) -> Rate:
    """Causal attention, forward and backward; as `cost.flops` counts it, where the mask halves the keys."""
    heads, length, width = (16, 4096, 128) if device.type != "cpu" else (4, 512, 128)
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    q, k, v = (torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, heads, length, width, device=device, dtype=dtype)

    def step() -> None:
        torch.autograd.backward(F.scaled_dot_product_attention(q, k, v, is_causal=True), gradient)

    once = seconds_of_a_call(step, device, seconds)
    return Rate("attention", _name(dtype), length, once, 3 * 2 * heads * width * length**2 / once)


def layer_rate(device: torch.device, seconds: float) -> Rate:
    """A decoder layer of almost no work, forward and backward: what is left is the time to launch its kernels."""
    width, tokens = 16, 8
    weights = [torch.randn(width, width, device=device, requires_grad=True) for _ in range(7)]
    scales = [torch.ones(width, device=device, requires_grad=True) for _ in range(2)]
    x, turn = torch.randn(1, tokens, width, device=device), torch.randn(tokens, width, device=device)

    def rotated(t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim=-1)
        return (t * turn + torch.cat((-second, first), dim=-1) * turn).unsqueeze(1)

    def layer() -> None:
        query, key, value, out, gate, up, down = weights
        normed = F.rms_norm(x, (width,), scales[0])
        mixed = F.scaled_dot_product_attention(
            rotated(normed @ query), rotated(normed @ key), (normed @ value).unsqueeze(1), is_causal=True
        )
        stream = x + mixed.squeeze(1) @ out
        normed = F.rms_norm(stream, (width,), scales[1])
        torch.autograd.backward((stream + (F.silu(normed @ gate) * (normed @ up)) @ down).sum())

    once = seconds_of_a_call(layer, device, seconds)
    return Rate("layer launch", "fp32", tokens, once, 1 / once)


def seconds_of_a_call(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median over batches of calls, after two that warm up; about `seconds` are spent."""
    call()
    once = max(_batch(call, device, 1), 1e-9)
    calls = max(1, int(BATCH_SECONDS / once))
    end = time.perf_counter() + seconds
    found = [_batch(call, device, calls) for _ in range(3)]
    while time.perf_counter() < end:
        found.append(_batch(call, device, calls))
    return statistics.median(found)


def _batch(call: Callable[[], object], device: torch.device, calls: int) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / calls


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
