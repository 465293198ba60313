"""Packed documents: several texts in one sequence, none of which sees another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

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
