"""Ring attention on GPUs: what merging and small tiles cost on one, and how it scales on several.

    python benchmarks/ring_attention_cuda.py [--lengths 16384 65536] [--ranks 8] [--rounds 20] [--json FILE]

On one GPU: the rates of each kernel, and its errors beside the plain one in fp64. Then one rank's part of a zigzag
ring of `--ranks` ranks, with every tile and every merge and no message, is timed against one call of flash attention
over the whole sequence; "share" is that call's time, divided by the ranks, over the part's: 100 % is a ring that costs
nothing but its attention. Forward, and forward + backward. "peak" is what the part allocates at most beyond its inputs.

On several GPUs, one process for each: time of each implementation over all of them against one GPU that attends to the
whole sequence alone, divided by their number. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import parsed, ratios, spread, write_json
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.ring_attention import IMPLEMENTATIONS, attention, ring_attention, split_sequence
from parcompile.runtime.ring_attention.kernels import CAUSAL, FULL, Band
from parcompile.runtime.ring_attention.kernels.blocks import RunningAttention, add_gradients, attend
from parcompile.runtime.ring_attention.kernels.fused import CudaEfficientKernel, CudnnKernel
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries, QueriesOfPass
from parcompile.runtime.ring_attention.kernels.plain import PlainKernel, padded
from parcompile.runtime.ring_attention.kernels.selection import CudaFlashKernel, select_kernel
from parcompile.runtime.ring_attention.route import Masking, plan_route

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def draw(length: int, keys: int = HEAD_DIM, values: int = HEAD_DIM, seed: int = 0) -> list[Tensor]:
    options = {"generator": torch.Generator("cuda").manual_seed(seed), "device": "cuda", "dtype": torch.bfloat16}
    shapes = (HEADS, keys), (KV_HEADS, keys), (KV_HEADS, values), (HEADS, values)
    return [torch.randn(1, length, count, width, **options).transpose(1, 2) for count, width in shapes]


def seconds(function: Callable[[], object], rounds: int) -> list[float]:
    """Of each round, after three to warm up, by the device's own clock."""
    found = []
    for turn in range(rounds + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        if turn >= 3:
            found.append(start.elapsed_time(stop) / 1e3)
    return found


WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
CANDIDATES: tuple[Callable[[], Any], ...] = (CudaFlashKernel, CudnnKernel, CudaEfficientKernel)


def compare_kernels(length: int, rounds: int) -> list[dict[str, Any]]:
    """Each kernel for each pair of head widths: TFLOP/s of causal and full squares, and errors against fp64.

    Operations: 4 · heads · length² · width forward, half of them causal; 2.5 times as many backward.
    """
    found = []
    for keys, values in WIDTHS:
        tensors = draw(length, keys, values, seed=1)
        for make in CANDIDATES:
            for band in (CAUSAL, FULL):
                row: dict[str, Any] = {"widths": [keys, values], "length": length, "causal": band == CAUSAL}
                found.append(row)
                try:
                    row |= rates_of(make, tensors, band, rounds)
                except Exception as error:  # a kernel that does not serve these widths says so
                    row["refused"] = f"{type(error).__name__}: {error}"[:300]
    return found


def rates_of(make: Callable[[], Any], tensors: list[Tensor], band: Band, rounds: int) -> dict[str, Any]:
    """Name, errors and TFLOP/s of a kernel, whose heads are padded where it does not know two widths."""
    query, key, value, grad = tensors
    keys, values, scale, every = query.shape[3], value.shape[3], query.shape[3] ** -0.5, slice(None)
    kernel = padded(make(), keys) if keys != values and make is CudaFlashKernel else make()
    out, lse = kernel.forward(query, key, value, band=band, scale=scale, terms=None)
    read = QueriesOfPass(query, grad, out, lse, scale)
    sums = Gradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)))
    ways: list[tuple[str, float, Callable[[], object]]] = [
        ("forward", 1.0, lambda: kernel.forward(query, key, value, band=band, scale=scale, terms=None)),
        (
            "backward",
            2.5,
            lambda: kernel.backward(read.part(every, every), key, value, band=band, terms=None, into=sums),
        ),
    ]
    work = 2.0 * HEADS * query.shape[2] ** 2 * (keys + values) * (0.5 if band == CAUSAL else 1.0) / 1e12
    found: dict[str, Any] = {"kernel": kernel.name}
    found["errors"] = errors_of(kernel, [x[:, :, :768] for x in tensors], band, scale)
    return found | {way: [factor * work / one for one in seconds(run, rounds)] for way, factor, run in ways}


