"""Collectives under way: started here, waited for by the caller, who can compute while the bytes travel.

`backend` has what a backend's own collectives do, `gloo` has what CPUs need in their place, and chooses. Here are
messages between neighbours of a pipeline, and gathers in pieces: what travels while both compute.

Each lane has a communicator of its two ranks (`parcompile.layout.pipeline`), which both post their messages on in the
same order. Once NCCL has connected a communicator, c10d puts all sends and receives of a rank on it into one stream,
where each waits for its other end: what shares a communicator with another lane would wait for that lane. Sends and
receives are posted from one thread in the order of the schedule; on CUDA the current stream waits for them, not the
host.

For NCCL: gloo's pieces are those of single ranks (`gloo`). Here each piece is a collective of its own, which holds the
same rows of every rank. What each rank has is seen as [sequences, rows, features], and the whole as [sequences, ranks,
rows, features]. A piece is one sequence; of a single sequence it is some of the rows. The whole of one sequence lies in
one stretch of memory and is gathered in place; rows of a sequence are gathered into memory of their own.

Two pieces are under way at most: the next one starts before the product of this one is launched, and runs on the stream
of the communicator meanwhile. Started any earlier it would only take memory.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.pipeline import Lane, Schedule
from parcompile.layout.shards import MOST_PIECES, PIECE_BYTES

from . import backend, gloo
from .backend import Group, Pending, PendingGather, continuing, group_rank, group_size, slice_size, wait_for
from .gloo import start_all_gather, start_all_reduce, start_reduce_scatter, start_sum_of_pieces, travels_in_pieces

Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tensors on their way to this rank."""

    tensors: tuple[Tensor, ...]
    works: list[Any]

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, filled."""
        wait_for(self.works)
        for one in self.tensors:
            if one.is_cuda and type(one) is Tensor:
                one.record_stream(torch.cuda.current_stream())  # it was made in another
        return self.tensors


class Lanes:
    """The lanes of one pipeline, as one of its ranks sees them.

    Args:
        schedule: whose messages they carry.
        groups: of this rank's lanes, in an order that all ranks agree on.
        rank: this one's place in the pipeline.
        device: where messages lie.
    """

    def __init__(
        self, schedule: Schedule, groups: Mapping[Lane, dist.ProcessGroup], rank: int, device: torch.device
    ) -> None:
        self._schedule, self._groups, self._rank, self._device = schedule, groups, rank, device
        self._under_way: dict[Lane, deque[tuple[tuple[Tensor, ...], list[Any]]]] = {}
        on_gpu = device.type == "cuda" and torch.version.cuda is not None
        self._aside = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._warm_up()

    def receive(self, source: int, like: Sequence[Like], *, forward: bool) -> Arrival:
        """Asks for tensors of these shapes and types."""
        group = self._groups[Lane(source, self._rank, forward)]
        # c10d starts a message when the current stream has come to it: in the stream of the passes, behind the one that
        # is computed now. Nothing is launched in this stream.
        with contextlib.nullcontext() if self._aside is None else torch.cuda.stream(self._aside):
            tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in like)
            return Arrival(tensors, [dist.irecv(one, group=group, group_src=_other(group)) for one in tensors])

    def send(self, target: int, tensors: Sequence[Tensor], *, forward: bool) -> None:
        """Sends tensors, which stay as they are until they have arrived: nobody may write into them."""
        lane = Lane(self._rank, target, forward)
        under_way = self._under_way.setdefault(lane, deque())
        while under_way and all(work.is_completed() for work in under_way[0][1]):
            under_way.popleft()
        while len(under_way) >= self._schedule.sends_under_way:
            wait_for(under_way.popleft()[1])
        whole = tuple(one.contiguous() for one in tensors)
        group = self._groups[lane]
        under_way.append((whole, [dist.isend(one, group=group, group_dst=_other(group)) for one in whole]))

    def finish(self) -> None:
        """Waits until everything that was sent has arrived."""
        for under_way in self._under_way.values():
            while under_way:
                wait_for(under_way.popleft()[1])

    def _warm_up(self) -> None:
        """First messages, lane by lane in one order: a backend may make a communicator when both its ends use it."""
        for lane in self._groups:
            if lane.sender == self._rank:
                self.send(lane.receiver, [torch.zeros(1, device=self._device)], forward=lane.forward)
                self.finish()
            else:
                self.receive(lane.sender, [((1,), torch.float32)], forward=lane.forward).wait()


def _other(group: dist.ProcessGroup) -> int:
    """The other one of two ranks."""
    return 1 - dist.get_rank(group)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of every rank, of one sequence."""

    sequence: int
    start: int
    stop: int

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Of what one rank has, split along `dim`, these rows [rows, features]: a view of the contiguous `x`."""
        return x.view(math.prod(x.shape[:dim]), -1, x.shape[-1])[self.sequence, self.start : self.stop]

    def whole(self, x: Tensor, dim: int, ranks: int) -> Tensor:
        """Of the whole tensor these rows of all ranks [ranks, rows, features]: a view of the contiguous `x`."""
        return x.view(math.prod(x.shape[:dim]), ranks, -1, x.shape[-1])[self.sequence, :, self.start : self.stop]


def pieces_of(shape: Sequence[int], dim: int, nbytes: int, device: torch.device) -> list[Piece]:
    """The pieces in which a collective travels; one or none: it travels whole.

    Args:
        shape: of what one rank has of it, split along `dim`.
        dim: the sequence, counted from the front; not the last one.
        nbytes: its size over all ranks.
        device: where it lies.
    """
    if gloo.carries(device) or not backend.asynchronous():
        return []
    sequences, rows = math.prod(shape[:dim]), math.prod(shape[dim:-1])
    if sequences > 1:
        return [Piece(one, 0, rows) for one in range(sequences)] if nbytes >= sequences * PIECE_BYTES else []
    count = min(MOST_PIECES, rows, nbytes // PIECE_BYTES)
    return [Piece(0, rows * one // count, rows * (one + 1) // count) for one in range(count)]


def gather_in_pieces(
    x: Tensor, dim: int, pieces: Sequence[Piece], group: dist.ProcessGroup, into: Tensor | None = None
) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece [ranks, rows, features] once it has arrived, while the next one travels.

    `x` is what this rank has, contiguous. `into`, the contiguous whole, is filled as pieces arrive.
    """
    ranks = group_size(group)

    def start(piece: Piece) -> tuple[Tensor, Tensor | None, list[Any]]:
        own = piece.own(x, dim)
        target = None if into is None else piece.whole(into, dim, ranks)
        if target is not None and target.is_contiguous():
            return target, None, [backend.all_gather_into(target, own, group)]
        gathered = x.new_empty(ranks, *own.shape)
        return gathered, target, [backend.all_gather_into(gathered, own, group)]

    under_way = start(pieces[0])
    for place, piece in enumerate(pieces):
        gathered, target, works = under_way
        if place + 1 < len(pieces):
            with continuing():
                under_way = start(pieces[place + 1])
        wait_for(works)
        if target is not None:
            target.copy_(gathered)
        yield piece, gathered


def reduce_scatter_in_pieces(
    part_for: Callable[[Piece], Tensor], total: Tensor, dim: int, pieces: Sequence[Piece], group: dist.ProcessGroup
) -> Pending:
    """Sum `part_for(piece)` [ranks, rows, features], contiguous, over the ranks, into the contiguous `total`.

    Each part is computed while the one before it travels. All of them are kept until `wait`.
    """
    works, parts = [], []
    for place, piece in enumerate(pieces):
        parts.append(part_for(piece))
        with continuing(place > 0):
            works.append(backend.reduce_scatter_into(piece.own(total, dim), parts[-1], group))

    def finish() -> Tensor:
        parts.clear()
        return total

    return Pending(works, finish)
