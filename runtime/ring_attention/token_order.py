"""Where the tokens of all ranks are in their sequences: for what looks at every key at once.

Windows of tokens over ranks: which rank makes what stands for a window, and whose tokens it takes for that.

A window is made where its last token is. What other ranks have of it, and of the window before where that counts too,
is sent there: at most a few tokens in front of each chunk. Windows begin anew in each document; tokens behind the last
whole window of a document are in none.

Shapes: B rows, S tokens of this rank, T tokens of all ranks without padding, R tokens that it receives, N windows that
it makes, M most windows of a rank, C most windows of a row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.transport.backend import gather_tensors, to_device

from .collator import pack_tensors
from .sequence import Packing, local_positions

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
        return torch.cat(gather_tensors(local, group), 1).index_select(1, self.gathered)


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


Part = tuple[slice, "Tensor | slice", slice]
"""Rows, tokens of this rank and windows of a document."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of all rows, as one rank works on them. All tensors but `begins` are int64."""

    rate: int
    travels: bool
    """Whether any rank takes a token of another one."""
    sent: Tensor
    """[tokens]: which of the B · S tokens go to other ranks, rank after rank."""
    send: tuple[int, ...]
    """How many of them to each rank."""
    receive: tuple[int, ...]
    """How many come of each."""
    tokens: Tensor
    """[N, tokens of a window, behind those of the window before where they count]: among the B · S and the R tokens."""
    missing: Tensor
    """bool, the same shape: there is no window before."""
    places: Tensor
    """[M]: the place in its document at which each window of this rank begins; 0 behind the last one."""
    gathered: Tensor
    """[B, C]: where each window of a row is among the M of all ranks, rank after rank; behind all of them for none."""
    begins: Tensor
    """[B, C]: the place in the sequence at which each window begins; T for none."""
    documents: tuple[Part, ...] = ()
    """Each document that has windows and tokens of this rank; all at once where every row is one."""

    @property
    def count(self) -> int:
        """C."""
        return self.begins.shape[1]

    def seen(self, places: Tensor, starts: Tensor) -> Tensor:
        """Whether a token may see a window, whole and of its own document: bool [B, S, C].

        `places` [S] of the tokens, and `starts` [1 or B, S] of their documents, in the sequence.
        """
        begins = self.begins[:, None]
        return (begins + self.rate <= places[:, None] + 1) & (begins >= starts[..., None])


@functools.lru_cache(maxsize=8)
def windows_of(
    rate: int,
    series: int,
    rows: int,
    length: int,
    layout: CpLayout,
    ranks: int,
    rank: int,
    documents: Borders | None,
    device: torch.device,
) -> Windows:
    """The windows of `rate` tokens of sequences of which each rank has `length` tokens.

    `series`: 2 where a window takes the tokens of the one before, too. `documents`: for each row.
    """
    with torch.device("cpu"):  # preflight makes tensors without values elsewhere
        dealt = [local_positions(layout, ranks, each, length * ranks) for each in range(ranks)]
        found = _windows(rate, series, dealt, rank, documents or ((0, length * ranks),) * rows)
        parts = ((slice(None),) * 3,) if documents is None else _documents(documents, dealt[rank], found.begins, device)
    moved = {one.name: getattr(found, one.name) for one in fields(found)}
    moved = {name: to_device(one, device) if isinstance(one, Tensor) else one for name, one in moved.items()}
    return Windows(**{**moved, "documents": parts})


def _windows(rate: int, series: int, dealt: list[Tensor], rank: int, borders: Borders) -> Windows:
    """`dealt`: the places in the sequence of the tokens of each rank."""
    ranks, rows, length = len(dealt), len(borders), len(dealt[0])
    holder, slot = (torch.empty(ranks * length, dtype=torch.int64) for _ in range(2))
    for each, own in enumerate(dealt):
        holder[own], slot[own] = each, torch.arange(length)
    listed = [
        (row, start, place)
        for row, edges in enumerate(borders)
        for start, stop in itertools.pairwise(edges)
        for place in range(0, stop - start - rate + 1, rate)
    ]
    row, first, place = torch.tensor(listed, dtype=torch.int64).view(-1, 3).unbind(1)
    begin, counts = first + place, torch.bincount(row, minlength=rows)
    maker = holder[begin + rate - 1]

    offsets = torch.arange(-(series - 1) * rate, rate)
    missing = place[:, None] + offsets < 0
    wanted = torch.where(missing, begin[:, None], begin[:, None] + offsets)
    source, every = holder[wanted], rows * length * ranks
    # Of each that is sent its receiver, its sender and itself, in this order.
    codes = (maker[:, None] * ranks + source) * every + row[:, None] * length * ranks + wanted
    sent = torch.tensor(sorted(set(codes[~missing & (source != maker[:, None])].tolist())), dtype=torch.int64)
    pair, number = sent // every, sent % every
    out, here, mine = pair % ranks == rank, pair // ranks == rank, maker == rank
    local = row[mine, None] * length + slot[wanted[mine]]
    received = rows * length + torch.searchsorted(sent[here], codes[mine])

    made = torch.bincount(maker, minlength=ranks)
    most, among = int(made.max()), torch.empty_like(maker)
    for each in range(ranks):
        among[maker == each] = each * most + torch.arange(int(made[each]))
    column = torch.arange(len(begin)) - (counts.cumsum(0) - counts)[row]
    gathered, begins = (torch.full((rows, int(counts.max())), none) for none in (ranks * most, ranks * length))
    gathered[row, column], begins[row, column] = among, begin
    return Windows(
        rate,
        travels=len(sent) > 0,
        sent=number[out] // (ranks * length) * length + slot[number[out] % (ranks * length)],
        send=tuple(torch.bincount(pair[out] // ranks, minlength=ranks).tolist()),
        receive=tuple(torch.bincount(pair[here] % ranks, minlength=ranks).tolist()),
        tokens=torch.where(source[mine] == rank, local, received),
        missing=missing[mine],
        places=F.pad(place[mine], (0, most - int(made[rank]))),
        gathered=gathered,
        begins=begins,
    )


def _documents(documents: Borders, own: Tensor, begins: Tensor, device: torch.device) -> tuple[Part, ...]:
    """Each document that has windows, and tokens on this rank."""
    found: list[Part] = []
    for row, borders in enumerate(documents):
        for start, stop in itertools.pairwise(borders):
            tokens = ((own >= start) & (own < stop)).nonzero().flatten()
            columns = ((begins[row] >= start) & (begins[row] < stop)).nonzero().flatten().tolist()
            if columns and len(tokens):
                found.append((slice(row, row + 1), to_device(tokens, device), slice(columns[0], columns[-1] + 1)))
    return tuple(found)
