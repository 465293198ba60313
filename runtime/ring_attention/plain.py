"""Attention written out in matrix products: right for every device and dtype, and what stands in for fused kernels.

It walks over tiles of scores, so memory is linear in the sequence length. Shapes: B batch, H query heads, K key/value
heads, G = H / K, Q query tokens, S key tokens, D head dim of queries and keys, E head dim of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .merge import RunningAttention, accumulation_dtype, unseen_rows_to_infinity

_TILE = 512


class PlainKernel:
    """Computes in fp32 (fp64 for fp64 inputs), whatever the inputs are."""

    name = "plain"
    backward_rows: int | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, E] in the inputs' dtype and log-sum-exp [B, H, Q] of one block."""
        dtype = accumulation_dtype(query.dtype)
        batch, heads, length, _ = query.shape
        out = query.new_empty((batch, heads, length, value.shape[3]), dtype=dtype)
        lse = query.new_empty((batch, heads, length), dtype=dtype)
        with torch.autocast(query.device.type, enabled=False):
            for rows in _tiles(length):
                running = RunningAttention(out[:, :, rows], lse[:, :, rows])
                for columns in _tiles(min(rows.stop, key.shape[2]) if causal else key.shape[2]):
                    scores = _scores(query, key, rows, columns, causal=causal, scale=scale)
                    block_lse = torch.logsumexp(scores, dim=-1)
                    weights = torch.exp(scores - unseen_rows_to_infinity(block_lse).unsqueeze(-1))
                    block_out = _fold(weights, value.shape[1]) @ value[:, :, columns].to(dtype)
                    running.add(slice(None), block_out.reshape(batch, heads, -1, value.shape[3]), block_lse)
                running.finish()
        return out.to(query.dtype), lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, where `out` and `lse` may also cover keys that are not given here."""
        dtype = accumulation_dtype(query.dtype)
        kv_heads = key.shape[1]
        grad_query = torch.zeros_like(query, dtype=dtype)
        grad_key = torch.zeros_like(key, dtype=dtype)
        grad_value = torch.zeros_like(value, dtype=dtype)
        with torch.autocast(query.device.type, enabled=False):
            for rows in _tiles(query.shape[2]):
                grad = grad_out[:, :, rows].to(dtype)
                delta = (grad * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
                grad_folded, query_folded = _fold(grad, kv_heads), _fold(query[:, :, rows].to(dtype), kv_heads)
                for columns in _tiles(min(rows.stop, key.shape[2]) if causal else key.shape[2]):
                    scores = _scores(query, key, rows, columns, causal=causal, scale=scale)
                    weights = torch.exp(scores - lse[:, :, rows].unsqueeze(-1))
                    grad_weights = grad_folded @ value[:, :, columns].to(dtype).mT
                    grad_scores = weights * (grad_weights.view_as(weights) - delta) * scale
                    folded = _fold(grad_scores, kv_heads)
                    grad_value[:, :, columns] += _fold(weights, kv_heads).mT @ grad_folded
                    grad_key[:, :, columns] += folded.mT @ query_folded
                    grad_query[:, :, rows] += (folded @ key[:, :, columns].to(dtype)).view(*grad.shape[:3], -1)
        return grad_query, grad_key, grad_value


def _tiles(length: int) -> Iterator[slice]:
    return (slice(start, min(start + _TILE, length)) for start in range(0, length, _TILE))


def _fold(x_BHQN: Tensor, kv_heads: int) -> Tensor:
    """[B, H, Q, N] → [B, K, G·Q, N]: the queries of all heads that share a key/value head, in one matrix."""
    batch, _, _, width = x_BHQN.shape
    return x_BHQN.reshape(batch, kv_heads, -1, width)


def _scores(query: Tensor, key: Tensor, rows: slice, columns: slice, *, causal: bool, scale: float) -> Tensor:
    """Scaled and masked scores [B, H, rows, columns]."""
    dtype = accumulation_dtype(query.dtype)
    queries = query[:, :, rows].to(dtype)
    folded = _fold(queries, key.shape[1]) @ key[:, :, columns].to(dtype).mT
    scores = folded.view(*queries.shape[:3], -1).mul_(scale)
    if causal and columns.stop > rows.start + 1:
        row = torch.arange(rows.start, rows.stop, device=query.device)
        column = torch.arange(columns.start, columns.stop, device=query.device)
        scores.masked_fill_(column > row.unsqueeze(-1), -math.inf)
    return scores