def packed(length: int, documents: int, rounds: int) -> dict[str, Any]:
    """Attention of one rank, forward and backward, over packed documents of one length, and over one document."""
    tensors = [tensor.requires_grad_() for tensor in draw(length)]
    borders = list(range(0, length + 1, length // documents))

    def run(**options: Any) -> None:
        out = ring_attention(*tensors[:3], **options)
        torch.autograd.grad(out, tensors[:3], tensors[3].detach())

    return {
        "length": length,
        "documents": documents,
        "packed_seconds": seconds(lambda: run(documents=borders), rounds),
        "one_seconds": seconds(run, rounds),
    }


def errors_of(kernel: Any, tensors: list[Tensor], band: Band, scale: float) -> dict[str, float]:
    """Relative errors against the plain kernel in fp64, with a log-sum-exp of more keys than these in backward."""
    query, key, value, grad = tensors
    exact, wide = PlainKernel(), [tensor.double() for tensor in tensors]
    out, lse = kernel.forward(query, key, value, band=band, scale=scale, terms=None)
    wanted, wanted_lse = exact.forward(*wide[:3], band=band, scale=scale)
    found = {"out": out, "lse": lse}
    right = {"out": wanted, "lse": wanted_lse}
    sums = Gradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)))
    wide_sums = Gradients(*(torch.zeros_like(x, dtype=torch.float64) for x in (query, key, value)))
    kernel.backward(Queries(query, grad, out, lse + 1, scale), key, value, band=band, terms=None, into=sums)
    exact.backward(
        Queries(wide[0], wide[3], wanted, wanted_lse + 1, scale), *wide[1:3], band=band, terms=None, into=wide_sums
    )
    for name in ("query", "key", "value"):
        found[name], right[name] = getattr(sums, name), getattr(wide_sums, name)
    return {name: float((found[name].double() - right[name]).norm() / right[name].norm()) for name in found}


