"""Ring attention, forward and backward, on two ranks of one thread against one rank of one thread, beside its peers.

    python benchmarks/ring_attention.py [--lengths 4096 8192] [--dtypes bfloat16 float32] [--rounds 7] [--json FILE]

Every number is from one run in which the methods take turns, round by round. "speed-up" is the time of one rank that
attends over the whole sequence, divided by the time of the slower of two ranks (ideal 2). "ceiling" computes the same
tiles with the same kernels and neither communicates nor merges: nobody can be faster. "CPU" is the processor time of
both ranks over that of one rank, which a busy machine disturbs least (ideal 1). "torch" is torch's private
context-parallel engine on the same CPU kernels, with its all-gather and its all-to-all of keys and values;
"ring-flash-attn" is that package, where it is installed, with the same kernels in the place of flash_attn. Given are
medians, with the quartiles of the speed-up. "peak" is what a rank's memory grows by, in a run of its own in which the
allocator returns every large block at once.
"""

# The stand-ins for flash_attn have its arguments, which the ring passes by name.
# ruff: noqa: ARG001

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.ring_attention import (
    all_gather_attention,
    ring,
    ring_attention,
    split_sequence,
    ulysses_attention,
)
from parcompile.runtime.ring_attention.kernels import Gradients, Queries, add_gradients, select_kernel
from parcompile.runtime.ring_attention.route import Masking, plan_route

RANKS = 2
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64

Method = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Ceiling(torch.autograd.Function):
    """The tiles of the zigzag ring on the rank's own keys, without messages and merges: fast, and wrong."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        route = plan_route(CpLayout.ZIGZAG, RANKS, dist.get_rank(), query.shape[2], Masking())
        ctx.tiles = [tile for step in route for tile in step.tiles]
        kernel, scale = select_kernel(query, value), HEAD_DIM**-0.5
        for tile in ctx.tiles:
            block_out, block_lse = kernel.forward(
                query[:, :, tile.queries], key[:, :, tile.keys], value[:, :, tile.keys], band=tile.band, scale=scale
            )
            if tile.queries == slice(0, query.shape[2]):
                out, lse = block_out, block_lse
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        queries = Queries(query, grad, out, lse, HEAD_DIM**-0.5)
        sums = Gradients(*(torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value)))
        for tile in ctx.tiles:
            add_gradients(select_kernel(query, value), tile, queries, key, value, sums)
        return tuple(total.to(query.dtype) for total in (sums.query, sums.key, sums.value))


class _TorchRing(torch.autograd.Function):
    """torch's templated ring attention around the CPU's flash attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse, *_ = torch_cp._templated_ring_attention(
            dist.group.WORLD,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
            query,
            key,
            value,
            is_causal=True,
        )
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        return torch_cp._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=grad.contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )[:3]


def _torch_ring(rotation: torch_cp._RotateMethod) -> Method:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch_cp._cp_options.rotate_method = rotation
        return _TorchRing.apply(query, key, value)

    return attend


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    """The function of flash_attn, on the CPU's kernel."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=softmax_scale
    )
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """The function of flash_attn, on the CPU's kernel."""
    tensors = (tensor.transpose(1, 2) for tensor in (dout, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, softmax_lse, 0.0, causal, scale=softmax_scale
    )
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad.transpose(1, 2))


def _ring_flash_attn() -> dict[str, tuple[str, Method]]:
    """The peer, if it is installed."""
    found = None if "ring_flash_attn" in sys.modules else importlib.util.find_spec("ring_flash_attn")
    if found is None and "ring_flash_attn" not in sys.modules:
        return {}
    if "flash_attn" not in sys.modules:
        package, functions = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
        functions._flash_attn_forward = _flash_attn_forward
        functions._flash_attn_backward = _flash_attn_backward
        functions._flash_attn_varlen_forward = functions._flash_attn_varlen_backward = None
        package.flash_attn_interface = functions
        sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": functions})
    if found is not None:
        # Its module alone: the package also imports adapters that not every version of transformers bears.
        bare = types.ModuleType("ring_flash_attn")
        bare.__path__ = list(found.submodule_search_locations or ())
        sys.modules["ring_flash_attn"] = bare
    zigzag = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")

    def attend(*qkv: Tensor) -> Tensor:
        token_major = (tensor.transpose(1, 2) for tensor in qkv)
        return zigzag.zigzag_ring_flash_attn_func(*token_major, causal=True).transpose(1, 2)

    return {"ring-flash-attn": ("zigzag", attend)}


def methods() -> dict[str, tuple[str, Method]]:
    """Name: layout of the tokens, function."""
    group = dist.group.WORLD
    return {
        "ceiling": ("zigzag", _Ceiling.apply),
        "zigzag": ("zigzag", lambda *qkv: ring_attention(*qkv, group=group)),
        "contiguous": ("contiguous", lambda *qkv: ring_attention(*qkv, group=group, layout="contiguous")),
        "all-gather": ("zigzag", lambda *qkv: all_gather_attention(*qkv, group=group)),
        "ulysses": ("zigzag", lambda *qkv: ulysses_attention(*qkv, group=group)),
        "torch all-gather": ("zigzag", _torch_ring(torch_cp._RotateMethod.ALL_GATHER)),
        "torch all-to-all": ("zigzag", _torch_ring(torch_cp._RotateMethod.ALL_TO_ALL)),
        **_ring_flash_attn(),
    }


def whole_inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, count, length, HEAD_DIM, generator=generator).to(dtype) for count in heads]


