"""Which tokens a context-parallel rank holds: cut them out of a full tensor, and put a full tensor together again.

All functions follow `parcompile.layout.sequence.token_ranges`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout, token_ranges


def local_positions(layout: CpLayout | str, cp: int, rank: int, sequence_length: int) -> Tensor:
    """Positions in the sequence of the tokens that `rank` of `cp` holds, in its order: int64 [sequence_length / cp].

    Raises:
        ValueError: the sequence cannot be cut into the layout's chunks.
    """
    ranges = token_ranges(CpLayout(layout), cp, rank, sequence_length)
    return torch.cat([torch.arange(tokens.start, tokens.stop) for tokens in ranges])


def split_sequence(tensor: Tensor, dim: int, layout: CpLayout | str, cp: int, rank: int) -> Tensor:
    """The part of a full-sequence tensor (token ids, labels, hidden states) that `rank` of `cp` holds, cut along `dim`.

    A view where the rank's tokens lie together, otherwise a copy.

    Raises:
        ValueError: the sequence cannot be cut into the layout's chunks.
    """
    ranges = token_ranges(CpLayout(layout), cp, rank, tensor.shape[dim])
    parts = [tensor.narrow(dim, tokens.start, len(tokens)) for tokens in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def gather_sequence(tensor: Tensor, dim: int, layout: CpLayout | str, group: dist.ProcessGroup | None) -> Tensor:
    """The full-sequence tensor of which every rank holds its part, on every rank: undoes `split_sequence`.

    Not differentiable; for debugging. Every rank of the group calls it with equal shapes.
    """
    if group is None:
        return tensor
    cp = dist.get_world_size(group)
    local = tensor.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(cp)]
    dist.all_gather(parts, local, group=group)
    sequence_length = cp * tensor.shape[dim]
    order = torch.cat([local_positions(layout, cp, rank, sequence_length) for rank in range(cp)])
    return torch.cat(parts, dim).index_select(dim, torch.argsort(order).to(tensor.device))
