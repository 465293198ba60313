"""Cross entropy of logits that are spread over the ranks of a tensor-parallel group along the vocabulary.

Shapes: T tokens, V vocabulary, v = (padded V)/tp columns of a rank. No rank ever holds [T, V]; and of its own [T, v] it
holds, in float32, only a chunk of tokens at a time. The ranks exchange three numbers per token (the largest logit, the
sum of the exponentials, the label's logit), in one all-gather; backward needs no exchange. Kept for backward are the
logits themselves, which the caller has anyway, and one number per token.

With x the logits, ℓ = log Σⱼ exp xⱼ, y the label and z the weight of the z-loss, a token costs  ℓ − x_y + z·ℓ²,  so
that  d/dxⱼ = softmax(x)ⱼ·(1 + 2zℓ) − [j = y].

Sources: Megatron-LM (arXiv 1909.08053, section 3); z-loss, PaLM (arXiv 2204.02311, section 5).

The head's product and the cross entropy of its logits, chunk by chunk of tokens: no rank ever holds [T, v].

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
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.runtime.transport import (
    Group,
    group_rank,
    group_size,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

from .matmul import as_autocast


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Group = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    inplace_backward: bool = False,
    check_labels: bool | None = None,
) -> Tensor:
    """The loss of every token, [..] in float32 (float64 for float64 logits), the same on every rank.

    Args:
        logits: [.., v], this rank's columns `rank · v ..` of the (padded) vocabulary.
        labels: [..], ids of the whole vocabulary, the same on every rank.
        group: The ranks that the vocabulary is spread over; None for this rank alone.
        vocab_size: V without padding: columns from V on count as −∞ and get no gradient. None: there is no padding.
        ignore_index: Tokens with this label cost 0 and give no gradient.
        z_loss: z in the equation above.
        chunk_tokens: Tokens that are in float32 at a time; None chooses a chunk of a few megabytes.
        inplace_backward: Write the gradient over the logits. Saves [.., v], and asks that nothing else reads the logits
            afterwards; a second backward through the same graph then raises.
        check_labels: Whether to look for labels outside the vocabulary. None looks on the CPU only: on a GPU the answer
            costs a synchronisation.

    Raises:
        ValueError: Shapes do not match, or a label is outside the vocabulary (where that is checked).
    """
    shard = shard_of(
        logits, labels, group, vocab_size, ignore_index, z_loss, chunk_tokens, inplace_backward, check_labels
    )
    columns = logits.shape[-1]
    function = cast(Any, _CrossEntropy)
    losses: Tensor = function.apply(logits.reshape(-1, columns), labels.reshape(-1), shard)
    return losses.view(labels.shape)


def shard_of(
    logits: Tensor,
    labels: Tensor | None,
    group: Group,
    vocab_size: int | None,
    ignore_index: int,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    inplace_backward: bool = False,
    check_labels: bool | None = None,
) -> Shard:
    """This rank's columns of logits; `vocab_parallel_cross_entropy` says what the arguments are.

    Raises:
        ValueError: as it raises.
    """
    if labels is not None and logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} do not match logits {tuple(logits.shape)}: one label per token")
    columns, ranks = logits.shape[-1], group_size(group)
    vocab_size = columns * ranks if vocab_size is None else vocab_size
    if not 0 < vocab_size <= columns * ranks:
        raise ValueError(f"vocab_size = {vocab_size}, but {ranks} ranks hold {columns} columns each: {columns * ranks}")
    if labels is not None and (labels.is_cpu if check_labels is None else check_labels):
        refuse_unknown(labels, vocab_size, ignore_index)
    start = group_rank(group) * columns
    held = min(max(vocab_size - start, 0), columns)
    chunk_tokens = chunk_tokens or max(1, (_CHUNK_ELEMENTS_CPU if logits.is_cpu else _CHUNK_ELEMENTS) // columns)
    return Shard(group, start, held, vocab_size, ignore_index, z_loss, chunk_tokens, inplace_backward)


# A chunk that stays in a core's cache on the CPU; on a GPU one that is worth its kernel launches.
_CHUNK_ELEMENTS_CPU = 2**19
_CHUNK_ELEMENTS = 2**25


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's columns `start .. start + held` of the vocabulary, without padding, and the terms of the loss."""

    group: Group
    start: int
    held: int
    vocab_size: int
    ignore_index: int
    z_loss: float
    chunk_tokens: int
    inplace_backward: bool

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Ranges of tokens whose logits are in float32 at a time."""
        for first in range(0, tokens, self.chunk_tokens):
            yield slice(first, min(first + self.chunk_tokens, tokens))

    def locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which labels are among the columns held, and in which column (0 for the others)."""
        columns = labels - self.start
        held = (columns >= 0) & (columns < self.held)
        return held, columns.masked_fill(~held, 0).unsqueeze(-1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, shard: Shard) -> Tensor:
        losses, log_sum = losses_of_tokens(logits, labels, shard)
        ctx.shard = shard
        ctx.save_for_backward(logits, labels, log_sum)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits, labels, log_sum), shard = ctx.saved_tensors, cast(Shard, ctx.shard)
        out = logits if shard.inplace_backward else torch.empty_like(logits)
        return gradient_of_logits(out, logits, labels, log_sum, grads[0], shard), None, None


