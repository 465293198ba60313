"""Gradients and norms of parameters that tp ranks hold parts of, and slices drawn from one master weight.

Which parameters count in the gradient norm of every tensor-parallel rank.

DeepSpeed, like Megatron-LM, adds up the squared gradients of tensor-parallel rank 0 and, of the other ranks, only those
of parameters whose attribute `tensor_model_parallel` is true (`is_model_parallel_parameter` in
deepspeed/runtime/utils.py). The norm equals that of the whole model when each element counts exactly once: a shard is
marked on every rank, a replicated parameter on none, and a shard that several ranks hold (a replicated kv head) on the
first of them only.

A parameter that works on a rank's own tokens (a norm, a router, a bias of the sequence-parallel region) gets the
gradient of those tokens; the parts have to be summed over the tensor-parallel ranks. The row layers do that by
themselves; `sum_in_backward` does it for any other parameter.

Summed at once, in backward, gradients are whole wherever anybody looks at them (DeepSpeed takes them as they arrive);
that is one small all-reduce per parameter and backward. Summed later (`leave_partial`, `sum_together`), all of them
travel in one all-reduce per step, as in Megatron-LM's `finalize_model_grads`.

Draws slices of a master weight: any layout starts from bit-identical global weights.

No rank ever holds a whole matrix. The master weight is defined row block by row block: block i comes from a generator
of its own, seeded with the weight's seed + i. A rank draws only the blocks that its slice touches, on the CPU and in
float32 (float64 for float64), so neither the layout nor the device nor the precision of the run changes what is drawn.
The weight's seed comes from torch's default generator: ranks that have called `torch.manual_seed` alike, and build
their layers in the same order, agree on it.

Cuts full weights into the slices that ranks hold, and puts them together again.

Every function checks what it is given and names the numbers; nothing is truncated or rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.collectives import copy_to_group
from parcompile.runtime.transport import Group, group_rank

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


def mark_shard(parameter: nn.Parameter | None, replica_group: Group = None) -> None:
    """Mark `parameter` as this rank's shard; ranks of `replica_group` hold the same one."""
    if parameter is not None:
        parameter.tensor_model_parallel = group_rank(replica_group) == 0  # type: ignore[attr-defined]


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether the tensor-parallel ranks hold slices of this parameter, replicas of a slice included."""
    return hasattr(parameter, "tensor_model_parallel")


_GROUP, _LATER = "parcompile_partial_over", "parcompile_summed_later"
"""Attributes of a parameter: the ranks that its gradient is summed over, and whether a step does it at its end."""


def sum_in_backward(parameter: nn.Parameter, group: Group) -> None:
    """Sum the gradient of one parameter over `group` wherever it is computed; a frozen one has none.

    Whoever sums the gradients of whole steps takes this over: `leave_partial`.
    """

    def summed(gradient: Tensor) -> Tensor:
        if getattr(parameter, _LATER, False):
            return gradient
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    if parameter.requires_grad:
        parameter.register_hook(summed)  # type: ignore[no-untyped-call]
        mark_summed(parameter, group)


def mark_summed(parameter: nn.Parameter, group: Group) -> None:
    """Say that backward sums the gradient of a parameter over `group`, unless `leave_partial` takes it over."""
    setattr(parameter, _GROUP, group)


def summing(parameter: Tensor, group: Group) -> Tensor:
    """A parameter that was marked so, for use on this rank's own tokens: backward sums its gradient."""
    return parameter if getattr(parameter, _LATER, False) else copy_to_group(parameter, group)


def leave_partial(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Of these parameters the ones that backward sums, whose gradients it leaves partial from now on."""
    found = [parameter for parameter in parameters if parameter.requires_grad and hasattr(parameter, _GROUP)]
    for parameter in found:
        setattr(parameter, _LATER, True)
    return found


@torch.no_grad()
def sum_together(gradients: Sequence[Tensor], group: Group) -> None:
    """Sum gradients over the ranks in place, with one all-reduce for each type."""
    together: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        together[gradient.dtype].append(gradient)
    for grads in together.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):  # type: ignore[no-untyped-call]
            grad.copy_(total.view_as(grad))


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
