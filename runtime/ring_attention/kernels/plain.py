"""Attention written out in matrix products, for every device and dtype; heads padded for kernels of one width.

It walks over tiles of scores, so memory is linear in the sequence length. Shapes: B batch, H query heads, K key/value
heads, G = H / K, Q query tokens, S key tokens, D head dim of queries and keys, E head dim of values.

Latent attention has keys of 192 features and values of 128; other heads are no multiple of 8. Only what a kernel reads
is padded, block by block: messages and what is kept stay as they are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from . import Band, spans
from .blocks import RunningAttention, unseen_rows_to_infinity
from .kernel import Kernel, PackingKernel, Terms, accumulation_dtype, without_autocast
from .packs import Launch

_TILE = 512


class PlainKernel(Kernel):
    """Computes in fp32 (fp64 for fp64 inputs), whatever the inputs are."""

    name = "plain"

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
            for rows in spans(0, length, _TILE):
                running = RunningAttention(out[:, :, rows], lse[:, :, rows])
                for columns in spans(*band.columns_of(rows, key.shape[2]), _TILE):
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
            for rows in spans(0, query.shape[2], _TILE):
                grad = grad_out[:, :, rows].to(dtype)
                delta = (grad * out[:, :, rows].to(dtype)).sum(-1, keepdim=True)
                grad_folded, query_folded = _fold(grad, kv_heads), _fold(query[:, :, rows].to(dtype), kv_heads)
                for columns in spans(*band.columns_of(rows, key.shape[2]), _TILE):
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
        self, query: Tensor, key: Tensor, rows: slice, columns: slice, band: Band, scale: float, terms: Terms | None
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


def _fold(x_BHQN: Tensor, kv_heads: int) -> Tensor:
    """[B, H, Q, N] → [B, K, G·Q, N]: the queries of all heads that share a key/value head, in one matrix."""
    batch, _, _, width = x_BHQN.shape
    return x_BHQN.reshape(batch, kv_heads, -1, width)


def padded(kernel: Kernel, width: int) -> Kernel:
    """`kernel`, with heads padded to `width` features."""
    return _PaddedPacks(kernel, width) if isinstance(kernel, PackingKernel) else _Padded(kernel, width)


class _Padded(Kernel):
    """Gradients are added without what stands in the padding."""

    def __init__(self, kernel: Kernel, width: int) -> None:
        self._kernel, self._width = kernel, width
        self.name = f"{kernel.name}, padded to {width}"
        self.backward_rows, self.one_call = kernel.backward_rows, kernel.one_call

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the block."""
        wide = map(self._wide, (query, key, value))
        out, lse = self._kernel.forward(*wide, band=band, scale=scale, terms=terms)
        return out[..., : value.shape[3]], lse

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of the block."""
        wide = map(self._wide, (key, value))
        self._kernel.backward(self._read(read), *wide, band=band, terms=terms, into=into)

    def _read(self, read: Queries) -> Queries:
        query, grad_out, out = map(self._wide, (read.query, read.grad_out, read.out))
        return Queries(query, grad_out, out, read.lse, read.scale)

    def _wide(self, heads: Tensor) -> Tensor:
        return F.pad(heads, (0, self._width - heads.shape[3])) if heads.shape[3] < self._width else heads


class _PaddedPacks(_Padded):
    """Of a kernel that computes many tiles in one launch."""

    _kernel: PackingKernel

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, *, launch: Launch, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all queries of many tiles."""
        out, lse = self._kernel.forward_packed(*map(self._wide, (query, key, value)), launch=launch, scale=scale)
        return out[..., : value.shape[3]], lse

    def backward_packed(self, read: Queries, key: Tensor, value: Tensor, *, launch: Launch, into: Gradients) -> None:
        """Add the gradients of many tiles."""
        self._kernel.backward_packed(self._read(read), *map(self._wide, (key, value)), launch=launch, into=into)
