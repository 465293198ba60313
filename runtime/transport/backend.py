"""What is started and not waited for: the collectives of a backend itself, and copies to a device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .pending import Pending, PendingGather, group_rank, group_size, peers

# The names since torch 2.13, which deprecates the older ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def asynchronous() -> bool:
    """Whether collectives are started asynchronously.

    Under torch.compile they are not: it traces synchronous collectives without a graph break, and schedules the waiting
    itself.
    """
    return not torch.compiler.is_compiling()


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous tensor `x` over the ranks, in place."""
    work = dist.all_reduce(x, group=group, async_op=asynchronous())
    return Pending([work], lambda: x)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> PendingGather:
    """Collect the ranks' contiguous, equally shaped tensors."""
    rank, ranks = group_rank(group), group_size(group)
    buffer = x.new_empty(ranks, *x.shape)
    work = all_gather_into(buffer, x, group)
    return PendingGather(buffer, [(rank, [work]), *((peer, []) for peer in peers(rank, ranks))], [])


def reduce_scatter(slices: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous `slices` [ranks, *slice] over the ranks; each keeps its own."""
    total = slices.new_empty(slices.shape[1:])
    return Pending([reduce_scatter_into(total, slices, group)], lambda: total)


def all_gather_into(buffer: Tensor, x: Tensor, group: dist.ProcessGroup) -> Any:
    """Collect the ranks' contiguous tensors in the contiguous `buffer` [ranks, *x]; returns what to wait for."""
    return _all_gather(buffer.flatten(0, 1), x, group=group, async_op=asynchronous())


def reduce_scatter_into(total: Tensor, slices: Tensor, group: dist.ProcessGroup) -> Any:
    """Sum the contiguous `slices` [ranks, *total] into the own contiguous `total`; returns what to wait for."""
    return _reduce_scatter(total, slices.flatten(0, 1), group=group, async_op=asynchronous())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host does not wait for the copy.

    A GPU copies pages only that cannot move: from others the driver copies first, while the host waits. torch keeps the
    pinned pages until the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class OnDevice:
    """A small tensor that the host has made, on each device that asks for it: copied once."""

    def __init__(self, made: Tensor) -> None:
        self._made, self._copies = made, dict[torch.device, Tensor]()

    def __call__(self, device: torch.device) -> Tensor:
        """The tensor there."""
        if device not in self._copies:
            self._copies[device] = to_device(self._made, device)
        return self._copies[device]
