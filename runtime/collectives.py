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

Below the differentiable functions stand the plain ones, `start_…`: they return a collective under way, so that the
caller can compute while the bytes travel. Operator names follow Megatron-LM (arXiv 1909.08053, section 3; arXiv
2205.05198, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Gathering",
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
    "slice_size",
    "start_all_gather",
    "start_all_reduce",
    "start_reduce_scatter",
    "start_sum_of_pieces",
    "travels_in_pieces",
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
        return start_all_gather(x, group).wait(dim)

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
        size = slice_size(x.shape, dim, group_size(group))
        return x.narrow(dim, group_rank(group) * size, size).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_from_group(grads[0], ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return start_all_gather(x, group).wait(dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_to_group(grads[0], ctx.dim, ctx.group), None, None


# The names since torch 2.13, which deprecates the older ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way. Its buffers stay alive, and must not be written, until `wait` has returned."""

    works: list[Any]
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Wait for the transfer (on CUDA: make the current stream wait) and return the result."""
        _wait(self.works)
        return self.finish()


@dataclass(frozen=True, slots=True)
class Gathering:
    """An all-gather under way, whose pieces can be used as they arrive."""

    buffer: Tensor
    """[ranks, *piece]; this rank's own piece is there from the start."""
    rank: int
    receives: list[tuple[int, Any]]
    others: list[Any]

    def arrivals(self) -> Iterator[tuple[int, Tensor]]:
        """Every rank's piece, with its rank: the own one first, the others as they come."""
        yield self.rank, self.buffer[self.rank]
        while self.receives:
            rank, work = self.receives.pop(0)
            work.wait()
            yield rank, self.buffer[rank]
        _wait(self.others)

    def wait(self, dim: int) -> Tensor:
        """Wait for all pieces and join them along `dim`."""
        for _ in self.arrivals():
            pass
        dim = dim % (self.buffer.ndim - 1)
        return self.buffer.movedim(0, dim).flatten(dim, dim + 1)


EXCHANGE_BYTES = 2**19
"""Pieces of this size and more travel in exchanges, where gloo carries them."""


def travels_in_pieces(device: torch.device, piece_bytes: int) -> bool:
    """Whether a gather or a reduction is one exchange per peer, so that work on the pieces can overlap.

    So it is for large pieces on the CPU: gloo's own all-gather and reduce-scatter take 3 to 4 times as long as the same
    bytes in direct exchanges (16 MB per rank on two ranks: 46 and 54 ms against 13.5 ms). Small ones are left to gloo,
    which posts them from a thread of its own: posted from here, each costs about a millisecond when the cores are busy,
    since gloo's receiving thread spins while the posting one holds a connection. Elsewhere the backend's own are used.
    """
    return device.type == "cpu" and piece_bytes >= EXCHANGE_BYTES and _asynchronous()


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous tensor `x` over the ranks, in place."""
    work = dist.all_reduce(x, group=group, async_op=_asynchronous())
    return Pending([work], lambda: x)


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Gathering:
    """Collect the ranks' equally shaped tensors."""
    x, ranks, rank = x.contiguous(), group_size(group), group_rank(group)
    buffer = x.new_empty(ranks, *x.shape)
    if not travels_in_pieces(x.device, x.nbytes):
        work = _all_gather(buffer.view(-1), x.view(-1), group=group, async_op=_asynchronous())
        return Gathering(buffer, rank, [], [work])
    peers = _peers(rank, ranks)
    receives = [(peer, dist.irecv(buffer[peer], group=group, group_src=peer)) for peer in peers]
    sends = [dist.isend(x, group=group, group_dst=peer) for peer in reversed(peers)]
    buffer[rank].copy_(x)
    return Gathering(buffer, rank, receives, sends)


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Pending:
    """Sum `x` over the ranks; each keeps its slice along `dim`."""
    ranks, dim = group_size(group), dim % x.ndim
    size = slice_size(x.shape, dim, ranks)
    slices = x.reshape(*x.shape[:dim], ranks, size, *x.shape[dim + 1 :]).movedim(dim, 0)
    if travels_in_pieces(x.device, x.nbytes // ranks):
        return start_sum_of_pieces(lambda peer: slices[peer].contiguous(), group)
    total = x.new_empty(slices.shape[1:])
    flat = slices.contiguous().view(-1)
    work = _reduce_scatter(total.view(-1), flat, group=group, async_op=_asynchronous())
    return Pending([work], lambda: total)


def start_sum_of_pieces(piece_for: Callable[[int], Tensor], group: dist.ProcessGroup) -> Pending:
    """Send each peer the contiguous `piece_for(peer)`; the result is the sum of what the ranks have for this one.

    Each piece is computed just before it is sent, and the own one last: under the others' transfer.
    """
    ranks, rank = group_size(group), group_rank(group)
    received: dict[int, Tensor] = {}
    works = []
    for peer in reversed(_peers(rank, ranks)):
        piece = piece_for(peer)
        received[peer] = torch.empty_like(piece)
        works.append(dist.irecv(received[peer], group=group, group_src=peer))
        works.append(dist.isend(piece, group=group, group_dst=peer))
    received[rank] = piece_for(rank)

    def add_up() -> Tensor:
        # In rank order, whatever the order of arrival; `sum` rounds half precision only once.
        if ranks == 2:
            return received[0] + received[1]
        return torch.stack([received[peer] for peer in range(ranks)]).sum(0)

    return Pending(works, add_up)


def slice_size(shape: Sequence[int], dim: int, ranks: int) -> int:
    """The size of one of `ranks` equal slices along `dim`.

    Raises:
        ValueError: There are no equal slices.
    """
    size, rest = divmod(shape[dim], ranks)
    if rest:
        raise ValueError(
            f"dim {dim} of shape {tuple(shape)} cannot be split over {ranks} ranks: "
            f"{shape[dim]} % {ranks} = {rest}; pad it to {(size + 1) * ranks}"
        )
    return size


def _asynchronous() -> bool:
    # torch.compile traces synchronous collectives without a graph break, and schedules the waiting itself.
    return not torch.compiler.is_compiling()


def _wait(works: list[Any]) -> None:
    while works:
        work = works.pop()
        if work is not None:  # a synchronous collective returns none
            work.wait()


def _peers(rank: int, ranks: int) -> list[int]:
    # Nearest first, so that no rank is everyone's first choice.
    return [(rank - step) % ranks for step in range(1, ranks)]
