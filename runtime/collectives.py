"""Differentiable collectives over a process group.

A collective on tensors spread over ranks is a linear map, and its backward is the transposed map: another collective.
`linear_map` makes a function of such a pair. The six functions are three pairs; the backward of each is its partner.

| function | forward | backward | where tensor parallelism uses it |
|---|---|---|---|
| `copy_to_group` | identity | all-reduce | replicated activations enter a region of sharded weights |
| `reduce_from_group` | all-reduce | identity | they leave it |
| `gather_from_sequence` | all-gather | reduce-scatter | a split sequence enters the region |
| `reduce_scatter_to_sequence` | reduce-scatter | all-gather | it leaves the region split again |
| `scatter_to_group` | own slice | all-gather | a replicated tensor is cut |
| `gather_from_group` | all-gather | own slice | a cut tensor is put together, for replicated use |

A sequence that the ranks do not divide is continued with zeros to the next multiple (`pad=True`) and cut to its length
where it is whole again (`size`). The zeros are the last tokens of the last ranks; their gradient is zero, since
what is computed from them is cut off.

Reductions are sums. `group` is any process group that holds the calling rank; None, or a group of one, makes every
function the identity (None does *not* mean the default group). Slices lie in group-rank order along `dim`.

The plain collectives under them are in `transport`. Operator names follow Megatron-LM (arXiv 1909.08053, section 3;
arXiv 2205.05198, section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .transport import (
    Group,
    group_rank,
    group_size,
    slice_size,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

Map = Callable[[Tensor], Tensor]


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Use a replicated tensor in rank-dependent work: its gradient is the sum of what the ranks contribute."""
    if group is None or group_size(group) == 1:
        return x
    return linear_map(x, _view, partial(reduce_from_group, group=group))


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Sum partial results over the ranks; every rank gets the sum, bit for bit the same."""
    if group is None or group_size(group) == 1:
        return x
    return linear_map(x, partial(_sum, group=group), partial(copy_to_group, group=group))


def gather_from_sequence(x: Tensor, dim: int, group: Group, size: int | None = None) -> Tensor:
    """Put a split tensor together for rank-dependent work: [.., n, ..] becomes [.., n · ranks, ..] along `dim`.

    With `size`, padding is cut off: [.., size, ..].

    Raises:
        ValueError: The slices are not those of `size`.
    """
    return _gather(x, dim, group, size, reduce_scatter_to_sequence)


def reduce_scatter_to_sequence(x: Tensor, dim: int, group: Group, *, pad: bool = False) -> Tensor:
    """Sum partial results over the ranks and keep the own slice: [.., n · ranks, ..] becomes [.., n, ..] along `dim`.

    Raises:
        ValueError: The size along `dim` is not a multiple of the number of ranks, and `pad` is not set.
    """
    return _scatter(x, dim, group, _scattered_sum, gather_from_sequence, pad=pad)


def scatter_to_group(x: Tensor, dim: int, group: Group, *, pad: bool = False) -> Tensor:
    """Keep the own slice of a replicated tensor: [.., n · ranks, ..] becomes [.., n, ..] along `dim`.

    Raises:
        ValueError: The size along `dim` is not a multiple of the number of ranks, and `pad` is not set.
    """
    return _scatter(x, dim, group, _own_slice, gather_from_group, pad=pad)


def _scatter(
    x: Tensor, dim: int, group: Group, own: Callable[..., Tensor], transposed: Callable[..., Tensor], *, pad: bool
) -> Tensor:
    if group is None or group_size(group) == 1:
        return x
    x = pad_to_multiple(x, dim, group) if pad else x
    return linear_map(x, partial(own, dim=dim, group=group), partial(transposed, dim=dim, group=group))


def gather_from_group(x: Tensor, dim: int, group: Group, size: int | None = None) -> Tensor:
    """Put a split tensor together for replicated work: [.., n, ..] becomes [.., n · ranks, ..] along `dim`.

    Every rank must then do the same with the result, since only its own slice of the gradient is used. With `size`,
    padding is cut off: [.., size, ..].

    Raises:
        ValueError: The slices are not those of `size`.
    """
    return _gather(x, dim, group, size, scatter_to_group)


def _gather(x: Tensor, dim: int, group: Group, size: int | None, transposed: Callable[..., Tensor]) -> Tensor:
    if group is not None and group_size(group) > 1:
        x = linear_map(x, partial(_gathered, dim=dim, group=group), partial(transposed, dim=dim, group=group))
    return cut_padding(x, dim, group, size)


def pad_to_multiple(x: Tensor, dim: int, group: Group) -> Tensor:
    """Continue `x` along `dim` with zeros to a multiple of the number of ranks; nothing is copied where it is one."""
    padding = -x.shape[dim] % group_size(group)
    if not padding:
        return x
    after = x.ndim - 1 - dim % x.ndim  # F.pad counts dims from the last
    return F.pad(x, (*(0, 0) * after, 0, padding))


def cut_padding(x: Tensor, dim: int, group: Group, size: int | None) -> Tensor:
    """Undo `pad_to_multiple`: the first `size` along `dim`; None leaves x as it is.

    Raises:
        ValueError: x is not what `pad_to_multiple` makes of `size`.
    """
    if size is None or x.shape[dim] == size:
        return x
    ranks, found = group_size(group), x.shape[dim]
    expected = -(-size // ranks) * ranks
    if found != expected:
        raise ValueError(
            f"a sequence of {size} on {ranks} ranks is {expected // ranks} on each of them, {expected} in all with "
            f"padding; dim {dim} of the gathered shape {tuple(x.shape)} is {found}"
        )
    return x.narrow(dim, 0, size)


def linear_map(x: Tensor, forward: Map, transposed: Map) -> Tensor:
    """What `forward` makes of x, a linear map over ranks; backward makes what `transposed` does of the gradient."""
    return cast(Tensor, cast(Any, _LinearMap).apply(x, forward, transposed))


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, transposed: Map) -> Tensor:
        ctx.transposed = transposed
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transposed(grads[0]), None, None


def _view(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Not in place: x, or the gradient that this is called on, may be in use elsewhere.
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return start_all_gather(x, group).wait(dim)


def _scattered_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return start_reduce_scatter(x, dim, group).wait()


def _own_slice(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = slice_size(x.shape, dim, group_size(group))
    return x.narrow(dim, group_rank(group) * size, size).clone(memory_format=torch.contiguous_format)
