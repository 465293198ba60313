"""Starts collectives by what is fastest for a backend: for gloo direct exchanges, for others their own.

gloo's own all-gather and reduce-scatter take 3 to 4 times as long as the same bytes in direct exchanges (16 MB per rank
on two ranks: 46 and 54 ms against 13.5 ms). Between two ranks, and for small pieces, one all-to-all carries them: of
gloo's collectives the quickest at every size. Large pieces between more ranks are posted one by one, so that the first
can be used as it arrives; small ones would each cost about a millisecond when the cores are busy, since gloo's
receiving thread spins while the posting one holds a connection.

Only torch.distributed's own collectives and point-to-point messages are used. Nothing here is differentiable; see
`parcompile.runtime.collectives` for what is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from . import backend
from .backend import Pending, PendingGather, asynchronous, continuing, group_rank, group_size, peers, slice_size

EXCHANGE_BYTES = 2**19
"""Work is cut up to overlap with pieces of this size and more; more than two ranks exchange such pieces one by one."""

SWAP_BYTES = 2**22
"""Two ranks add up tensors of at most this size by swapping them whole."""

_DEVICE_TYPES = {"cpu"}
"""Types of devices whose messages gloo carries."""


def carries(device: torch.device) -> bool:
    """Whether gloo carries the messages of a device, and collectives are therefore made of exchanges."""
    return stands_for_cpu(device) and asynchronous()


def stands_for_cpu(device: torch.device) -> bool:
    """Whether a device is a CPU, or stands for one."""
    return device.type in _DEVICE_TYPES


def stands_in_for(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, messages of this type of devices are sent as gloo's are: for devices that stand for CPUs."""
    return mock.patch.object(sys.modules[__name__], "_DEVICE_TYPES", {*_DEVICE_TYPES, device.type})


def swaps_whole(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether `x` is added up over two ranks by one swap, in place of an all-reduce."""
    return group_size(group) == 2 and x.nbytes <= SWAP_BYTES and carries(x.device)


def travels_in_pieces(device: torch.device, piece_bytes: int) -> bool:
    """Whether work on the pieces of a gather or a reduction should overlap with their transfer: large pieces."""
    return piece_bytes >= EXCHANGE_BYTES and carries(device)


def all_reduce_of_two(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous tensor `x` over two ranks, in place."""
    received = torch.empty_like(x)
    return Pending([_start_swap(x, received, group)], lambda: x.add_(received))


def all_gather(x: Tensor, group: dist.ProcessGroup) -> PendingGather:
    """Collect the ranks' contiguous, equally shaped tensors."""
    rank, ranks = group_rank(group), group_size(group)
    buffer, others = x.new_empty(ranks, *x.shape), peers(rank, ranks)
    if ranks > 2 and x.nbytes < EXCHANGE_BYTES:
        work = dist.all_to_all_single(buffer, x.repeat(ranks, *[1] * x.ndim), group=group, async_op=True)
        return PendingGather(buffer, [(rank, [work]), *((peer, []) for peer in others)], [])
    if ranks == 2:
        receives, sends = [(others[0], [_start_swap(x, buffer[others[0]], group)])], []
    else:
        receives = [(peer, [dist.irecv(buffer[peer], group=group, group_src=peer)]) for peer in others]
        sends = [_send(x, peer, group, place) for place, peer in enumerate(reversed(others))]
    buffer[rank].copy_(x)
    return PendingGather(buffer, [(rank, []), *receives], sends)


def reduce_scatter(slices: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous `slices` [ranks, *slice] over the ranks; each keeps its own. One all-to-all carries them."""
    received = torch.empty_like(slices)
    work = dist.all_to_all_single(received, slices, group=group, async_op=True)
    return Pending([work], lambda: received.sum(0))


def start_sum_of_pieces(piece_for: Callable[[int], Tensor], group: dist.ProcessGroup) -> Pending:
    """Send each peer the contiguous `piece_for(peer)`; the result is the sum of what the ranks have for this one.

    Each piece is computed just before it is sent, and the own one last: under the others' transfer.
    """
    ranks, rank = group_size(group), group_rank(group)
    received: dict[int, Tensor] = {}
    works = []
    for place, peer in enumerate(reversed(peers(rank, ranks))):
        piece = piece_for(peer)
        received[peer] = torch.empty_like(piece)
        if ranks == 2:
            works.append(_start_swap(piece, received[peer], group))
        else:
            works.append(dist.irecv(received[peer], group=group, group_src=peer))
            works.append(_send(piece, peer, group, place))
    received[rank] = piece_for(rank)

    def add_up() -> Tensor:
        # In rank order, whatever the order of arrival; `sum` rounds half precision only once.
        if ranks == 2:
            return received[0] + received[1]
        return torch.stack([received[peer] for peer in range(ranks)]).sum(0)

    return Pending(works, add_up)


def _send(x: Tensor, peer: int, group: dist.ProcessGroup, place: int) -> Any:
    """The message at a place among those of one collective."""
    with continuing(place > 0):
        return dist.isend(x, group=group, group_dst=peer)


def _start_swap(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup) -> Any:
    """Of two ranks: what each has, contiguous, for the other. One all-to-all that carries nothing to its own rank."""
    sizes = [0, 1] if group_rank(group) == 0 else [1, 0]
    return dist.all_to_all_single(
        incoming.unsqueeze(0), outgoing.unsqueeze(0), sizes, sizes, group=group, async_op=True
    )


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous tensor `x` over the ranks, in place."""
    return all_reduce_of_two(x, group) if swaps_whole(x, group) else backend.all_reduce(x, group)


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> PendingGather:
    """Collect the ranks' equally shaped tensors."""
    x = x.contiguous()
    return all_gather(x, group) if carries(x.device) else backend.all_gather(x, group)


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Pending:
    """Sum `x` over the ranks; each keeps its slice along `dim`.

    Raises:
        ValueError: The size along `dim` is not a multiple of the number of ranks.
    """
    ranks, dim = group_size(group), dim % x.ndim
    size, over_gloo = slice_size(x.shape, dim, ranks), carries(x.device)
    if over_gloo and (ranks == 2 or travels_in_pieces(x.device, x.nbytes // ranks)):
        return start_sum_of_pieces(lambda peer: x.narrow(dim, peer * size, size).contiguous(), group)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    if math.prod(shape[:dim]) != 1:  # the slices do not lie one after the other
        x = x.reshape(*x.shape[:dim], ranks, *shape[dim:]).movedim(dim, 0)
    slices = x.contiguous().view(ranks, *shape)
    return reduce_scatter(slices, group) if over_gloo else backend.reduce_scatter(slices, group)
