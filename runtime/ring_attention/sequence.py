"""Which tokens a context-parallel rank holds: cut them out of a full tensor, and put a full tensor together again.

All functions follow `parcompile.layout.sequence.token_ranges`: for the whole sequence or, where `documents` (borders as
in `cu_seqlens`) are given, for each document on its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout, token_ranges
from parcompile.runtime.transport.backend import to_device


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
    cp = 1 if group is None else dist.get_world_size(group)
    parts = [tensor.detach().contiguous()]
    if cp > 1:
        local = parts[0]
        parts = [torch.empty_like(local) for _ in range(cp)]
        dist.all_gather(parts, local, group=group)
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
