"""Collectives under way: started here, waited for by the caller, who can compute while the bytes travel.

Only torch.distributed's own collectives and point-to-point messages are used. Nothing here is differentiable; see
`collectives` for what is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "EXCHANGE_BYTES",
    "SWAP_BYTES",
    "Gathering",
    "Group",
    "Pending",
    "group_rank",
    "group_size",
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
    """[ranks, *piece]."""
    pieces: list[tuple[int, list[Any]]]
    """The ranks in the order in which their pieces are looked for, with what each has to wait for."""
    sends: list[Any]

    def arrivals(self) -> Iterator[tuple[int, Tensor]]:
        """Every rank's piece, with its rank: the own one first, the others as they come."""
        for rank, works in self.pieces:
            _wait(works)
            yield rank, self.buffer[rank]
        _wait(self.sends)

    def wait(self, dim: int) -> Tensor:
        """Wait for all pieces and join them along `dim`."""
        for _, works in self.pieces:
            _wait(works)
        _wait(self.sends)
        ranks, *shape = self.buffer.shape
        dim %= len(shape)
        if math.prod(shape[:dim]) == 1:  # the pieces lie one after the other already
            shape[dim] *= ranks
            return self.buffer.view(shape)
        return self.buffer.movedim(0, dim).flatten(dim, dim + 1)


EXCHANGE_BYTES = 2**19
"""Work is cut up to overlap with pieces of this size and more; more than two ranks exchange such pieces one by one."""

SWAP_BYTES = 2**22
"""Two ranks add up tensors of at most this size by swapping them whole."""


def travels_in_pieces(device: torch.device, piece_bytes: int) -> bool:
    """Whether work on the pieces of a gather or a reduction should overlap with their transfer.

    So it is for large pieces on the CPU, where nothing here uses gloo's own all-gather and reduce-scatter, which take 3
    to 4 times as long as the same bytes in direct exchanges (16 MB per rank on two ranks: 46 and 54 ms against 13.5
    ms). Between two ranks, and for small pieces, one all-to-all carries them: of gloo's collectives the quickest at
    every size. Large pieces between more ranks are posted one by one, so that the first can be used as it arrives;
    small ones would each cost about a millisecond when the cores are busy, since gloo's receiving thread spins while
    the posting one holds a connection. Elsewhere the backend's own collectives are used.
    """
    return piece_bytes >= EXCHANGE_BYTES and _exchanges(device)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous tensor `x` over the ranks, in place."""
    if group_size(group) == 2 and x.nbytes <= SWAP_BYTES and _exchanges(x.device):
        received = torch.empty_like(x)
        work = _start_swap(x, received, group)
        return Pending([work], lambda: x.add_(received))
    work = dist.all_reduce(x, group=group, async_op=_asynchronous())
    return Pending([work], lambda: x)


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Gathering:
    """Collect the ranks' equally shaped tensors."""
    x, ranks, rank = x.contiguous(), group_size(group), group_rank(group)
    buffer, peers = x.new_empty(ranks, *x.shape), _peers(rank, ranks)
    if not _exchanges(x.device):
        work = _all_gather(buffer.flatten(0, 1), x, group=group, async_op=_asynchronous())
        return Gathering(buffer, [(rank, [work]), *((peer, []) for peer in peers)], [])
    if ranks > 2 and x.nbytes < EXCHANGE_BYTES:
        work = dist.all_to_all_single(buffer, x.repeat(ranks, *[1] * x.ndim), group=group, async_op=True)
        return Gathering(buffer, [(rank, [work]), *((peer, []) for peer in peers)], [])
    if ranks == 2:
        receives, sends = [(peers[0], [_start_swap(x, buffer[peers[0]], group)])], []
    else:
        receives = [(peer, [dist.irecv(buffer[peer], group=group, group_src=peer)]) for peer in peers]
        sends = [dist.isend(x, group=group, group_dst=peer) for peer in reversed(peers)]
    buffer[rank].copy_(x)
    return Gathering(buffer, [(rank, []), *receives], sends)


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Pending:
    """Sum `x` over the ranks; each keeps its slice along `dim`."""
    ranks, dim = group_size(group), dim % x.ndim
    size, exchanges = slice_size(x.shape, dim, ranks), _exchanges(x.device)
    if exchanges and (ranks == 2 or travels_in_pieces(x.device, x.nbytes // ranks)):
        return start_sum_of_pieces(lambda peer: x.narrow(dim, peer * size, size).contiguous(), group)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    if math.prod(shape[:dim]) != 1:  # the slices do not lie one after the other
        x = x.reshape(*x.shape[:dim], ranks, *shape[dim:]).movedim(dim, 0)
    if exchanges:
        slices = x.contiguous().view(ranks, *shape)
        received = torch.empty_like(slices)
        work = dist.all_to_all_single(received, slices, group=group, async_op=True)
        return Pending([work], lambda: received.sum(0))
    total, slices = x.new_empty(shape), x.contiguous().view(ranks * shape[0], *shape[1:])
    work = _reduce_scatter(total, slices, group=group, async_op=_asynchronous())
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
        if ranks == 2:
            works.append(_start_swap(piece, received[peer], group))
        else:
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


def _start_swap(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup) -> Any:
    """Of two ranks: what each has, contiguous, for the other. One all-to-all that carries nothing to its own rank."""
    sizes = [0, 1] if group_rank(group) == 0 else [1, 0]
    return dist.all_to_all_single(
        incoming.unsqueeze(0), outgoing.unsqueeze(0), sizes, sizes, group=group, async_op=True
    )


EXCHANGING = {"cpu"}
"""Types of devices on which gloo carries messages."""


def _exchanges(device: torch.device) -> bool:
    return device.type in EXCHANGING and _asynchronous()


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
