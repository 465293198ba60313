"""Ring attention, forward and backward, on two ranks of one thread against one rank of one thread, beside its peers.

    python benchmarks/ring_attention.py [--lengths 4096 8192] [--dtypes bfloat16 float32] [--rounds 7]
                                        [--memory-lengths 8192] [--json FILE]

Times are of one run in which the methods take turns, round by round; given are medians, with quartiles.

- "speed-up": the time of one rank that attends over the whole sequence over that of the slower of two ranks (ideal 2).
- "ceiling" computes the same tiles with the same kernels and neither communicates nor merges.
- "CPU": the processor time of both ranks over that of one rank, which a busy machine disturbs least (ideal 1).
- "packed": documents of different lengths, packed anew for the ranks (`pack_documents`); "dense of equal work" is a
  ring of one document with as many pairs of queries and keys. Their pairs per second are compared.
- "peak": the most that a rank's tensors take at a time in forward and backward beyond its inputs, as torch's allocator
  counts it: the results, which every method has, included.
- "error": relative L2 of dK and dV in bf16 against float64, beside torch's attention on one rank.

At the end stands each goal with what was measured. Peers that cannot be imported are left out.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import parsed, quartiles, ratios, spread, write_json
from meters import TIMEOUT, Wire, in_turns, peak_bytes
from peers.rings import Method, rings
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.local import run_local
from parcompile.runtime.ring_attention import (
    PackingCosts,
    all_gather_attention,
    pack_documents,
    pack_tensors,
    packed_attention,
    ring_attention,
    split_sequence,
    ulysses_attention,
)
from parcompile.runtime.ring_attention.kernels.blocks import add_gradients
from parcompile.runtime.ring_attention.kernels.cpu_tiles import kept_memory
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries
from parcompile.runtime.ring_attention.kernels.selection import select_kernel
from parcompile.runtime.ring_attention.route import Masking, plan_route

RANKS = 2
PEERS = ("torch all-gather", "torch all-to-all", "ring-flash-attn")


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


SMALL, LARGE = Shape(8, 2, 64), Shape(32, 8, 128)
"""What is timed; memory is measured of both."""


class _Ceiling(torch.autograd.Function):
    """The tiles of the zigzag ring on the rank's own keys, without messages and merges: fast, and wrong."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        route = plan_route(CpLayout.ZIGZAG, RANKS, dist.get_rank(), query.shape[2], Masking())
        ctx.tiles = [tile for step in route for tile in step.tiles]
        kernel, ctx.scale = select_kernel(query, value), query.shape[3] ** -0.5
        with kept_memory():
            for tile in ctx.tiles:
                block_out, block_lse = kernel.forward(
                    query[:, :, tile.queries],
                    key[:, :, tile.keys],
                    value[:, :, tile.keys],
                    band=tile.band,
                    scale=ctx.scale,
                    terms=None,
                )
                if tile.queries == slice(0, query.shape[2]):
                    out, lse = block_out, block_lse
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        queries = Queries(query, grad, out, lse, ctx.scale)
        sums = Gradients(*(torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value)))
        add_gradients(select_kernel(query, value), ctx.tiles, queries, key, value, sums)
        return tuple(total.to(query.dtype) for total in (sums.query, sums.key, sums.value))