def losses_of_tokens(logits: Tensor, labels: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """The loss of each of T tokens, and the log of its softmax's denominator, from this rank's columns [T, v]."""
    # Rows: largest logit, Σ exp(x − largest), the label's logit.
    local = torch.zeros(3, len(labels), dtype=exact(logits.dtype), device=logits.device)
    local[0] = -torch.inf
    for rows in shard.chunks(len(labels)) if shard.held else ():
        x = logits[rows, : shard.held]
        held, column = shard.locate(labels[rows])
        local[2, rows] = x.gather(1, column).squeeze(1).to(local.dtype).masked_fill_(~held, 0.0)
        local[0, rows] = largest = x.amax(1)
        local[1, rows] = torch.sub(x, largest.to(local.dtype).unsqueeze(1)).exp_().sum(1)
    ranks = local.unsqueeze(0)
    if shard.group is not None and group_size(shard.group) > 1:
        ranks = start_all_gather(ranks, shard.group).wait(0)
    largest = ranks[:, 0].amax(0)
    log_sum = (ranks[:, 1] * (ranks[:, 0] - largest).exp()).sum(0).log_().add_(largest)
    losses = log_sum - ranks[:, 2].sum(0)
    if shard.z_loss:
        losses += shard.z_loss * log_sum.square()
    return losses.masked_fill_(labels == shard.ignore_index, 0.0), log_sum


def gradient_of_logits(
    out: Tensor, logits: Tensor, labels: Tensor, log_sum: Tensor, grad: Tensor, shard: Shard
) -> Tensor:
    """Writes into `out` [T, v], which may be `logits`, the gradient where that of each token's loss is `grad` [T]."""
    grad = grad.masked_fill(labels == shard.ignore_index, 0.0)
    softmax_scale = grad * (1 + 2 * shard.z_loss * log_sum) if shard.z_loss else grad
    for rows in shard.chunks(len(labels)) if shard.held else ():
        x = torch.sub(logits[rows, : shard.held], log_sum[rows].unsqueeze(1)).exp_()
        scale = softmax_scale[rows].unsqueeze(1)
        held, column = shard.locate(labels[rows])
        of_labels = x.gather(1, column) * scale - (grad[rows] * held).unsqueeze(1)
        torch.mul(x, scale, out=out[rows, : shard.held]).scatter_(1, column, of_labels.to(out.dtype))
        del x
    out[:, shard.held :] = 0.0
    return out


def exact(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of `dtype` are added up: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def refuse_unknown(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Looks for labels outside the vocabulary, which waits for the device.

    Raises:
        ValueError: there is one.
    """
    wrong = labels[((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} is outside the vocabulary of {vocab_size}: ids are 0..{vocab_size - 1}, "
            f"and {ignore_index} for tokens that do not count"
        )


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
