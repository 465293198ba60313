"""Windows of tokens over ranks: which rank makes what stands for a window, and whose tokens it takes for that.

A window is made where its last token is. What other ranks have of it, and of the window before where that counts too,
is sent there: at most a few tokens in front of each chunk. Windows begin anew in each document; tokens behind the last
whole window of a document are in none.

Shapes: B rows, S tokens of this rank, T tokens of all ranks, R tokens that it receives, N windows that it makes, M most
windows of a rank, C most windows of a row.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from parcompile.layout.sequence import CpLayout

from .sequence import local_positions
from .token_order import Borders


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
    documents: tuple[tuple[slice, Tensor | slice, slice], ...]
    """Rows, tokens of this rank and windows of each document; all at once where every row is one."""

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
    total = length * ranks
    holder, slot = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
    for each in range(ranks):
        own = local_positions(layout, ranks, each, total)
        holder[own], slot[own] = each, torch.arange(length)
    borders = documents or ((0, total),) * rows
    begins = [
        torch.cat([torch.arange(a, max(a, b - rate + 1), rate) for a, b in itertools.pairwise(r)]) for r in borders
    ]
    firsts = [torch.cat([torch.full((max(0, b - a) // rate,), a) for a, b in itertools.pairwise(r)]) for r in borders]
    counts = torch.tensor([len(one) for one in begins])
    row, begin = torch.arange(len(borders)).repeat_interleave(counts), torch.cat(begins)
    place = begin - torch.cat(firsts)
    maker = holder[begin + rate - 1]

    offsets = torch.arange(-(series - 1) * rate, rate)
    missing = place[:, None] + offsets < 0
    wanted = torch.where(missing, begin[:, None], begin[:, None] + offsets)
    source, numbers = holder[wanted], row[:, None] * total + wanted
    # Of each that is sent its receiver, its sender and itself, in this order.
    codes = (maker[:, None] * ranks + source) * (len(borders) * total) + numbers
    sent = codes[~missing & (source != maker[:, None])].unique()
    pair, number = sent // (len(borders) * total), sent % (len(borders) * total)
    out, here = pair % ranks == rank, pair // ranks == rank
    mine = maker == rank
    local = row[mine, None] * length + slot[wanted[mine]]
    received = len(borders) * length + torch.searchsorted(sent[here], codes[mine])
    tokens = torch.where(source[mine] == rank, local, received)

    made = torch.bincount(maker, minlength=ranks)
    most = int(made.max())
    among = torch.empty_like(maker)
    for each in range(ranks):
        among[maker == each] = each * most + torch.arange(int(made[each]))
    column = torch.arange(len(begin)) - (counts.cumsum(0) - counts)[row]
    widest = int(counts.max())
    gathered, starts = (torch.full((len(borders), widest), one) for one in (ranks * most, total))
    gathered[row, column], starts[row, column] = among, begin
    places = torch.zeros(most, dtype=torch.int64)
    places[: int(made[rank])] = place[mine]
    own = local_positions(layout, ranks, rank, total)
    return Windows(
        rate,
        len(sent) > 0,
        (number[out] // total * length + slot[number[out] % total]).to(device),
        tuple(torch.bincount(pair[out] // ranks, minlength=ranks).tolist()),
        tuple(torch.bincount(pair[here] % ranks, minlength=ranks).tolist()),
        tokens.to(device),
        missing[mine].to(device),
        places.to(device),
        gathered.to(device),
        starts.to(device),
        tuple(_documents(documents, own, starts, device)) if documents else ((slice(None),) * 3,),
    )


def _documents(
    documents: Borders, own: Tensor, begins: Tensor, device: torch.device
) -> list[tuple[slice, Tensor | slice, slice]]:
    """Of each document that has windows, and tokens on this rank."""
    found: list[tuple[slice, Tensor | slice, slice]] = []
    for row, borders in enumerate(documents):
        for start, stop in itertools.pairwise(borders):
            tokens = ((own >= start) & (own < stop)).nonzero().flatten()
            columns = ((begins[row] >= start) & (begins[row] < stop)).nonzero().flatten().tolist()
            if columns and len(tokens):
                found.append((slice(row, row + 1), tokens.to(device), slice(columns[0], columns[-1] + 1)))
    return found
