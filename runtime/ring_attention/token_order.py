"""Where the tokens of all ranks are in their sequences: for what looks at every key at once.

Shapes: B rows, S tokens of this rank, T tokens of all ranks without padding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.transport.backend import to_device

from .collator import pack_tensors
from .packing import Packing
from .sequence import local_positions

Borders = tuple[tuple[int, ...], ...]
"""For each row where its documents begin, and its length."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of this rank that follow one another in a document, in rows whose documents are the same."""

    rows: slice
    tokens: slice
    """Among the tokens of this rank."""
    first: int
    """Where the document begins among the T tokens,"""
    stop: int
    """where it ends,"""
    end: int
    """and where the run does."""


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """This rank's tokens among those of all ranks, in the order of the sequence or of the documents of a packing."""

    places: Tensor
    """int64 [S]: which of the T tokens each token of this rank is; −1 for padding."""
    starts: Tensor
    """int64 [1 or B, S]: the place at which the document of each token of this rank begins."""
    lengths: Tensor
    """int64 [1 or B, S]: tokens of that document."""
    gathered: Tensor
    """int64 [T]: where each of the T tokens is among the tokens of all ranks, one rank after the other."""
    runs: Callable[[], tuple[Run, ...]]
    """All tokens of this rank but padding, as runs; found once, on the host."""

    @property
    def length(self) -> int:
        """T."""
        return int(self.gathered.shape[0])

    def seen(self, queries: slice) -> Tensor:
        """Whether a query sees a key: no later one, and none of another document. Bool [1 or B, queries, T]."""
        keys = torch.arange(self.length, device=self.places.device)
        return (keys <= self.places[queries, None]) & (keys >= self.starts[:, queries, None])

    def gather(self, local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """[B, S, ..] of every rank to [B, T, ..] in order, on every rank. Not differentiable."""
        parts = [local.detach().contiguous()]
        if group is not None:
            parts = [torch.empty_like(parts[0]) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, local.detach().contiguous(), group=group)
        return torch.cat(parts, 1).index_select(1, self.gathered)


@functools.lru_cache(maxsize=4)
def order_of_sequence(
    length: int, layout: CpLayout, ranks: int, rank: int, documents: Borders | None, device: torch.device
) -> TokenOrder:
    """Sequences that a layout deals to the ranks, `length` tokens to each; `documents` for each row."""
    total = length * ranks
    with torch.device("cpu"):  # where a plan is tried without values, too
        dealt = [local_positions(layout, ranks, each, total) for each in range(ranks)]
        return _ordered(dealt[rank], torch.argsort(torch.cat(dealt)), _starts(documents, total), device)


@functools.lru_cache(maxsize=4)
def order_of_packing(packing: Packing, rank: int, device: torch.device) -> TokenOrder:
    """Packed documents, one after the other as the batch has them."""
    firsts = list(itertools.accumulate(packing.lengths, initial=0))
    with torch.device("cpu"):
        numbers = [torch.arange(start, stop) for start, stop in itertools.pairwise(firsts)]
        dealt = [pack_tensors(numbers, packing, each, -1) for each in range(packing.cp)]
        every = torch.cat(dealt)
        gathered = torch.empty(firsts[-1], dtype=torch.int64)
        gathered[every[every >= 0]] = (every >= 0).nonzero().flatten()
        return _ordered(dealt[rank], gathered, _starts((tuple(firsts),), firsts[-1]), device)


def order_of_last(new: int, total: int, documents: Sequence[Sequence[int]] | None, device: torch.device) -> TokenOrder:
    """The last `new` tokens of sequences that this rank has whole, whose borders count from the kept ones."""
    borders = None
    if documents is not None:
        borders = tuple(tuple(sorted({max(edge - row[-1] + total, 0) for edge in row})) for row in documents)
    places = torch.arange(total)
    return _ordered(places[total - new :], places, _starts(borders, total), device)


def _starts(documents: Borders | None, total: int) -> Tensor:
    """The place at which the document of each place begins: int64 [1 or rows, T]."""
    if documents is None:
        return torch.zeros(1, total, dtype=torch.int64)
    rows = [
        torch.cat([torch.full((stop - start,), start) for start, stop in itertools.pairwise(borders)])
        for borders in documents
    ]
    return torch.stack(rows)


def _ordered(places: Tensor, gathered: Tensor, starts: Tensor, device: torch.device) -> TokenOrder:
    runs = functools.cache(functools.partial(_runs, places, starts))
    own = places.clamp(min=0)
    lengths = _lengths(starts)[:, own]
    own_starts, gathered = to_device(starts[:, own], device), to_device(gathered, device)
    return TokenOrder(to_device(places, device), own_starts, to_device(lengths, device), gathered, runs)


def _lengths(starts: Tensor) -> Tensor:
    """From where the document of each place begins to how long it is [1 or rows, T]."""
    counts = (torch.unique_consecutive(row, return_counts=True)[1] for row in starts)
    return torch.stack([count.repeat_interleave(count) for count in counts])


def _runs(places: Tensor, starts: Tensor) -> tuple[Run, ...]:
    found = []
    for row, documents in enumerate(starts):
        own = documents[places.clamp(min=0)]
        goes_on = (places[1:] == places[:-1] + 1) & (own[1:] == own[:-1]) & (places[:-1] >= 0)
        edges = [0, *((~goes_on).nonzero().flatten() + 1).tolist(), places.shape[0]]
        for start, stop in itertools.pairwise(edges):
            place = int(places[start])
            if place < 0:
                continue
            first = int(own[start])
            last = int((documents <= first).sum())
            rows = slice(None) if starts.shape[0] == 1 else slice(row, row + 1)
            found.append(Run(rows, slice(start, stop), first, last, place + stop - start))
    return tuple(found)
