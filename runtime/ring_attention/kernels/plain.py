"""Attention written out in matrix products: right for every device and dtype, and what stands in for fused kernels.

It walks over tiles of scores, so memory is linear in the sequence length. Shapes: B batch, H query heads, K key/value
heads, G = H / K, Q query tokens, S key tokens, D head dim of queries and keys, E head dim of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .gradients import Gradients, Queries
from .kernel import Terms, accumulation_dtype, without_autocast
from .merge import RunningAttention, unseen_rows_to_infinity
from .tiles import Band

_TILE = 512


class PlainKernel:
    """Computes in fp32 (fp64 for fp64 inputs), whatever the inputs are."""

    name = "plain"
    backward_rows: int | None = None

    def __init__(self, softcap: float | None = None, reason: str = "") -> None:
        """`softcap`: scores s become softcap · tanh(s / softcap), as in Gemma 2 (arXiv 2408.00118, section 2).

        `reason`: why it is not a fused kernel.
        """
        self.softcap, self.reason = softcap, reason

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, E] in the inputs' dtype and log-sum-exp [B, H, Q] of one block."""
        dtype = accumulation_dtype(query.dtype)
        batch, heads, length, _ = query.shape
        out = query.new_empty((batch, heads, length, value.shape[3]), dtype=dtype)
        lse = query.new_empty((batch, heads, length), dtype=dtype)
        with without_autocast(query):
            for rows in _tiles(0, length):
                running = RunningAttention(out[:, :, rows], lse[:, :, rows])
                for columns in _tiles(*band.columns_of(rows, key.shape[2])):
                    here = None if terms is None else terms.part(rows, columns)
                    scores, _ = self._scores(query, key, rows, columns, band, scale, here)
                    block_lse = torch.logsumexp(scores, dim=-1)
                    weights = torch.exp(scores - unseen_rows_to_infinity(block_lse).unsqueeze(-1))
                    if here is not None and here.dropout:
                        weights *= here.weight_factors(dtype)
                    block_out = _fold(weights, value.shape[1]) @ value[:, :, columns].to(dtype)
                    running.add(slice(None), block_out.reshape(batch, heads, -1, value.shape[3]), block_lse)
                running.finish()
        return out.to(query.dtype), lse

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients, where `out` and `lse` may also cover keys that are not given here."""
        query, grad_out, out, lse, scale = read
        dtype = accumulation_dtype(query.dtype)
        kv_heads = key.shape[1]
        with without_autocast(query):
            for rows in _tiles(0, query.shape[2]):
                grad = grad_out[:, :, rows].to(dtype)
                delta = (grad * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
                grad_folded, query_folded = _fold(grad, kv_heads), _fold(query[:, :, rows].to(dtype), kv_heads)
                for columns in _tiles(*band.columns_of(rows, key.shape[2])):
                    here = None if terms is None else terms.part(rows, columns)
                    scores, slopes = self._scores(query, key, rows, columns, band, scale, here)
                    weights = torch.exp(scores - lse[:, :, rows].unsqueeze(-1))
                    grad_weights = (grad_folded @ value[:, :, columns].to(dtype).mT).view_as(weights)
                    used = weights
                    if here is not None and here.dropout:
                        factors = here.weight_factors(dtype)
                        used, grad_weights = weights * factors, grad_weights * factors
                    grad_scores = weights * (grad_weights - delta) * scale
                    if slopes is not None:
                        grad_scores *= slopes
                    folded = _fold(grad_scores, kv_heads)
                    into.value[:, :, columns] += _fold(used, kv_heads).mT @ grad_folded
                    into.key[:, :, columns] += folded.mT @ query_folded
                    into.query[:, :, rows] += (folded @ key[:, :, columns].to(dtype)).view(*grad.shape[:3], -1)

    def _scores(
        self,
        query: Tensor,
        key: Tensor,
        rows: slice,
        columns: slice,
        band: Band,
        scale: float,
        terms: Terms | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Scaled, capped and masked scores [B, H, rows, columns], and the slopes of capping, if there is any."""
        dtype = accumulation_dtype(query.dtype)
        queries = query[:, :, rows].to(dtype)
        folded = _fold(queries, key.shape[1]) @ key[:, :, columns].to(dtype).mT
        scores = folded.view(*queries.shape[:3], -1).mul_(scale)
        slopes = None
        if self.softcap is not None:
            capped = scores.div_(self.softcap).tanh_()
            slopes = 1 - capped.square()
            scores = capped.mul_(self.softcap)
        if terms is not None and terms.adds:
            scores = scores + terms.added(dtype)
        row = torch.arange(rows.start, rows.stop, device=query.device).unsqueeze(-1)
        column = torch.arange(columns.start, columns.stop, device=query.device)
        if band.upper is not None:
            scores.masked_fill_(column - row > band.upper, -math.inf)
        if band.lower is not None:
            scores.masked_fill_(column - row < band.lower, -math.inf)
        return scores, slopes


def _tiles(start: int, stop: int) -> Iterator[slice]:
    return (slice(first, min(first + _TILE, stop)) for first in range(start, stop, _TILE))


def _fold(x_BHQN: Tensor, kv_heads: int) -> Tensor:
    """[B, H, Q, N] → [B, K, G·Q, N]: the queries of all heads that share a key/value head, in one matrix."""
    batch, _, _, width = x_BHQN.shape
    return x_BHQN.reshape(batch, kv_heads, -1, width)
