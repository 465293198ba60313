"""Collectives under way: those of a backend itself, copies to a device, and messages that continue others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""The ranks that a tensor is spread over; None stands for this rank alone."""


def group_size(group: Group) -> int:
    """Number of ranks in `group`."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Index of this rank within `group`."""
    return 0 if group is None else dist.get_rank(group)


def gather_objects(mine: Any, group: Group = None) -> list[Any]:
    """What each rank of a group gives, in the order of its ranks; None stands for all ranks. Every rank calls it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def gather_tensors(mine: Tensor, group: Group) -> list[Tensor]:
    """The tensors of a group's ranks, all of one shape and type, in the order of its ranks. Not differentiable."""
    mine = mine.detach().contiguous()
    if group is None or dist.get_world_size(group) == 1:
        return [mine]
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return found


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


def peers(rank: int, ranks: int) -> list[int]:
    """The other ranks, the nearest first, so that no rank is everyone's first choice."""
    return [(rank - step) % ranks for step in range(1, ranks)]


_further = False


def continues() -> bool:
    """Whether what is sent now is a further piece of a collective, which counts as one message."""
    return _further


@contextlib.contextmanager
def continuing(further: bool = True) -> Iterator[None]:
    """What is sent within it continues a collective that has begun, where `further` says so."""
    global _further
    before, _further = _further, further or _further
    try:
        yield
    finally:
        _further = before


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way. Its buffers stay alive, and must not be written, until `wait` has returned."""

    works: list[Any]
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Wait for the transfer (on CUDA: make the current stream wait) and return the result."""
        wait_for(self.works)
        return self.finish()


@dataclass(frozen=True, slots=True)
class PendingGather:
    """An all-gather under way, whose pieces can be used as they arrive."""

    buffer: Tensor
    """[ranks, *piece]."""
    pieces: list[tuple[int, list[Any]]]
    """The ranks in the order in which their pieces are looked for, with what each has to wait for."""
    sends: list[Any]

    def arrivals(self) -> Iterator[tuple[int, Tensor]]:
        """Every rank's piece, with its rank: the own one first, the others as they come."""
        for rank, works in self.pieces:
            wait_for(works)
            yield rank, self.buffer[rank]
        wait_for(self.sends)

    def wait(self, dim: int) -> Tensor:
        """Wait for all pieces and join them along `dim`."""
        for _, works in self.pieces:
            wait_for(works)
        wait_for(self.sends)
        ranks, *shape = self.buffer.shape
        dim %= len(shape)
        if math.prod(shape[:dim]) == 1:  # the pieces lie one after the other already
            shape[dim] *= ranks
            return self.buffer.view(shape)
        return self.buffer.movedim(0, dim).flatten(dim, dim + 1)


def wait_for(works: list[Any]) -> None:
    """Wait for each work once: the list is empty afterwards."""
    while works:
        work = works.pop()
        if work is not None:  # a synchronous collective returns none
            work.wait()


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
    return Pending([dist.all_reduce(x, group=group, async_op=asynchronous())], lambda: x)


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
        tensor = tensor.contiguous().pin_memory()  # an expanded tensor cannot be pinned: its elements share memory
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