def inputs(layout: str, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value as leaves, and the gradient of the output, of this rank."""
    rank = dist.get_rank()
    local = [split_sequence(tensor, 2, layout, RANKS, rank).contiguous() for tensor in whole_inputs(length, dtype)]
    return [*(tensor.requires_grad_() for tensor in local[:3]), local[3]]


def run(method: Method, tensors: list[Tensor], backward: bool) -> tuple[float, float]:
    """Seconds and processor seconds of one call on this rank."""
    query, key, value, grad = tensors
    start, cpu_start = time.perf_counter(), time.process_time()
    if backward:
        torch.autograd.grad(method(query, key, value), (query, key, value), grad)
    else:
        with torch.no_grad():
            method(query, key, value)
    return time.perf_counter() - start, time.process_time() - cpu_start


def over_ranks(seconds: float, cpu_seconds: float) -> tuple[float, float]:
    """Seconds of the slower rank, processor seconds of both."""
    slowest, total = torch.tensor(seconds, dtype=torch.float64), torch.tensor(cpu_seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest), float(total)


def time_methods(
    length: int, dtype: torch.dtype, backward: bool, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and processor seconds of each method in each round, after one to warm up; "one rank" is the baseline."""
    whole = whole_inputs(length, dtype)
    whole = [*(tensor.requires_grad_() for tensor in whole[:3]), whole[3]]
    local = {name: (method, inputs(layout, length, dtype)) for name, (layout, method) in methods().items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("one rank", *local)}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in seconds}
    for turn in range(rounds + 1):
        for name in seconds:
            dist.barrier()
            if name == "one rank":
                one = run(ring_attention, whole, backward) if dist.get_rank() == 0 else (0.0, 0.0)
            else:
                one = run(*local[name], backward)
            one = over_ranks(*one)
            if turn:
                seconds[name].append(one[0])
                cpu_seconds[name].append(one[1])
    return seconds, cpu_seconds


def wire_bytes(length: int, dtype: torch.dtype) -> dict[str, int]:
    """What a rank of the zigzag ring sends, forward and backward, and the least that it can be."""
    sent, post = [0], ring.post_exchange

    def counting(group: Any, hop: Any, outgoing: Any, *rest: Any) -> Any:
        sent[0] += outgoing.message.numel() * outgoing.message.element_size()
        return post(group, hop, outgoing, *rest)

    ring.post_exchange = counting
    run(methods()["zigzag"][1], inputs("zigzag", length, dtype), backward=True)
    ring.post_exchange = post
    pair = 2 * KV_HEADS * HEAD_DIM * length // RANKS
    # Keys and values once in forward and once in backward, their gradients in fp32.
    return {"sent": sent[0], "least": (RANKS - 1) * pair * (2 * dtype.itemsize + 4)}


def peak_bytes(length: int, dtype: torch.dtype) -> dict[str, int]:
    """By how much one forward and backward of each method makes this rank's resident memory grow at most (Linux)."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    peaks = {}
    for name, (layout, method) in methods().items():
        tensors = inputs(layout, length, dtype)
        run(method, tensors, backward=True)
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        run(method, tensors, backward=True)
        peaks[name] = status("VmHWM") - before
    return peaks


def worker(rank: int, rendezvous: str, arguments: argparse.Namespace, memory: bool, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    measured = []
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        for length in arguments.lengths:
            head = {"dtype": str(dtype).removeprefix("torch."), "length": length}
            if memory:
                measured.append({**head, "peak_bytes": peak_bytes(length, dtype)})
                continue
            for backward in (False, True):
                seconds, cpu_seconds = time_methods(length, dtype, backward, arguments.rounds)
                measured.append({**head, "backward": backward, "seconds": seconds, "cpu_seconds": cpu_seconds})
            measured[-1]["wire_bytes"] = wire_bytes(length, dtype)
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def start_ranks(arguments: argparse.Namespace, memory: bool) -> list[dict[str, Any]]:
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            worker, (f"{folder}/rendezvous", arguments, memory, results), nprocs=RANKS, join=False, start_method="spawn"
        )
        while not context.join():
            pass
    return results.get()


def report(measured: list[dict[str, Any]]) -> None:
    for part in measured:
        direction = "forward + backward" if part["backward"] else "forward"
        print(f"\n{part['dtype']}, {part['length']} tokens, {direction}")
        seconds = part["seconds"]
        alone, ceiling = seconds["one rank"], seconds["ceiling"]
        for name in list(seconds)[1:]:
            speed_ups = [one / both for one, both in zip(alone, seconds[name], strict=True)]
            low, middle, high = statistics.quantiles(speed_ups, n=4) if len(speed_ups) > 1 else speed_ups * 3
            share = statistics.median(best / both for best, both in zip(ceiling, seconds[name], strict=True))
            cpu = statistics.median(part["cpu_seconds"][name]) / statistics.median(part["cpu_seconds"]["one rank"])
            line = f"  {name:18} speed-up {middle:5.2f} ({low:.2f} … {high:.2f})   of the ceiling {share:6.1%}"
            line += f"   CPU {cpu:5.2f}"
            print(line + (f"   peak {part['peak_bytes'][name] / 1e6:7.1f} MB" if "peak_bytes" in part else ""))
        if "wire_bytes" in part:
            sent, least = part["wire_bytes"]["sent"], part["wire_bytes"]["least"]
            print(f"  on the wire {sent / 1e6:.2f} MB for each rank of the zigzag ring, at least {least / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write every measured second")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    measured = start_ranks(arguments, memory=False)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    peaks = {(part["dtype"], part["length"]): part["peak_bytes"] for part in start_ranks(arguments, memory=True)}
    for part in measured:
        if part["backward"]:
            part["peak_bytes"] = peaks[part["dtype"], part["length"]]
    report(measured)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
