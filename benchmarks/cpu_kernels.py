"""The two kernels of ring attention on CPUs side by side: tiles of our own against torch's fused one, on one thread.

    python benchmarks/cpu_kernels.py [--rounds 9] [--threads 1] [--dtype bfloat16]

Given is the time of the fused kernel over that of the tiles, median with quartiles, of processor time in which the two
take turns: above 1 the tiles are faster. Backward of the fused kernel is one call over all rows, its fastest way and
not its most exact one (`selection.BACKWARD_ROWS`). Errors are relative L2 of the key gradients against float64.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from harness import heads, parsed, ratios, row, seconds_in_turns, spread
from ring_attention import LARGE, SMALL, Shape, draw

from parcompile.runtime.ring_attention.kernels import CAUSAL, FULL, Band
from parcompile.runtime.ring_attention.kernels.cpu_tiles import CpuTileKernel, kept_memory
from parcompile.runtime.ring_attention.kernels.fused import CpuFlashKernel
from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Kernel, Queries
from parcompile.runtime.ring_attention.kernels.selection import has_bf16_products_alone

BLOCKS = [(SMALL, tokens) for tokens in (128, 512, 2048)]
BLOCKS += [(Shape(4, 4, 64), 2048), (Shape(4, 1, 128), 2048), (LARGE, 1024)]
"""Heads, and the number of queries and of keys."""
KERNELS: dict[str, Kernel] = {"fused": CpuFlashKernel(), "tiles": CpuTileKernel()}


def measure(shape: Shape, tokens: int, band: Band, dtype: torch.dtype, rounds: int) -> None:
    """Prints a row of the table."""
    query, key, value, grad = draw(shape, tokens, dtype)
    scale = shape.head_dim**-0.5
    steps: dict[str, Callable[[], object]] = {}
    sums: dict[str, Gradients] = {}
    for name, kernel in KERNELS.items():
        forward = functools.partial(kernel.forward, query, key, value, band=band, scale=scale, terms=None)
        read = Queries(query, grad, *forward(), scale)
        backward = functools.partial(kernel.backward, read, key, value, band=band, terms=None)
        sums[name], further = (
            Gradients(*(torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))) for _ in range(2)
        )
        backward(into=sums[name])
        steps |= {f"{name} forward": forward, f"{name} backward": functools.partial(backward, into=further)}
    # Seconds of the processor where one thread computes.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = seconds_in_turns(steps, rounds, clock)
    cells = [spread(ratios(seconds[f"fused {way}"], seconds[f"tiles {way}"])) for way in ("forward", "backward")]
    wide = [each.double() for each in (query, key, value)]
    out, lse = KERNELS["fused"].forward(*wide, band=band, scale=scale, terms=None)
    exact = Gradients(*map(torch.zeros_like, wide))
    read = Queries(wide[0], grad.double(), out, lse, scale)
    KERNELS["fused"].backward(read, *wide[1:], band=band, terms=None, into=exact)
    errors = [float((sums[name].key.double() - exact.key).norm() / exact.key.norm()) for name in ("fused", "tiles")]
    said = " · ".join(f"{error:.1e}" for error in errors)
    row(f"{shape}, {tokens} tokens", "causal" if band == CAUSAL else "full", *cells, said)


def main() -> None:
    options = parsed(__doc__, rounds=9, threads=1, dtype="bfloat16")
    torch.set_num_threads(options.threads)
    if not has_bf16_products_alone():
        print("this CPU has no bf16 dot products, or a matrix unit too: the fused kernel is taken for bf16 here")
    heads("block", "mask", "forward", "backward", "error of dK: fused · tiles")
    for shape, tokens in BLOCKS:
        for band in (CAUSAL, FULL):
            with kept_memory():  # as around the tiles of a ring's step
                measure(shape, tokens, band, getattr(torch, options.dtype), options.rounds)


if __name__ == "__main__":
    main()
