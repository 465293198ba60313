"""Messages between neighbours of a pipeline, under way while both compute.

Each kind of message in each direction has a communicator of its own (`parcompile.layout.schedule`): a communicator
carries the messages of two ranks in the order in which both post them. Sends and receives are posted from one thread in
the order of the schedule; on CUDA the current stream waits for them, not the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.schedule import Schedule

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
        groups: `schedule.lanes` process groups of all ranks of the pipeline, in the order of pp.
        rank: this one's place in the pipeline.
        device: where messages lie.
    """

    def __init__(
        self, schedule: Schedule, groups: Sequence[dist.ProcessGroup], rank: int, device: torch.device
    ) -> None:
        self._schedule, self._groups, self._rank, self._device = schedule, groups, rank, device
        self._under_way: dict[int, deque[tuple[tuple[Tensor, ...], list[Any]]]] = {}
        self._warm_up()

    def receive(self, source: int, like: Sequence[Like], *, forward: bool) -> Arrival:
        """Asks for tensors of these shapes and types."""
        group = self._groups[self._schedule.lane(source, self._rank, forward=forward)]
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in like)
        return Arrival(tensors, [dist.irecv(one, group=group, group_src=source) for one in tensors])

    def send(self, target: int, tensors: Sequence[Tensor], *, forward: bool) -> None:
        """Sends tensors, which stay as they are until they have arrived: nobody may write into them."""
        lane = self._schedule.lane(self._rank, target, forward=forward)
        under_way = self._under_way.setdefault(lane, deque())
        while under_way and all(work.is_completed() for work in under_way[0][1]):
            under_way.popleft()
        while len(under_way) >= self._schedule.sends_under_way:
            wait_for(under_way.popleft()[1])
        whole = tuple(one.contiguous() for one in tensors)
        group = self._groups[lane]
        under_way.append((whole, [dist.isend(one, group=group, group_dst=target) for one in whole]))

    def finish(self) -> None:
        """Waits until everything that was sent has arrived."""
        for under_way in self._under_way.values():
            while under_way:
                wait_for(under_way.popleft()[1])

    def _warm_up(self) -> None:
        """First messages, neighbour by neighbour in one order: a communicator is made when both its ends use it."""
        ranks = self._schedule.pp
        for sender in range(ranks if self._schedule.virtual > 1 else ranks - 1):
            receiver = (sender + 1) % ranks
            for source, target, forward in ((sender, receiver, True), (receiver, sender, False)):
                if self._rank == source:
                    self.send(target, [torch.zeros(1, device=self._device)], forward=forward)
                    self.finish()
                elif self._rank == target:
                    self.receive(source, [((1,), torch.float32)], forward=forward).wait()
