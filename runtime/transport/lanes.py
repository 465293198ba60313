"""Messages between neighbours of a pipeline, under way while both compute.

Each lane has a communicator of its two ranks (`parcompile.layout.pipeline`), which both post their messages on in the
same order. Once NCCL has connected a communicator, c10d puts all sends and receives of a rank on it into one stream,
where each waits for its other end: what shares a communicator with another lane would wait for that lane. Sends and
receives are posted from one thread in the order of the schedule; on CUDA the current stream waits for them, not the
host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.pipeline import Lane, Schedule

from .pending import wait_for

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
        self._warm_up()

    def receive(self, source: int, like: Sequence[Like], *, forward: bool) -> Arrival:
        """Asks for tensors of these shapes and types."""
        lane = Lane(source, self._rank, forward)
        group = self._groups[lane]
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
