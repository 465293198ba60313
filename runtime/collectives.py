"""Differentiable collectives over a process group.

A collective on tensors spread over ranks is a linear map, and its backward is the transposed map: another collective.
The six functions are three such pairs; the backward of each is its partner.

| function | forward | backward | where tensor parallelism uses it |
|---|---|---|---|
| `copy_to_group` | identity | all-reduce | replicated activations enter a region of sharded weights |
| `reduce_from_group` | all-reduce | identity | they leave it |
| `gather_from_sequence` | all-gather | reduce-scatter | a split sequence enters the region |
| `reduce_scatter_to_sequence` | reduce-scatter | all-gather | it leaves the region split again |
| `scatter_to_group` | own slice | all-gather | a replicated tensor is cut |
| `gather_from_group` | all-gather | own slice | a cut tensor is put together, for replicated use |

Reductions are sums. `group` is any process group that holds the calling rank; None, or a group of one, makes every
function the identity (None does *not* mean the default group). Slices lie in group-rank order along `dim`.

Below the differentiable functions stand the plain ones, `start_…`, which return a `Pending` result, so that the caller
can compute while the bytes travel. Operator names follow Megatron-LM (arXiv 1909.08053, section 3; arXiv 2205.05198,
section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Group",
    "Pending",
    "copy_to_group",
    "gather_from_group",
    "gather_from_sequence",
    "group_rank",
    "group_size",
    "reduce_from_group",
    "reduce_scatter_to_sequence",
    "scatter_to_group",
    "scatter_to_sequence",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
]

Group = dist.ProcessGroup | None
"""The ranks that a tensor is spread over; None stands for this rank alone."""


def group_size(group: Group) -> int:
    """Number of ranks in `group`."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Index of this rank within `group`."""
    return 0 if group is None else dist.get_rank(group)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Use a replicated tensor in rank-dependent work: its gradient is the sum of what the ranks contribute."""
    return x if group_size(group) == 1 else _apply(_Copy, x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Sum partial results over the ranks; every rank gets the sum, bit for bit the same."""
    return x if group_size(group) == 1 else _apply(_Reduce, x, group)


def gather_from_sequence(x: Tensor, dim: int, group: Group) -> Tensor:
    """Put a split tensor together for rank-dependent work: [.., n, ..] becomes [.., n · ranks, ..] along `dim`."""
    return x if group_size(group) == 1 else _apply(_GatherSum, x, dim, group)


def reduce_scatter_to_sequence(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum partial results over the ranks and keep the own slice: [.., n · ranks, ..] becomes [.., n, ..] along `dim`.

    Raises:
        ValueError: The size along `dim` is not a multiple of the number of ranks.
    """
    return x if group_size(group) == 1 else _apply(_ReduceScatter, x, dim, group)


def scatter_to_group(x: Tensor, dim: int, group: Group) -> Tensor:
    """Keep the own slice of a replicated tensor: [.., n · ranks, ..] becomes [.., n, ..] along `dim`.

    Raises:
        ValueError: The size along `dim` is not a multiple of the number of ranks.
    """
    return x if group_size(group) == 1 else _apply(_Scatter, x, dim, group)


def gather_from_group(x: Tensor, dim: int, group: Group) -> Tensor:
    """Put a split tensor together for replicated work: [.., n, ..] becomes [.., n · ranks, ..] along `dim`.

    Every rank must then do the same with the result, since only its own slice of the gradient is used.
    """
    return x if group_size(group) == 1 else _apply(_Gather, x, dim, group)


scatter_to_sequence = scatter_to_group
"""`scatter_to_group`, by the name that matches the other two of the sequence-parallel region."""


def _apply(function: Any, *arguments: object) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_from_group(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # Not in place: x, or the gradient that this is called on, may be in use elsewhere.
        return start_all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return copy_to_group(grads[0], ctx.group), None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_all_gather(x, dim, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_to_sequence(grads[0], ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_reduce_scatter(x, dim, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_from_sequence(grads[0], ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        size = _slice_size(x, dim, group)
        return x.narrow(dim, group_rank(group) * size, size).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_from_group(grads[0], ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_all_gather(x, dim, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_to_group(grads[0], ctx.dim, ctx.group), None, None


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way. Buffers stay alive and must not be written until `wait` has returned."""

    works: tuple[Any, ...]
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Wait for the transfer (on CUDA: make the current stream wait) and return the result."""
        for work in self.works:
            work.wait()
        return self.finish()


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous tensor `x` over the ranks, in place."""
    return Pending((dist.all_reduce(x, group=group, async_op=True),), lambda: x)


def start_all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Pending:
    """Collect the ranks' equally shaped slices along `dim`."""
    x, ranks = x.contiguous(), group_size(group)
    gathered = x.new_empty(ranks, *x.shape)
    if _by_exchange(x):
        rank = group_rank(group)
        gathered[rank].copy_(x)
        works = start_exchange(((peer, x, gathered[peer]) for peer in range(ranks) if peer != rank), group)
    else:
        works = (dist.all_gather_into_tensor(gathered.view(-1), x.view(-1), group=group, async_op=True),)
    dim = dim % x.ndim
    return Pending(works, lambda: gathered.movedim(0, dim).flatten(dim, dim + 1))


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Pending:
    """Sum `x` over the ranks; each keeps its slice along `dim`."""
    ranks, rank = group_size(group), group_rank(group)
    size, dim = _slice_size(x, dim, group), dim % x.ndim
    slices = x.reshape(*x.shape[:dim], ranks, size, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()
    if not _by_exchange(x):
        total = torch.empty_like(slices[rank])
        return Pending(
            (dist.reduce_scatter_tensor(total.view(-1), slices.view(-1), group=group, async_op=True),), lambda: total
        )
    received = [slices[rank] if peer == rank else torch.empty_like(slices[rank]) for peer in range(ranks)]
    works = start_exchange(((peer, slices[peer], received[peer]) for peer in range(ranks) if peer != rank), group)
    # In rank order, whatever the order of arrival; `sum` rounds half-precision only once.
    return Pending(works, lambda: received[0] + received[1] if ranks == 2 else torch.stack(received).sum(0))


def start_exchange(parts: Iterable[tuple[int, Tensor, Tensor]], group: dist.ProcessGroup) -> tuple[Any, ...]:
    """Send and receive one contiguous tensor per (group rank of the peer, tensor to send, tensor to fill)."""
    parts = tuple(parts)
    receives = [dist.irecv(fill, group=group, group_src=peer) for peer, _, fill in parts]
    sends = [dist.isend(send, group=group, group_dst=peer) for peer, send, _ in parts]
    return (*receives, *sends)


def _by_exchange(x: Tensor) -> bool:
    # Gloo carries CPU tensors. Its own all-gather and reduce-scatter take 3 to 4 times as long as the same bytes in
    # direct exchanges (16 MB per rank on two ranks: 46 and 54 ms against 13.5 ms).
    return x.is_cpu


def _slice_size(x: Tensor, dim: int, group: dist.ProcessGroup) -> int:
    ranks = group_size(group)
    size, rest = divmod(x.shape[dim], ranks)
    if rest:
        raise ValueError(
            f"dim {dim} of shape {tuple(x.shape)} cannot be split over {ranks} ranks: "
            f"{x.shape[dim]} % {ranks} = {rest}; pad it to {(size + 1) * ranks}"
        )
    return size