def one_gpu(length: int, ranks: int, rounds: int, kernel: Any = None) -> dict[str, Any]:
    """One rank's part of a ring, the middle one's, against one call over the whole sequence."""
    whole = draw(length)
    rank, scale = ranks // 2, HEAD_DIM**-0.5
    parts = [[split_sequence(tensor, 2, "zigzag", ranks, each) for tensor in whole] for each in range(ranks)]
    query, _, _, grad = parts[rank]
    steps = plan_route(CpLayout.ZIGZAG, ranks, rank, query.shape[2], Masking())
    kernel = select_kernel(query, query) if kernel is None else kernel

    def forward() -> tuple[Tensor, Tensor]:
        running = RunningAttention(torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32))
        for step in steps:
            attend(kernel, step.tiles, query, parts[step.source][1], parts[step.source][2], running, scale)
        return running.finish()

    def both() -> None:
        out, lse = forward()
        queries = QueriesOfPass(query, grad, out, lse, scale)
        total = torch.zeros_like(query, dtype=torch.float32)
        for step in steps:
            _, key, value, _ = parts[step.source]
            sums = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value))
            into = Gradients(total, *sums)
            add_gradients(kernel, step.tiles, queries, key, value, into)

    leaves = [tensor.detach().requires_grad_() for tensor in whole[:3]]

    def flash(backward: bool) -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        if backward:
            torch.autograd.grad(out, leaves, whole[3])

    found: dict[str, Any] = {"length": length, "ranks": ranks, "kernel": kernel.name}
    for name, part, one in (("forward", forward, False), ("forward + backward", both, True)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found[name] = {
            "part_seconds": seconds(part, rounds),
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "flash_seconds": seconds(lambda one=one: flash(one), rounds),
        }
    return found


def worker(rank: int, ranks: int, rendezvous: str, arguments: argparse.Namespace, results: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
    )
    measured = []
    for length in arguments.lengths:
        whole = draw(length)
        alone = [*(tensor.detach().requires_grad_() for tensor in whole[:3]), whole[3]]

        def step(tensors: list[Tensor], backward: bool, **place: Any) -> None:
            out = attention(*tensors[:3], **place) if place else ring_attention(*tensors[:3])
            if backward:
                torch.autograd.grad(out, tensors[:3], tensors[3])

        for backward in (False, True):
            one = seconds(lambda: step(alone, backward), arguments.rounds)  # noqa: B023 -- called before the next turn
            found = {"length": length, "backward": backward, "one_gpu": one, "ranks": ranks}
            for name in sorted(set(IMPLEMENTATIONS) - {"usp", "double_ring"}):
                local = [split_sequence(tensor.detach(), 2, "zigzag", ranks, rank) for tensor in whole]
                local = [*(tensor.requires_grad_() for tensor in local[:3]), local[3]]
                place = {"group": dist.group.WORLD, "implementation": name}
                dist.barrier()
                own = torch.tensor(seconds(lambda: step(local, backward, **place), arguments.rounds), device="cuda")  # noqa: B023
                dist.all_reduce(own, dist.ReduceOp.MAX)
                found[name] = own.tolist()
            measured.append(found)
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    arguments = parsed(
        __doc__,
        lengths=[16_384, 65_536],
        ranks=(8, "of the ring whose part one GPU computes"),
        rounds=20,
        json=(Path, "also write every measured second"),
    )
    if not torch.cuda.is_available():
        print("there is no GPU: nothing is measured")
        return 0
    kernels = compare_kernels(8192, arguments.rounds)
    for row in kernels:
        name = f"{row.get('kernel')} {row['widths']} {'causal' if row['causal'] else 'full'}"
        if "refused" in row:
            print(f"{name}: {row['refused']}")
            continue
        rates = ", ".join(f"{way} {statistics.median(row[way]):.0f} TFLOP/s" for way in ("forward", "backward"))
        print(f"{name}: {rates}; errors {', '.join(f'{key} {error:.1e}' for key, error in row['errors'].items())}")
    parts = [
        one_gpu(length, arguments.ranks, arguments.rounds, kernel())
        for length in arguments.lengths
        for kernel in (CudaFlashKernel, CudnnKernel)
    ]
    for part in parts:
        for name in ("forward", "forward + backward"):
            times = part[name]
            share = [one / part["ranks"] for one in ratios(times["flash_seconds"], times["part_seconds"])]
            print(
                f"{part['kernel']}: {part['length']} tokens, 1 of {part['ranks']} ranks, {name}: "
                f"share {spread(share, '.1%')}, peak {times['peak_bytes'] / 1e6:.0f} MB"
            )
    packs = [packed(16_384, documents, arguments.rounds) for documents in (4, 32)]
    for one in packs:
        times = [statistics.median(one[f"{name}_seconds"]) for name in ("packed", "one")]
        share = times[1] / one["documents"] / times[0]
        print(f"{one['documents']} documents in {one['length']} tokens: {share:.0%} of the rate of one document")
    scaling = []
    if (ranks := torch.cuda.device_count()) > 1:
        results = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (ranks, f"{folder}/rendezvous", arguments, results), nprocs=ranks)
        scaling = results.get()
    for found in scaling:
        direction = "forward + backward" if found["backward"] else "forward"
        for name in sorted(set(found) & set(IMPLEMENTATIONS)):
            share = [one / found["ranks"] for one in ratios(found["one_gpu"], found[name])]
            print(f"{found['length']} tokens on {found['ranks']} GPUs, {direction}, {name}: {spread(share, '.1%')}")
    found = {"kernels": kernels, "parts": parts, "packed": packs, "scaling": scaling}
    write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
