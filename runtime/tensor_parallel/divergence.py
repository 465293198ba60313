"""Entropy and Kullback-Leibler divergence of logits that are spread over tensor-parallel ranks along the vocabulary.

Shapes as in `cross_entropy`, and so is the memory: no rank ever holds [T, V], and of its own [T, v] it holds a chunk of
tokens in float32 at a time. The ranks exchange three numbers per token (five with a reference), in one all-gather;
backward needs no exchange.

With x the logits, p = softmax(x), y those of the reference and q = softmax(y), a token has

    entropy     H = −Σⱼ pⱼ log pⱼ               dH/dxⱼ = −pⱼ (log pⱼ + H)
    divergence  D = Σⱼ pⱼ (log pⱼ − log qⱼ)     dD/dxⱼ = pⱼ (log pⱼ − log qⱼ − D)     dD/dyⱼ = qⱼ − pⱼ

The entropy is computed as −D of a reference whose log q is 0.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.runtime.transport import Group, group_size, start_all_gather

from .cross_entropy import Shard, exact, shard_of


def vocab_parallel_entropy(
    logits: Tensor, *, group: Group = None, vocab_size: int | None = None, chunk_tokens: int | None = None
) -> Tensor:
    """The entropy of every token's distribution in nats, [..] in float32 (float64 for float64 logits).

    Args:
        logits: [.., v], this rank's columns `rank · v ..` of the (padded) vocabulary.
        group: The ranks that the vocabulary is spread over; None for this rank alone.
        vocab_size: V without padding, as in `vocab_parallel_cross_entropy`.
        chunk_tokens: Tokens that are in float32 at a time; None chooses a chunk of a few megabytes.

    Raises:
        ValueError: `vocab_size` does not fit the columns of all ranks.
    """
    return -_divergence(logits, None, group, vocab_size, chunk_tokens)


def vocab_parallel_kl_divergence(
    logits: Tensor,
    reference: Tensor,
    *,
    group: Group = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """D(p ‖ q) of every token in nats, p of the logits and q of the reference; differentiable in both.

    [..] in float32 (float64 for float64 logits), the same on every rank.

    Args:
        logits: [.., v], this rank's columns `rank · v ..` of the (padded) vocabulary.
        reference: [.., v], the same columns of the other model.
        group: The ranks that the vocabulary is spread over; None for this rank alone.
        vocab_size: V without padding, as in `vocab_parallel_cross_entropy`.
        chunk_tokens: Tokens that are in float32 at a time; None chooses a chunk of a few megabytes.

    Raises:
        ValueError: `vocab_size` does not fit the columns of all ranks, or the reference has another shape.
    """
    if reference.shape != logits.shape:
        raise ValueError(f"reference {tuple(reference.shape)} and logits {tuple(logits.shape)} must have one shape")
    return _divergence(logits, reference, group, vocab_size, chunk_tokens)


def _divergence(
    logits: Tensor, reference: Tensor | None, group: Group, vocab_size: int | None, chunk_tokens: int | None
) -> Tensor:
    shard = shard_of(logits, None, group, vocab_size, 0, chunk_tokens=chunk_tokens)
    columns = logits.shape[-1]
    other = None if reference is None else reference.reshape(-1, columns)
    found: Tensor = cast(Any, _Divergence).apply(logits.reshape(-1, columns), other, shard)
    return found.view(logits.shape[:-1])


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, reference: Tensor | None, shard: Shard) -> Tensor:
        # Rows, with x' = x − largest x, and y' likewise: largest x, Σ exp x', Σ exp(x')·(x' − y'), largest y, Σ exp y'.
        local = torch.zeros(3 if reference is None else 5, len(logits), dtype=exact(logits.dtype), device=logits.device)
        local[0::3] = -torch.inf
        if shard.held:
            for rows in shard.chunks(len(logits)):
                x = logits[rows, : shard.held].to(local.dtype, copy=True)
                local[0, rows] = largest = x.amax(1)
                difference = x.sub_(largest.unsqueeze(1)).clone()
                if reference is not None:
                    y = reference[rows, : shard.held].to(x.dtype)
                    local[3, rows] = largest = y.amax(1)
                    y = y - largest.unsqueeze(1)
                    difference -= y
                    local[4, rows] = y.exp_().sum(1)
                weights = x.exp_()
                local[1, rows] = weights.sum(1)
                # A weight of 0 counts nothing, whatever its logarithm.
                local[2, rows] = difference.masked_fill_(weights == 0, 0.0).mul_(weights).sum(1)
        ranks = local.unsqueeze(0)
        if shard.group is not None and group_size(shard.group) > 1:
            ranks = start_all_gather(ranks, shard.group).wait(0)
        log_sum, factors, shift = _together(ranks[:, 0], ranks[:, 1])
        other = None
        if reference is not None:
            other, _, shift_of_reference = _together(ranks[:, 3], ranks[:, 4])
            shift = shift - shift_of_reference
        total = (factors * ranks[:, 1]).sum(0)
        found = (factors * (ranks[:, 2] + shift * ranks[:, 1])).sum(0) / total - total.log()
        if other is not None:
            found += other - ranks[:, 3].amax(0)
        ctx.shard = shard
        ctx.save_for_backward(logits, reference, log_sum, other, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, reference, log_sum, other, found = ctx.saved_tensors
        shard, grad = cast(Shard, ctx.shard), grads[0]
        out = torch.zeros_like(logits) if ctx.needs_input_grad[0] else None
        of_reference = torch.zeros_like(reference) if ctx.needs_input_grad[1] else None
        for rows in shard.chunks(len(logits)):
            x = logits[rows, : shard.held].to(exact(logits.dtype), copy=True)
            each = grad[rows].unsqueeze(1)
            difference = x.sub_(log_sum[rows].unsqueeze(1)).clone()
            weights = x.exp_()
            if reference is not None:
                y = reference[rows, : shard.held].to(x.dtype) - other[rows].unsqueeze(1)
                difference -= y
                if of_reference is not None:
                    of_reference[rows, : shard.held] = y.exp_().sub_(weights).mul_(each)
            if out is not None:
                difference -= found[rows].unsqueeze(1)
                out[rows, : shard.held] = difference.masked_fill_(weights == 0, 0.0).mul_(weights).mul_(each)
        return out, of_reference, None


def _together(largest: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From each rank's largest logit and sum of exponentials [ranks, T].

    The logarithm of the sum [T], and for each rank the factor of its exponentials and by how much its largest logit is
    less than the largest of all [ranks, T].
    """
    most = largest.amax(0)
    # A rank of padding only has no logits.
    shift = (largest - most).masked_fill(sums == 0, 0.0)
    factors = (largest - most).exp()
    return (factors * sums).sum(0).log() + most, factors, shift
