"""The two matmuls of tensor parallelism, with their communication underneath.

Shapes: x […, I], weights [O, I], `…` including the sequence S; tp ranks, s = S/tp. "Split" means: this rank's s of the
sequence.

| | without sequence parallelism | with sequence parallelism |
|---|---|---|
| column, forward | – | all-gather of x under the matmul of the own tokens |
| column, backward | all-reduce of dx under the dW matmul | all-gather of x under dx, reduce-scatter of dx under dW |
| row, forward | all-reduce after the matmul | reduce-scatter under the matmul of the own tokens |
| row, backward | – | all-gather of dy under the dx matmul of the own tokens |

A column matmul takes several weights, so that q, k and v (or gate and up) share one collective in each direction.

Traffic against memory: with sequence parallelism a column matmul keeps only its own tokens for backward and gathers x
again there, under a matmul (arXiv 2205.05198, section 4.2.2). `keep_gathered` keeps the gathered x instead: (tp −
1)·s·I elements more per layer, and one all-gather less per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.runtime.transport import (
    Pending,
    PendingGather,
    group_size,
    slice_size,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_sum_of_pieces,
    travels_in_pieces,
)

__all__ = ["column_matmul", "row_matmul"]


def column_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: dist.ProcessGroup,
    sequence_dim: int | None = None,
    keep_gathered: bool = False,
) -> tuple[Tensor, ...]:
    """X · Wᵀ + b for each weight and bias of this rank; x is replicated, or split along `sequence_dim`."""
    x, *tensors = cast(list[Any], _autocast(x, *weights, *biases))
    dim = None if sequence_dim is None else sequence_dim % x.ndim
    function = cast(Any, _Column)
    out: tuple[Tensor, ...] = function.apply(x, group, dim, keep_gathered, len(weights), *tensors)
    return out


def row_matmul(x: Tensor, weight: Tensor, group: dist.ProcessGroup, sequence_dim: int | None = None) -> Tensor:
    """Σ over the ranks of x · Wᵀ, each with its slice of the features; replicated, or split along `sequence_dim`."""
    x, weight = cast(tuple[Tensor, Tensor], _autocast(x, weight))
    dim = None if sequence_dim is None else sequence_dim % x.ndim
    function = cast(Any, _Row)
    out: Tensor = function.apply(x, weight, group, dim)
    return out


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int | None, keep: bool, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = cast(tuple[Tensor, ...], tensors[:count]), tensors[count:]
        kept = x
        if dim is None:
            outs = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        else:
            gathering = start_all_gather(x, group)
            joined: Tensor | None = None
            if travels_in_pieces(x.device, x.nbytes):
                shape = [size * group_size(group) if d == dim else size for d, size in enumerate(x.shape)]
                outs = [x.new_empty(*shape[:-1], len(w)) for w in weights]
                for rank, piece in gathering.arrivals():
                    for out, w, b in zip(outs, weights, biases, strict=True):
                        _linear_into(out.narrow(dim, rank * x.shape[dim], x.shape[dim]), piece, w, b)
            else:
                joined = gathering.wait(dim)
                outs = [F.linear(joined, w, b) for w, b in zip(weights, biases, strict=True)]
            if keep:
                # Once: joining copies the pieces where there are several rows.
                kept = gathering.wait(dim) if joined is None else joined
        ctx.group, ctx.dim, ctx.keep, ctx.has_bias = group, dim, keep, [b is not None for b in biases]
        ctx.save_for_backward(kept, *weights)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, dim = ctx.group, ctx.dim
        x, *weights = ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        needs_w, needs_b = needs[: len(weights)], needs[len(weights) :]
        gathering: PendingGather | None = None
        if dim is not None and not ctx.keep and any(needs_w):
            gathering = start_all_gather(x, group)
        dx: Pending | None = None
        if needs_x:
            partial = _product(grads, weights)
            dx = start_all_reduce(partial, group) if dim is None else start_reduce_scatter(partial, dim, group)
        if gathering is not None:
            x = gathering.wait(dim)
        dws = [_weight_grad(dy, x) if needed else None for dy, needed in zip(grads, needs_w, strict=True)]
        dbs = [
            _rows(dy).sum(0) if has and needed else None
            for dy, has, needed in zip(grads, ctx.has_bias, needs_b, strict=True)
        ]
        return (None if dx is None else dx.wait()), None, None, None, None, *dws, *dbs


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, dim: int | None) -> Tensor:
        ctx.group, ctx.dim = group, dim
        ctx.save_for_backward(x, weight)
        if dim is None:
            return start_all_reduce(F.linear(x, weight).contiguous(), group).wait()
        size = slice_size(x.shape, dim, group_size(group))
        piece_bytes = x.nbytes // x.shape[-1] * len(weight) // group_size(group)
        if not travels_in_pieces(x.device, piece_bytes):
            return start_reduce_scatter(F.linear(x, weight), dim, group).wait()
        return start_sum_of_pieces(lambda rank: F.linear(x.narrow(dim, rank * size, size), weight), group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, dy = ctx.group, ctx.dim, grads[0]
        x, weight = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        dx: Tensor | None = None
        if dim is None:
            dx = dy @ weight if needs_x else None
        else:
            gathering = start_all_gather(dy, group)
            if needs_x and travels_in_pieces(dy.device, dy.nbytes):
                dx, size = torch.empty_like(x, memory_format=torch.contiguous_format), dy.shape[dim]
                for rank, piece in gathering.arrivals():
                    _linear_into(dx.narrow(dim, rank * size, size), piece, weight.t())
            dy = gathering.wait(dim)
            if needs_x and dx is None:
                dx = dy @ weight
        return dx, (_weight_grad(dy, x) if needs_w else None), None, None


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    if not out.is_contiguous():
        out.copy_(F.linear(x, weight, bias))
    elif bias is None:
        torch.mm(_rows(x), weight.t(), out=out.view(-1, len(weight)))
    else:
        torch.addmm(bias, _rows(x), weight.t(), out=out.view(-1, len(weight)))


def _product(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Σ dy · W, as fresh contiguous storage."""
    flat = _rows(grads[0]) @ weights[0]
    for dy, weight in zip(grads[1:], weights[1:], strict=True):
        flat.addmm_(_rows(dy), weight)
    return flat.view(*grads[0].shape[:-1], -1)


def _weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    return _rows(dy).t() @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    # Outside the autograd functions, so that the casts are differentiated like any other and backward sees one dtype.
    device = next(t for t in tensors if t is not None).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which autocast does not know
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]
