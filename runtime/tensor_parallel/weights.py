"""Cuts full weights into the slices that ranks hold, and puts them together again.

Every function checks what it is given and names the numbers; nothing is truncated or rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Ranges = Sequence[tuple[int, int]]
"""Half-open index ranges `(start, stop)` along one dim, in the order in which a rank holds them."""


def even_range(size: int, rank: int, world: int, what: str = "size") -> tuple[int, int]:
    """The range of `rank` when `size` is cut into `world` equal slices.

    Raises:
        ValueError: The slices would not be equal, or there is no such rank.
    """
    if world < 1:
        raise ValueError(f"world = {world}: there must be at least one rank")
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in 0..{world - 1} (world = {world})")
    if size % world:
        padded = -(-size // world) * world
        raise ValueError(
            f"{what} = {size} is not divisible by {world} ranks: {size} % {world} = {size % world}; pad to {padded}"
        )
    local = size // world
    return rank * local, (rank + 1) * local


def take_ranges(tensor: Tensor, dim: int, ranges: Ranges, *, padded_size: int | None = None) -> Tensor:
    """The concatenation of `ranges` along `dim`, as contiguous storage of its own.

    Ranges may repeat, interleave or overlap those of other ranks (fused and replicated weights). With `padded_size` the
    tensor counts as continued with zeros up to that size, without ever being copied to it.

    Raises:
        ValueError: `dim` is out of range, or a range is not within the (padded) size.
    """
    dim = _check_dim(tensor, dim)
    size = tensor.shape[dim]
    limit = size if padded_size is None else padded_size
    if limit < size:
        raise ValueError(f"padded size {limit} is smaller than the size {size} along dim {dim}")
    for start, stop in ranges:
        if not 0 <= start <= stop <= limit:
            raise ValueError(
                f"range {start}..{stop} is not within 0..{limit} along dim {dim} of shape {tuple(tensor.shape)}"
            )
    shape = list(tensor.shape)
    shape[dim] = sum(stop - start for start, stop in ranges)
    taken = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    offset = 0
    for start, stop in ranges:
        real = max(min(stop, size) - start, 0)
        taken.narrow(dim, offset, real).copy_(tensor.narrow(dim, min(start, size), real))
        taken.narrow(dim, offset + real, stop - start - real).zero_()
        offset += stop - start
    return taken


def slice_parameter(
    full: Tensor,
    dim: int,
    ranges: Ranges,
    padded_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """`take_ranges` of a parameter, as a parameter that is trained if the full one is."""
    local = take_ranges(full.detach(), dim, ranges, padded_size=padded_size)
    return nn.Parameter(local.to(device=device, dtype=dtype), requires_grad=full.requires_grad)


def merge_ranges(shards: Sequence[Tensor], dim: int, ranges: Sequence[Ranges], size: int) -> Tensor:
    """Put slices that were taken with `take_ranges` back where they came from: its inverse, padding dropped.

    Args:
        shards: One per rank.
        dim: The dim along which they were cut.
        ranges: The ranges of each rank.
        size: The full size along `dim`, without padding.

    Raises:
        ValueError: Shards and ranges do not match, an index is missing, or replicas of an index differ.
    """
    if len(shards) != len(ranges) or not shards:
        raise ValueError(f"{len(shards)} shards, but ranges for {len(ranges)} ranks")
    dim = _check_dim(shards[0], dim)
    shape = list(shards[0].shape)
    shape[dim] = size
    full = torch.empty(shape, dtype=shards[0].dtype, device=shards[0].device)
    seen = torch.zeros(size, dtype=torch.bool)
    for rank, (shard, held) in enumerate(zip(shards, ranges, strict=True)):
        length = sum(stop - start for start, stop in held)
        if shard.shape[dim] != length:
            raise ValueError(f"shard {rank} has size {shard.shape[dim]} along dim {dim}, its ranges have {length}")
        offset = 0
        for start, stop in held:
            count = max(min(stop, size) - start, 0)
            piece, place = shard.narrow(dim, offset, count), full.narrow(dim, min(start, size), count)
            again = seen[start : start + count].nonzero().flatten().to(full.device)
            if len(again) and not torch.equal(piece.index_select(dim, again), place.index_select(dim, again)):
                raise ValueError(
                    f"rank {rank} and a rank before it hold different values in {start}..{stop} of dim {dim}"
                )
            place.copy_(piece)
            seen[start : start + count] = True
            offset += stop - start
    if not bool(seen.all()):
        raise ValueError(f"no rank holds index {int((~seen).nonzero()[0])} of dim {dim}, whose size is {size}")
    return full


def _check_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim {dim} is out of range for shape {tuple(tensor.shape)}")
    return dim % tensor.ndim
