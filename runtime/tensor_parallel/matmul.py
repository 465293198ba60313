"""The two matmuls of tensor parallelism, with their communication underneath.

Shapes: x […, I], weights [O, I], `…` including the sequence S; tp ranks, s = S/tp. "Split" means: this rank's s of the
sequence.

| | without sequence parallelism | with sequence parallelism |
|---|---|---|
| column, forward | – | all-gather of x under the matmul of the own tokens |
| column, backward | all-reduce of dx under the dW matmul | all-gather of x under dx, reduce-scatter of dx under dW |
| row, forward | all-reduce after the matmul | reduce-scatter under the matmul of the own tokens |
| row, backward | – | all-gather of dy under the dx matmul of the own tokens |

On GPUs "of the own tokens" reads "of the piece before": there a large gather or reduce-scatter is several collectives,
each of some tokens of all ranks.

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
    Piece,
    gather_in_pieces,
    group_size,
    pieces_of,
    reduce_scatter_in_pieces,
    slice_size,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_sum_of_pieces,
    travels_in_pieces,
)


def column_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: dist.ProcessGroup,
    sequence_dim: int | None = None,
    keep_gathered: bool = False,
) -> tuple[Tensor, ...]:
    """X · Wᵀ + b for each weight and bias of this rank; x is replicated, or split along `sequence_dim`."""
    x, *tensors = cast(list[Any], as_autocast(x, *weights, *biases))
    dim = None if sequence_dim is None else sequence_dim % x.ndim
    function = cast(Any, _Column)
    out: tuple[Tensor, ...] = function.apply(x, group, dim, keep_gathered, len(weights), *tensors)
    return out


def row_matmul(x: Tensor, weight: Tensor, group: dist.ProcessGroup, sequence_dim: int | None = None) -> Tensor:
    """Σ over the ranks of x · Wᵀ, each with its slice of the features; replicated, or split along `sequence_dim`."""
    x, weight = cast(tuple[Tensor, Tensor], as_autocast(x, weight))
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
            outs = [_linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        else:
            outs, joined = _gathered_products(x, group, dim, keep, weights, biases)
            kept = x if joined is None else joined
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
        ranks = group_size(group)
        size = slice_size(x.shape, dim, ranks)
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 : -1], len(weight))
        pieces = pieces_of(shape, dim, x.nbytes // x.shape[-1] * len(weight), x.device)
        if len(pieces) > 1:
            x, total = x.contiguous(), x.new_empty(shape)

            def part(piece: Piece) -> Tensor:
                rows = piece.whole(x, dim, ranks)
                out = x.new_empty(*rows.shape[:-1], len(weight))
                _products_into(out, rows, weight)
                return out

            return reduce_scatter_in_pieces(part, total, dim, pieces, group).wait()
        piece_bytes = x.nbytes // x.shape[-1] * len(weight) // ranks
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
        elif needs_x and len(pieces := pieces_of(dy.shape, dim, dy.nbytes * group_size(group), dy.device)) > 1:
            ranks, dy = group_size(group), dy.contiguous()
            whole = dy.new_empty(*x.shape[:-1], dy.shape[-1]) if needs_w else None
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            for piece, rows in gather_in_pieces(dy, dim, pieces, group, whole):
                _products_into(piece.whole(dx, dim, ranks), rows, weight.t())
            dy = dy if whole is None else whole
        else:
            gathering = start_all_gather(dy, group)
            if needs_x and travels_in_pieces(dy.device, dy.nbytes):
                dx, size = torch.empty_like(x, memory_format=torch.contiguous_format), dy.shape[dim]
                for rank, arrived in gathering.arrivals():
                    _linear_into(dx.narrow(dim, rank * size, size), arrived, weight.t())
            dy = gathering.wait(dim)
            if needs_x and dx is None:
                dx = dy @ weight
        return dx, (_weight_grad(dy, x) if needs_w else None), None, None


def _gathered_products(
    x: Tensor,
    group: dist.ProcessGroup,
    dim: int,
    keep: bool,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> tuple[list[Tensor], Tensor | None]:
    """The products of a column layer, each under the gathering of what comes next; with `keep` the gathered x too."""
    ranks = group_size(group)
    shape = [size * ranks if d == dim else size for d, size in enumerate(x.shape)]
    if len(pieces := pieces_of(x.shape, dim, x.nbytes * ranks, x.device)) > 1:
        outs = [x.new_empty(*shape[:-1], len(w)) for w in weights]
        joined = x.new_empty(shape) if keep else None
        for piece, rows in gather_in_pieces(x.contiguous(), dim, pieces, group, joined):
            for out, w, b in zip(outs, weights, biases, strict=True):
                _products_into(piece.whole(out, dim, ranks), rows, w, b)
        return outs, joined
    gathering = start_all_gather(x, group)
    if not travels_in_pieces(x.device, x.nbytes):
        joined = gathering.wait(dim)
        return [_linear(joined, w, b) for w, b in zip(weights, biases, strict=True)], joined if keep else None
    outs = [x.new_empty(*shape[:-1], len(w)) for w in weights]
    for rank, arrived in gathering.arrivals():
        for out, w, b in zip(outs, weights, biases, strict=True):
            _linear_into(out.narrow(dim, rank * x.shape[dim], x.shape[dim]), arrived, w, b)
    # Once: joining copies the pieces where there are several rows.
    return outs, gathering.wait(dim) if keep else None


def _products_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """X · Wᵀ + b of [ranks, rows, I] into `out` [ranks, rows, O], which may be rows in the middle of each rank's."""
    if out.is_contiguous() and x.is_contiguous():
        _linear_into(out, x, weight, bias)
        return
    # One product for all ranks: BLAS strides over what lies between their rows, so that nothing is copied.
    weights = weight.t().expand(len(x), -1, -1)
    if bias is None:
        torch.bmm(x, weights, out=out)
    else:
        torch.baddbmm(bias, x, weights, out=out)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X · Wᵀ + b in storage of its own: `F.linear` with a bias gives a view, which OLMo could not clip in place."""
    out = x.new_empty(*x.shape[:-1], len(weight))
    _linear_into(out, x, weight, bias)
    return out


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


def as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same in the type of autocast, where that is on."""
    # Outside the autograd functions, so that the casts are differentiated like any other and backward sees one dtype.
    device = next(t for t in tensors if t is not None).device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which autocast does not know
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]
