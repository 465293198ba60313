"""Collectives under way, and what they give once they are through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