def one_device(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own attention over the whole sequence."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def methods() -> dict[str, tuple[str, Method]]:
    """Name: layout of the tokens, function."""
    group = dist.group.WORLD
    return {
        "ceiling": ("zigzag", _Ceiling.apply),
        "zigzag": ("zigzag", lambda *qkv: ring_attention(*qkv, group=group)),
        "contiguous": ("contiguous", lambda *qkv: ring_attention(*qkv, group=group, layout="contiguous")),
        "all-gather": ("zigzag", lambda *qkv: all_gather_attention(*qkv, group=group)),
        "ulysses": ("zigzag", lambda *qkv: ulysses_attention(*qkv, group=group)),
        **{name: ("zigzag", method) for name, method in rings().items()},
    }


def draw(shape: Shape, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output [1, heads, length, D]; equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return [torch.randn(1, count, length, shape.head_dim, generator=generator).to(dtype) for count in heads]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [*(tensor.detach().requires_grad_() for tensor in tensors[:3]), tensors[3]]


def local(layout: str, whole: list[Tensor]) -> list[Tensor]:
    """This rank's part of each tensor."""
    return leaves([split_sequence(tensor, 2, layout, RANKS, dist.get_rank()).contiguous() for tensor in whole])


def run(method: Method, tensors: list[Tensor], backward: bool) -> tuple[Tensor, ...]:
    query, key, value, grad = tensors
    if backward:
        return torch.autograd.grad(method(query, key, value), (query, key, value), grad)
    with torch.no_grad():
        return (method(query, key, value),)


def packed(shape: Shape, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """Both methods of the comparison with their tensors, and their numbers of pairs of queries and keys."""
    # Documents of half the sequence, a quarter, … and a 64th, none of them a round number.
    lengths = [(length >> halvings) - 1 for halvings in (1, 2, 3, 4, 5, 6, 6)]
    # Nothing but attention is computed here, and a message is cheap beside it.
    packing, rank = pack_documents(lengths, RANKS, costs=PackingCosts(0.0, 50.0)), dist.get_rank()
    documents = [list(torch.split(whole[0].transpose(0, 1), lengths)) for whole in draw(shape, sum(lengths), dtype)]
    tensors = [pack_tensors(each, packing, rank).transpose(0, 1).unsqueeze(0).contiguous() for each in documents]
    pairs = sum(one * one for one in lengths) / 2
    dense = round(math.sqrt(2 * pairs) / 4) * 4
    group = dist.group.WORLD
    return {
        "packed": (lambda *qkv: packed_attention(*qkv, packing, rank=rank, group=group), leaves(tensors), pairs),
        "dense of equal work": (methods()["zigzag"][1], local("zigzag", draw(shape, dense, dtype)), dense**2 / 2),
    }


def time_methods(length: int, dtype: torch.dtype, backward: bool, rounds: int) -> dict[str, Any]:
    """Seconds and processor seconds of each method in each round; "one rank" is the baseline."""
    whole = draw(SMALL, length, dtype)
    alone = leaves(whole)

    def one_rank() -> None:
        if dist.get_rank() == 0:
            run(ring_attention, alone, backward)

    steps: dict[str, Callable[[], object]] = {"one rank": one_rank}
    pairs = {}
    for name, (layout, method) in methods().items():
        steps[name] = functools.partial(run, method, local(layout, whole), backward)
    for name, (method, part, count) in packed(SMALL, length, dtype).items():
        steps[name] = functools.partial(run, method, part, backward)
        pairs[name] = count
    for step in steps.values():
        step()
    seconds, cpu_seconds = in_turns(steps, rounds)
    both = {name: torch.tensor(values, dtype=torch.float64) for name, values in cpu_seconds.items()}
    for values in both.values():
        dist.all_reduce(values)
    return {"seconds": seconds, "cpu_seconds": {name: each.tolist() for name, each in both.items()}, "pairs": pairs}


def wire_bytes(length: int, dtype: torch.dtype) -> dict[str, float]:
    """What a rank of the zigzag ring sends, forward and backward, and the least that it can be."""
    with Wire() as wire:
        run(methods()["zigzag"][1], local("zigzag", draw(SMALL, length, dtype)), backward=True)
    pair = 2 * SMALL.kv_heads * SMALL.head_dim * length // RANKS
    # Keys and values once in forward and once in backward, their gradients in fp32.
    return {"sent": wire.bytes, "least": (RANKS - 1) * pair * (2 * dtype.itemsize + 4)}


def peaks(shape: Shape, length: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each method, of "one rank" with torch's attention over the whole sequence too."""
    whole = draw(shape, length, dtype)
    found = {}
    for name, (layout, method) in methods().items():
        found[name] = peak_bytes(functools.partial(run, method, local(layout, whole), backward=True))
        dist.barrier()
    if dist.get_rank() == 0:
        alone = leaves(whole)
        found["one rank"] = peak_bytes(lambda: run(one_device, alone, backward=True))
    dist.barrier()
    return found


def key_errors(length: int) -> dict[str, list[float]]:
    """Relative L2 errors of dK and dV in bf16 against float64."""
    whole = draw(SMALL, length, torch.bfloat16)
    exact = run(ring_attention, leaves([tensor.double() for tensor in whole]), backward=True)[1:]
    found = {}
    if dist.get_rank() == 0:
        found["one device"] = _relative(run(one_device, leaves(whole), backward=True)[1:], exact, alone=True)
    for name, (layout, method) in methods().items():
        if name != "ceiling":
            part = [split_sequence(tensor, 2, layout, RANKS, dist.get_rank()) for tensor in exact]
            found[name] = _relative(run(method, local(layout, whole), backward=True)[1:], part, alone=False)
    return found


def _relative(got: tuple[Tensor, ...], wanted: Any, *, alone: bool) -> list[float]:
    """Of each tensor over all ranks, or of one rank's alone."""
    squares = torch.tensor(
        [[(one.double() - right).square().sum(), right.square().sum()] for one, right in zip(got, wanted, strict=True)],
        dtype=torch.float64,
    )
    if not alone:
        dist.all_reduce(squares)
    return (squares[:, 0] / squares[:, 1]).sqrt().tolist()


def worker(_: int, arguments: argparse.Namespace) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"times": [], "wire": [], "peaks": [], "errors": []}
    for name in arguments.dtypes:
        dtype = getattr(torch, name)
        for length in arguments.lengths:
            head = {"dtype": name, "length": length}
            for backward in (False, True):
                found["times"].append(
                    {**head, "backward": backward, **time_methods(length, dtype, backward, arguments.rounds)}
                )
            found["wire"].append({**head, **wire_bytes(length, dtype)})
            if dtype is torch.bfloat16 and length <= arguments.error_length:
                found["errors"].append({"length": length, "errors": key_errors(length)})
        for length in arguments.memory_lengths:
            for shape in (SMALL, LARGE):
                found["peaks"].append(
                    {"dtype": name, "length": length, "shape": str(shape), "bytes": peaks(shape, length, dtype)}
                )
    return found


def report(found: dict[str, Any]) -> None:
    for part in found["times"]:
        direction = "forward + backward" if part["backward"] else "forward"
        print(f"\n{part['dtype']}, {part['length']} tokens of {SMALL}, {direction}")
        seconds, cpu = part["seconds"], {name: sum(values) for name, values in part["cpu_seconds"].items()}
        for name in [name for name in seconds if name != "one rank" and name not in part["pairs"]]:
            share = quartiles(ratios(seconds["ceiling"], seconds[name]))[1]
            print(
                f"  {name:18} speed-up {spread(ratios(seconds['one rank'], seconds[name]), '5.2f')}"
                f"   of the ceiling {share:6.1%}   CPU {cpu[name] / cpu['one rank']:5.2f}"
            )
    for part in found["wire"]:
        print(
            f"\n{part['dtype']}, {part['length']} tokens: {part['sent'] / 1e6:.2f} MB sent by each rank of the zigzag "
            f"ring, at least {part['least'] / 1e6:.2f} MB"
        )
    for part in found["peaks"]:
        print(f"\npeak of a rank, forward + backward, {part['dtype']}, {part['length']} tokens, {part['shape']}")
        for name, taken in part["bytes"].items():
            print(f"  {name:18} {taken / 1e6:7.1f} MB")
    for part in found["errors"]:
        print(f"\nerrors of dK and dV, bfloat16, {part['length']} tokens")
        for name, errors in part["errors"].items():
            print(f"  {name:18} {errors[0]:.1e} {errors[1]:.1e}")
    print("\ngoals")
    for part in found["times"]:
        _goals_of_times(part)
    for part in found["wire"]:
        _goal(part, "bytes on the wire / the least", [part["sent"] / part["least"]], most=1.0)
    for part in found["peaks"]:
        own, taken = part["bytes"]["zigzag"], part["bytes"]
        if part["shape"] == str(LARGE):
            if "ring-flash-attn" in taken:
                _goal(part, "peak / ring-flash-attn's", [own / taken["ring-flash-attn"]], most=0.36)
            _goal(part, "peak / one rank's full attention", [own / taken["one rank"]], most=0.5)
    for part in found["errors"]:
        ratio = max(ratios(part["errors"]["zigzag"], part["errors"]["one device"]))
        _goal({"dtype": "bfloat16", **part}, "error of dK, dV / one device's", [ratio], most=0.45)


def _goals_of_times(part: dict[str, Any]) -> None:
    seconds, length, backward = part["seconds"], part["length"], part["backward"]

    def faster_than(name: str, own: str = "zigzag") -> list[float]:
        return ratios(seconds[name], seconds[own])

    least = (0.97 if length >= 8192 else 0.95) if backward else None
    _goal(part, "share of the ceiling", faster_than("ceiling"), least=least)
    # The fastest peer in this run.
    best = min((name for name in PEERS if name in seconds), key=lambda name: quartiles(seconds[name])[1])
    leads = not backward and part["dtype"] == "bfloat16" and length <= 8192
    _goal(part, f"time of the best ring peer ({best}) / own", faster_than(best), least=1.1 if leads else 1.0)
    _goal(part, "time of Ulysses / own", faster_than("ulysses"), least=0.98)
    _goal(part, "time of the contiguous ring / zigzag", faster_than("contiguous"), least=1.4)
    share = part["pairs"]["packed"] / part["pairs"]["dense of equal work"]
    rates = [ratio * share for ratio in faster_than("dense of equal work", "packed")]
    _goal(part, "pairs per second of packed documents / of a dense ring", rates, least=0.9)


def _goal(
    part: dict[str, Any], what: str, values: list[float], *, least: float | None = None, most: float | None = None
) -> None:
    """Prints what was measured, the median with its quartiles or the figure, and whether it meets a goal."""
    way = {None: "", False: " forward", True: " forward + backward"}[part.get("backward")]
    low, middle, high = quartiles(values)
    said = f"  {part['dtype']} {part['length']}{way}: {what} {middle:.3f}"
    said += f" ({low:.3f} … {high:.3f})" if len(values) > 1 else ""
    if least is not None:
        said += f", at least {least}: {'met' if middle >= least else 'NOT met'}"
    if most is not None:
        said += f", at most {most}: {'met' if middle <= most else 'NOT met'}"
    print(said)


def main() -> None:
    arguments = parsed(
        __doc__,
        lengths=[4096, 8192],
        memory_lengths=[8192],
        error_length=(16_384, "the longest sequence computed in float64 too"),
        dtypes=["bfloat16", "float32"],
        rounds=7,
        json=(Path, "also write everything measured"),
    )
    found, *_ = run_local(RANKS, worker, arguments, timeout=TIMEOUT)
    report(found)
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
