"""Starts collectives by the means that are fastest for a backend; callers compute while the bytes travel.

Only torch.distributed's own collectives and point-to-point messages are used. Nothing here is differentiable; see
`parcompile.runtime.collectives` for what is.
"""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor

from . import backend, gloo
from .pending import Pending, PendingGather, group_size, slice_size


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum the contiguous tensor `x` over the ranks, in place."""
    return gloo.all_reduce_of_two(x, group) if gloo.swaps_whole(x, group) else backend.all_reduce(x, group)


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> PendingGather:
    """Collect the ranks' equally shaped tensors."""
    x = x.contiguous()
    return gloo.all_gather(x, group) if gloo.carries(x.device) else backend.all_gather(x, group)


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Pending:
    """Sum `x` over the ranks; each keeps its slice along `dim`.

    Raises:
        ValueError: The size along `dim` is not a multiple of the number of ranks.
    """
    ranks, dim = group_size(group), dim % x.ndim
    size, over_gloo = slice_size(x.shape, dim, ranks), gloo.carries(x.device)
    if over_gloo and (ranks == 2 or gloo.travels_in_pieces(x.device, x.nbytes // ranks)):
        return gloo.start_sum_of_pieces(lambda peer: x.narrow(dim, peer * size, size).contiguous(), group)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    if math.prod(shape[:dim]) != 1:  # the slices do not lie one after the other
        x = x.reshape(*x.shape[:dim], ranks, *shape[dim:]).movedim(dim, 0)
    slices = x.contiguous().view(ranks, *shape)
    return gloo.reduce_scatter(slices, group) if over_gloo else backend.reduce_scatter(slices, group)
