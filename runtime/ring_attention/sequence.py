"""Which tokens a context-parallel rank holds: cut them out of a full tensor, and put a full tensor together again.

All functions follow `parcompile.layout.sequence.token_ranges`: for the whole sequence or, where `documents` (borders as
in `cu_seqlens`) are given, for each document on its own.

How the documents of a batch are packed for context-parallel ranks.

Dealing a document to all ranks balances its attention perfectly and costs its keys' way around the ring. A whole
document on one rank costs no message, but only many of them balance. Which documents are dealt is chosen anew for each
batch, by the same arithmetic on every rank.

A rank's tokens are its parts of the dealt documents, one after the other, then its whole documents. Both are padded to
be equally long on all ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout, token_ranges
from parcompile.runtime.transport.backend import gather_tensors, to_device


def local_positions(
    layout: CpLayout | str, cp: int, rank: int, sequence_length: int, documents: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Positions in the sequence of the tokens that `rank` of `cp` holds, in its order: int64 [sequence_length / cp].

    Raises:
        ValueError: the sequence or a document cannot be cut into the layout's chunks.
    """
    ranges = _ranges(layout, cp, rank, sequence_length, documents)
    return torch.cat([torch.arange(tokens.start, tokens.stop, tokens.step) for tokens in ranges])


@functools.lru_cache(maxsize=8)
def positions_of_ranks(
    layout: CpLayout | str, cp: int, length: int, documents: tuple[int, ...] | None, device: torch.device
) -> Tensor:
    """`local_positions` of every rank, each of which holds `length` tokens: int64 [cp, length], kept for all layers."""
    with torch.device("cpu"):  # preflight makes tensors without values elsewhere
        dealt = [local_positions(layout, cp, rank, cp * length, documents) for rank in range(cp)]
        return to_device(torch.stack(dealt), device)


