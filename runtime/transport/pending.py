"""Collectives under way: groups, messages that continue others, and what they give once they are through."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

# The ranks that a tensor is spread over, and how large their slices are.

Group = dist.ProcessGroup | None
"""The ranks that a tensor is spread over; None stands for this rank alone."""


def group_size(group: Group) -> int:
    """Number of ranks in `group`."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """Index of this rank within `group`."""
    return 0 if group is None else dist.get_rank(group)


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


# Collectives that travel as several messages: which message continues one that has begun.

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


# Collectives under way, and what they give once they are through.


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
