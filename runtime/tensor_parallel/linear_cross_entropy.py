"""The head's product and the cross entropy of its logits, chunk by chunk of tokens: no rank ever holds [T, v].

Shapes: B rows of S tokens, T = B · S; H features, v = (padded V)/tp columns of a rank. The forward pass computes the
loss of a chunk and at once its gradients in x and W, for a loss whose own gradient is 1; backward multiplies them by
what that really is. So there are three products, as without chunks, and what is kept between the passes is dx and dW,
in place of the logits and their gradient: 4 H v bytes, whatever the number of tokens (dW adds up in float32).

With sequence parallelism a chunk holds tokens of every rank: they are gathered for it, and its dx is reduced back, so
that neither x nor dx is ever whole.

Source: Liger Kernel (arXiv 2410.10989, section 3.2), here over a vocabulary that is split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.runtime.transport import Group, group_size, start_all_gather, start_all_reduce, start_reduce_scatter

from .cross_entropy import Shard, exact, gradient_of_logits, losses_of_tokens, refuse_unknown, shard_of
from .matmul import as_autocast

Elementwise = Callable[[Tensor], Tensor]
"""What a model makes of the logits of each token by itself: [t, v] to [t, v]."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    group: Group = None,
    sequence_parallel: bool = False,
    chunk_tokens: int,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    elementwise: Elementwise | None = None,
) -> Tensor:
    """The sum of all tokens' losses, a scalar in float32 (float64 for float64), the same on every rank.

    Args:
        hidden: [B, S, H], the same on every rank; with `sequence_parallel` this rank's tokens [B, ceil(S/tp), H].
        weight: [v, H], this rank's rows of the (padded) vocabulary.
        bias: [v] or None.
        labels: [B, S], ids of the whole vocabulary, the same on every rank.
        group: the ranks that the vocabulary is spread over; None for this rank alone.
        sequence_parallel: `hidden` is split along the sequence over `group`; padding comes last.
        chunk_tokens: tokens of all ranks whose logits exist at a time.
        vocab_size: V without padding; None: there is no padding.
        ignore_index: tokens with this label cost 0 and give no gradient.
        z_loss: the weight of the squared log of the softmax's denominator.
        elementwise: what happens to logits before the loss (a scale, a cap); differentiable.

    Raises:
        ValueError: shapes do not match, or a label is outside the vocabulary (looked for on the CPU only).
    """
    ranks = group_size(group)
    spread = sequence_parallel and ranks > 1
    padded = hidden.shape[1] * (ranks if spread else 1)
    if labels.shape[0] != hidden.shape[0] or not 0 <= padded - labels.shape[1] < (ranks if spread else 1):
        raise ValueError(f"labels {tuple(labels.shape)} do not match hidden states {tuple(hidden.shape)}")
    tensors = cast(tuple[Tensor, Tensor, Tensor | None], as_autocast(hidden, weight, bias))
    shard = shard_of(weight[:0, :1].expand(0, len(weight)), None, group, vocab_size, ignore_index, z_loss)
    if labels.is_cpu:
        refuse_unknown(labels, shard.vocab_size, ignore_index)
    total: Tensor = cast(Any, _LinearCrossEntropy).apply(
        *tensors, labels, shard, chunk_tokens, spread, elementwise, torch.is_grad_enabled()
    )
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shard: Shard,
        chunk: int,
        spread: bool,
        elementwise: Elementwise | None,
        trains: bool,
    ) -> Tensor:
        needs_x, needs_w, needs_b = (trains and needed for needed in ctx.needs_input_grad[:3])
        kind, group = exact(weight.dtype), cast(Any, shard.group)
        dx = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_x else None
        dw = torch.zeros(weight.shape, dtype=kind, device=weight.device) if needs_w else None
        db = torch.zeros(len(weight), dtype=kind, device=weight.device) if needs_b else None
        total = torch.zeros((), dtype=kind, device=weight.device)
        for own, wanted in _chunks(hidden, labels, shard, chunk, spread):
            x = hidden[:, own]
            if spread:
                x = start_all_gather(x.unsqueeze(0), group).wait(0)
            rows = x.reshape(-1, x.shape[-1])
            product = F.linear(rows, weight, bias)
            loss, gradient = _loss_and_gradient(product, wanted, shard, elementwise, needs_x or needs_w or needs_b)
            total += loss
            if gradient is None:
                continue
            if dx is not None:
                back = (gradient @ weight).view(x.shape)
                dx[:, own] = start_reduce_scatter(back, 0, group).wait()[0] if spread else back
            if dw is not None:
                _add_product(dw, gradient, rows)
            if db is not None:
                db += gradient.sum(0, dtype=kind)
            del product, gradient  # before the next chunk's are there
        if dx is not None and not spread and group_size(group) > 1:
            dx = start_all_reduce(dx, group).wait()
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(dx, dw, db)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a second backward through the same graph raises.
        dx, dw, db = (None if one is None else one.mul_(grads[0]) for one in ctx.saved_tensors)
        of_weight, of_bias = ctx.dtypes
        return dx, None if dw is None else dw.to(of_weight), None if db is None else db.to(of_bias), *[None] * 6


def _chunks(hidden: Tensor, labels: Tensor, shard: Shard, chunk: int, spread: bool) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of this rank's tokens in each row, with the labels of a chunk in the order of its tokens.

    Where ranks share the sequence, a chunk has tokens of the same range of each rank's, rank by rank.
    """
    rows, length, _ = hidden.shape
    ranks = group_size(shard.group) if spread else 1
    labels = F.pad(labels, (0, length * ranks - labels.shape[1]), value=shard.ignore_index)
    by_rank = labels.reshape(rows, ranks, length).transpose(0, 1)
    step = max(1, chunk // (rows * ranks))
    for first in range(0, length, step):
        own = slice(first, min(first + step, length))
        yield own, by_rank[:, :, own].reshape(-1)


def _loss_and_gradient(
    product: Tensor, labels: Tensor, shard: Shard, elementwise: Elementwise | None, trains: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of a chunk's losses, and its gradient in the head's product [t, v], which may be written over it."""
    shard = replace(shard, chunk_tokens=len(product))
    if elementwise is None:
        losses, log_sum = losses_of_tokens(product, labels, shard)
        ones = torch.ones_like(losses)
        return losses.sum(), gradient_of_logits(product, product, labels, log_sum, ones, shard) if trains else None
    with torch.set_grad_enabled(trains):
        product = product.detach().requires_grad_(trains)
        followed = elementwise(product)
    logits = followed.detach()
    shard = replace(shard, held=min(shard.held, logits.shape[-1]))
    losses, log_sum = losses_of_tokens(logits, labels, shard)
    if not trains:
        return losses.sum(), None
    gradient = gradient_of_logits(torch.empty_like(logits), logits, labels, log_sum, torch.ones_like(losses), shard)
    return losses.sum(), torch.autograd.grad(followed, product, gradient)[0]


_PRODUCT_ELEMENTS = 2**25
"""Of a weight's gradient in 16 bits, whose product stands beside its sum in float32, this many at a time."""


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Adds gradientᵀ · rows [v, H] to `total`."""
    if total.dtype == rows.dtype:
        total.addmm_(gradient.t(), rows)
        return
    step = max(1, _PRODUCT_ELEMENTS // rows.shape[-1])
    for first in range(0, len(total), step):
        total[first : first + step] += gradient[:, first : first + step].t() @ rows