def split_sequence(
    tensor: Tensor,
    dim: int,
    layout: CpLayout | str,
    cp: int,
    rank: int,
    documents: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The part of a full-sequence tensor (token ids, labels, hidden states) that `rank` of `cp` holds, cut along `dim`.

    A view where the rank's tokens lie together, otherwise a copy.

    Raises:
        ValueError: the sequence or a document cannot be cut into the layout's chunks.
    """
    ranges = _ranges(layout, cp, rank, tensor.shape[dim], documents)
    before = (slice(None),) * (dim % tensor.dim())
    parts = [tensor[before + (slice(tokens.start, tokens.stop, tokens.step),)] for tokens in ranges]  # noqa: RUF005
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gather_sequence(
    tensor: Tensor,
    dim: int,
    layout: CpLayout | str,
    group: dist.ProcessGroup | None,
    documents: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The full-sequence tensor of which every rank holds its part, on every rank: undoes `split_sequence`.

    Not differentiable; for debugging. Every rank of the group calls it with equal shapes.
    """
    parts = gather_tensors(tensor, group)
    cp = len(parts)
    sequence_length = cp * tensor.shape[dim]
    order = torch.cat([local_positions(layout, cp, rank, sequence_length, documents) for rank in range(cp)])
    return torch.cat(parts, dim).index_select(dim, torch.argsort(order).to(tensor.device))


def _ranges(
    layout: CpLayout | str, cp: int, rank: int, sequence_length: int, documents: Tensor | Sequence[int] | None
) -> list[range]:
    # One rank holds everything, whatever the layout.
    layout = CpLayout(layout) if cp > 1 else CpLayout.CONTIGUOUS
    if documents is None:
        return list(token_ranges(layout, cp, rank, sequence_length))
    borders = documents.tolist() if isinstance(documents, Tensor) else list(documents)
    if borders[:1] != [0] or borders[-1] != sequence_length:
        raise ValueError(f"documents must rise from 0 to the sequence length {sequence_length}, got {borders}")
    return [
        range(start + tokens.start, start + tokens.stop, tokens.step)
        for start, stop in itertools.pairwise(borders)
        if stop > start
        for tokens in token_ranges(layout, cp, rank, stop - start)
    ]


# Packed documents: several texts in one sequence, none of which sees another.

Documents: TypeAlias = "Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]"
"""Borders [0, …, sequence length] for all rows of a batch, or one such list for each row."""


def document_borders(position_ids: Tensor) -> list[list[int]]:
    """Borders of the documents of each row, from positions [B, S] that begin anew with each document.

    A document begins wherever a position is not the one before plus 1.
    """
    length = position_ids.shape[1]
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return [[*row.nonzero().flatten().tolist(), length] for row in begins.cpu()]


def padding_borders(lengths: Tensor | Sequence[int], sequence_length: int) -> list[list[int]]:
    """Borders for rows that are padded on the right: the padding is a document of its own, which no text sees."""
    return [[0, int(length), sequence_length] for length in lengths]


def documents_of_rows(documents: Documents | None, batch: int) -> Iterator[tuple[slice, tuple[int, ...] | None]]:
    """Slices of the batch and the borders that hold for them; neighbouring rows with equal borders stay together.

    Raises:
        ValueError: there are lists for another number of rows.
    """
    if documents is None:
        yield slice(0, batch), None
        return
    listed = documents.tolist() if isinstance(documents, Tensor) else list(documents)
    if not listed or isinstance(listed[0], int):
        yield slice(0, batch), tuple(cast("list[int]", listed))
        return
    rows = [tuple(int(border) for border in cast("Sequence[int]", row)) for row in listed]
    if len(rows) != batch:
        raise ValueError(f"ring attention: documents are given for {len(rows)} rows, the batch has {batch}")
    start = 0
    for stop in range(1, batch + 1):
        if stop == batch or rows[stop] != rows[start]:
            yield slice(start, stop), rows[start]
            start = stop


_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class PackingCosts:
    """What a token costs beside attention, in units of one query-key pair of attention, forward and backward alike."""

    linear_pairs: float = 24_576.0
    """The linear layers of one token: 24 h² / 4 h for a hidden size h = 4096, four times as wide inside."""
    wire_pairs: float = 1024.0
    """One token's keys and values on their way around the ring, as far as computation does not hide it."""

    @classmethod
    def of_hidden_size(cls, hidden_size: int) -> PackingCosts:
        """Those of a model that is so wide."""
        return cls(linear_pairs=6.0 * hidden_size)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the documents of one batch are.

    `dealt` and `whole` hold numbers of documents: those dealt to all ranks, and for each rank those that it holds
    alone. `dealt_borders` [0, …] are the dealt documents' in the padded sequence of dealt documents; each is a multiple
    of the layout's chunks long. `whole_borders` are for each rank those of its own documents, [0, …, n] with one n for
    all ranks: the last document may be padding only. `lengths` are the true ones of all documents.
    """

    layout: CpLayout
    cp: int
    lengths: tuple[int, ...]
    dealt: tuple[int, ...]
    dealt_borders: tuple[int, ...]
    whole: tuple[tuple[int, ...], ...]
    whole_borders: tuple[tuple[int, ...], ...]

    @property
    def dealt_tokens(self) -> int:
        """Tokens of dealt documents on each rank."""
        return self.dealt_borders[-1] // self.cp

    @property
    def local_tokens(self) -> int:
        """Tokens on each rank."""
        return self.dealt_tokens + self.whole_borders[0][-1]

    @property
    def padding(self) -> float:
        """The share of all ranks' tokens that is padding."""
        return 1 - sum(self.lengths) / (self.cp * self.local_tokens)

    def balance(self) -> float:
        """Mean attention work of a rank divided by that of the busiest one; dealt documents are even."""
        shared = _pairs(self.dealt_borders) / self.cp
        work = [shared + _pairs(borders) for borders in self.whole_borders]
        return sum(work) / self.cp / max(work)


def pack_documents(
    lengths: Sequence[int],
    cp: int,
    *,
    layout: CpLayout | str = CpLayout.ZIGZAG,
    local_tokens: int | None = None,
    costs: PackingCosts | None = None,
) -> Packing:
    """The cheapest packing of documents of these lengths, where the k longest are dealt out, for some k.

    Args:
        lengths: tokens of each document, in the order of the batch.
        cp: context-parallel ranks.
        layout: how a document is dealt.
        local_tokens: pad every rank to exactly this many tokens.
        costs: of what is not attention; see `PackingCosts`.

    Raises:
        ValueError: there are no documents, an empty one, or more tokens than `local_tokens` leaves room for.
    """
    layout, costs = CpLayout(layout), costs or PackingCosts()
    if not lengths or min(lengths) < 1:
        raise ValueError(f"packing: expected documents of at least one token, got lengths {list(lengths)}")
    longest_first = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    found = [_pack(tuple(lengths), cp, layout, longest_first, dealt) for dealt in _counts(len(lengths))]
    fitting = [packing for packing in found if local_tokens is None or packing.local_tokens <= local_tokens]
    if not fitting:
        least = min(packing.local_tokens for packing in found)
        raise ValueError(
            f"packing: {sum(lengths)} tokens in {len(lengths)} documents take at least {least} tokens on each of "
            f"{cp} ranks with padding, {least} > local_tokens {local_tokens}"
        )
    best = min(fitting, key=lambda packing: _cost(packing, costs))
    return best if local_tokens is None else _padded(best, local_tokens)


def _counts(documents: int) -> list[int]:
    """How many documents to try to deal: none, all, and steps that grow in between."""
    between = {round(documents ** (step / _CANDIDATES)) for step in range(_CANDIDATES)}
    return sorted({0, documents} | between)


def _cost(packing: Packing, costs: PackingCosts) -> float:
    busiest = _pairs(packing.dealt_borders) / packing.cp + max(map(_pairs, packing.whole_borders))
    wire = packing.dealt_borders[-1] * (packing.cp - 1) / packing.cp
    return busiest + costs.linear_pairs * packing.local_tokens + costs.wire_pairs * wire


def _pairs(borders: Sequence[int]) -> float:
    """Query-key pairs of causal attention in each document."""
    return sum((stop - start) ** 2 / 2 for start, stop in itertools.pairwise(borders))


def _pack(lengths: tuple[int, ...], cp: int, layout: CpLayout, longest_first: list[int], dealt_count: int) -> Packing:
    chunks = layout.chunks_per_rank * cp
    dealt = longest_first[:dealt_count]
    whole: list[list[int]] = [[] for _ in range(cp)]
    tokens = [0] * cp
    # The longest first, to the rank with the fewest tokens: within 4/3 of the best (Graham 1969).
    for number in longest_first[dealt_count:]:
        rank = tokens.index(min(tokens))
        whole[rank].append(number)
        tokens[rank] += lengths[number]
    dealt_borders = itertools.accumulate((-(-lengths[number] // chunks) * chunks for number in dealt), initial=0)
    return Packing(
        layout,
        cp,
        lengths,
        tuple(dealt),
        tuple(dealt_borders),
        tuple(map(tuple, whole)),
        tuple(_whole_borders([lengths[number] for number in numbers], max(tokens)) for numbers in whole),
    )


def _whole_borders(lengths: list[int], total: int) -> tuple[int, ...]:
    borders = list(itertools.accumulate(lengths, initial=0))
    return tuple(borders if borders[-1] == total else [*borders, total])


def _padded(packing: Packing, local_tokens: int) -> Packing:
    total = local_tokens - packing.dealt_tokens
    return Packing(
        packing.layout,
        packing.cp,
        packing.lengths,
        packing.dealt,
        packing.dealt_borders,
        packing.whole,
        tuple(_whole_borders([packing.lengths[number] for number in numbers], total) for numbers in packing.whole),
    )
