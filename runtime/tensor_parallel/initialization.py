"""Draws slices of a master weight: any layout starts from bit-identical global weights.

No rank ever holds a whole matrix. The master weight is defined row block by row block: block i comes from a generator
of its own, seeded with the weight's seed + i. A rank draws only the blocks that its slice touches, on the CPU and in
float32 (float64 for float64), so neither the layout nor the device nor the precision of the run changes what is drawn.
The weight's seed comes from torch's default generator: ranks that have called `torch.manual_seed` alike, and build
their layers in the same order, agree on it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .weights import Ranges, take_ranges

__all__ = ["BLOCK_ROWS", "draw_slice", "master_seed", "normal", "uniform"]

BLOCK_ROWS = 256
"""Rows per generator. Part of the definition of the master weight: another value draws other weights."""

Draw = Callable[[Tensor, torch.Generator], object]
"""Fills a tensor in place from a generator."""


def master_seed() -> int:
    """Take the next weight's seed from torch's default generator."""
    return int(torch.randint(2**62, ()).item())


def uniform(bound: float) -> Draw:
    """Uniform on [−bound, bound), as `nn.Linear` draws with bound 1/√I."""
    return lambda block, generator: block.uniform_(-bound, bound, generator=generator)


def normal(std: float) -> Draw:
    """Normal with mean 0."""
    return lambda block, generator: block.normal_(0.0, std, generator=generator)


@torch.no_grad()
def draw_slice(local: Tensor, full_shape: tuple[int, ...], dim: int, ranges: Ranges, draw: Draw, seed: int) -> None:
    """Fill `local` with `ranges` along `dim` of the master weight; rows past `full_shape` are zero (padding)."""
    rows, generator = full_shape[0], torch.Generator()
    drawn_dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
    if dim == 0:
        local.zero_()
    for index, first in enumerate(range(0, rows, BLOCK_ROWS)):
        last = min(first + BLOCK_ROWS, rows)
        if dim == 0 and not any(start < last and first < stop for start, stop in ranges):
            continue
        block = torch.empty(last - first, *full_shape[1:], dtype=drawn_dtype)
        draw(block, generator.manual_seed(seed + index))
        if dim != 0:
            local[first:last] = take_ranges(block, dim, ranges)
            continue
        offset = 0
        for start, stop in ranges:
            low, high = max(start, first), min(stop, last)
            if low < high:
                local[offset + low - start : offset + high - start] = block[low - first : high - first]
            offset += stop - start
