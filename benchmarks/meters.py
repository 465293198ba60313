"""What benchmarks of several ranks measure with: bytes on the wire, memory, and times of methods that take turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

TIMEOUT = 24 * 3600.0
"""Seconds within which all ranks have measured; `run_local` ends what takes longer."""


class Wire(TorchDispatchMode):
    """Counts the calls of collectives and the bytes that this rank sends.

    `exchanged` are the bytes it gives to all-to-alls, with those that stay on the rank, by the ranks of their group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0.0
        self.exchanged: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        namespace, name = function._schema.name.split("::")
        if namespace not in ("c10d", "_c10d_functional") or "wait" in name or "wrap" in name:
            return out
        group = _group_of(args)
        ranks = dist.get_world_size(group)
        share = (ranks - 1) / ranks
        factor = {"allreduce": 2 * share, "all_reduce": 2 * share, "send": 1.0, "reduce_scatter": share}
        factor |= {"all_gather": ranks - 1, "allgather": ranks - 1, "_reduce_scatter": share, "_allgather": ranks - 1}
        if name in ("alltoall_base_", "all_to_all_single"):
            # (output, input, group, output splits, input splits, …) or (input, output splits, input splits, group)
            given, splits = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
            splits = splits or [given.shape[0] // ranks] * ranks
            self.calls += 1
            self.exchanged[tuple(dist.get_process_group_ranks(group))] += given.nbytes
            self.bytes += given.nbytes * (1 - splits[dist.get_rank(group)] / max(1, sum(splits)))
        else:
            for prefix, times in factor.items():
                if name.startswith(prefix):
                    tensors = [args[1] if name.startswith(("_allgather", "_reduce_scatter")) else args[0]]
                    tensors = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
                    self.calls += 1
                    self.bytes += times * sum(t.numel() * t.element_size() for t in tensors)
        return out


def _group_of(args):
    """The group that a collective is called with: an object, or its name, which comes last."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, dist.ProcessGroup):
            return arg
    return dist.distributed_c10d._resolve_process_group(args[-1])


def kept_bytes(step: Callable[[], object], weights: Collection[int]) -> int:
    """What autograd keeps for backward in a step; tensors of a storage count once, and weights are there anyway.

    Args:
        step: forward and backward.
        weights: addresses of storages, beside those of parameters.
    """
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage, base = local.untyped_storage(), local if local._base is None else local._base
        if storage.data_ptr() not in weights and not isinstance(base, torch.nn.Parameter):
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(held.values())


def peak_bytes(step: Callable[[], None]) -> int:
    """The most that is allocated at a time during a step, above what there was before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def in_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds, and processor seconds of this rank, of each step in each round; every rank calls it alike."""
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    cpu_seconds: dict[str, list[float]] = {method: [] for method in steps}
    order = list(steps)
    for _ in range(rounds):
        order.append(order.pop(0))
        for method in order:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            steps[method]()
            cpu_seconds[method].append(time.process_time() - cpu_start)
            dist.barrier()
            seconds[method].append(time.perf_counter() - start)
    return seconds, cpu_seconds


def measured(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, Any]]:
    """Of each method: calls and bytes of its messages, its peak of memory, and its seconds in turns."""
    found: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        with Wire() as wire:
            step()
        found[name] = {"method": name, "calls": wire.calls, "sent_bytes": wire.bytes, "peak_bytes": peak_bytes(step)}
    for kind, times in zip(("seconds", "cpu_seconds"), in_turns(steps, rounds), strict=True):
        for name, values in times.items():
            found[name][kind] = values
    return found


def slowest_seconds(work: Callable[[], object], times: int = 1) -> float:
    """Seconds of a call, of so many, on the slowest rank; every rank calls it alike."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(times):
        work()
    taken = torch.tensor((time.perf_counter() - started) / times, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)
