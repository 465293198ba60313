"""Attention on CPUs in matrix products of tiles of scores that stay in the cache.

torch's fused kernel for CPUs computes 512 keys where a query sees the first of them, sums dK and dV in bf16, and makes
80 GFLOP/s of the 200 of torch's bf16 products on a core that has bf16 dot products but no matrix unit (Zen 4). Here
tiles end where a band ends, and every sum over tiles is in fp32.

Shapes: B batch, H query heads, K key/value heads, G = H / K, S key tokens, D head dim of queries and keys, E head dim
of values; of a tile: N of the K heads, n query tokens, R = G·n rows, w key tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .cpu_products import LOG2_E, GradientRows, Scratch, SoftmaxRows
from .gradients import Gradients, Queries
from .precision import without_autocast
from .terms import Terms
from .tiles import FULL, Band

_ROWS = 1024
"""Rows of a tile, those of all its heads: enough for the full rate of matrix products."""
_KEYS = 512
"""Key tokens of a tile."""
_DIAGONAL_QUERIES, _DIAGONAL_ROWS = 128, 256
"""Query tokens of a tile with a diagonal, half of whose square is computed in vain; more where heads share no keys."""


class CpuTileKernel:
    """fp64, fp32, bf16 and fp16, any band, any head dims, and numbers that are added to the scores."""

    name = "cpu-tiles"
    backward_rows: int | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, band: Band, scale: float, terms: Terms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, E] in the inputs' dtype and log-sum-exp [B, H, Q] of one block."""
        batch, heads, length, _ = query.shape
        scratch = Scratch(query, _scores_at_once(query, key, band))
        # [B, Q, H, E] in memory, as fused kernels have it.
        out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
        lse = query.new_empty((batch, heads, length), dtype=scratch.exact)
        with without_autocast(query):
            for row, q_heads, kv_heads in _heads_at_once(query, key, band):
                for queries in _spans(0, length, _tokens_at_once(query, key, band)):
                    here = row, q_heads, queries
                    softmax = SoftmaxRows(scratch, query[here], _size(kv_heads), scale)
                    for keys in _spans(*band.columns_of(queries, key.shape[2]), _KEYS):
                        scores = softmax.scores(key[row, kv_heads, keys])
                        by_token = scores.view(len(scores), -1, _size(queries), _size(keys))
                        _adjust(by_token, queries, keys, band, _at(terms, here, keys))
                        softmax.add(scores, value[row, kv_heads, keys])
                    block_out, block_lse = softmax.finish()
                    out[here] = block_out.view(out[here].shape)
                    lse[here] = block_lse.view(lse[here].shape)
        return out, lse

    def backward(
        self, read: Queries, key: Tensor, value: Tensor, *, band: Band, terms: Terms | None = None, into: Gradients
    ) -> None:
        """Add the gradients of one block, given output and log-sum-exp over all blocks.

        Tiles are transposed [N, w, R]: one alone of the three products with them then reads them against the grain.
        """
        query, grad_out, out, lse, scale = read
        scratch = Scratch(query, _scores_at_once(query, key, band))
        with without_autocast(query):
            for row, q_heads, kv_heads in _heads_at_once(query, key, band):
                for queries in _spans(0, query.shape[2], _tokens_at_once(query, key, band)):
                    here = row, q_heads, queries
                    tensors = [x[here] for x in (query, grad_out, out, lse)]
                    rows = GradientRows(scratch, tensors, _size(kv_heads), scale)
                    for keys in _spans(*band.columns_of(queries, key.shape[2]), _KEYS):
                        there = row, kv_heads, keys
                        scores = rows.scores(key[there])
                        by_token = scores.view(len(scores), _size(keys), -1, _size(queries)).permute(0, 2, 3, 1)
                        _adjust(by_token, queries, keys, band, _at(terms, here, keys))
                        rows.add(scores, key[there], value[there], into.key[there], into.value[there])
                    rows.add_to(into.query[here])


def _adjust(scores_NGnw: Tensor, queries: slice, keys: slice, band: Band, terms: Terms | None) -> None:
    """Add to scores what is added to them, and −inf where a query does not see a key."""
    if terms is not None and terms.adds:
        added_Hnw = terms.added(scores_NGnw.dtype)[0]
        scores_NGnw += (added_Hnw * LOG2_E).expand(scores_NGnw.shape[:2].numel(), -1, -1).view(scores_NGnw.shape)
    # The keys that not all of these queries see.
    hidden_to = 0 if band.lower is None else queries.stop - 1 + band.lower
    hidden_from = keys.stop if band.upper is None else queries.start + band.upper + 1
    start = keys.start if hidden_to > keys.start else max(keys.start, hidden_from)
    stop = keys.stop if hidden_from < keys.stop else min(keys.stop, hidden_to)
    if start < stop:
        transposed = scores_NGnw.stride(3) != 1
        mask = _mask(_size(queries), stop - start, start - queries.start, band, scores_NGnw.dtype, transposed)
        scores_NGnw[..., start - keys.start : stop - keys.start] += mask.to(scores_NGnw.device)


@functools.lru_cache(maxsize=8)
def _mask(rows: int, columns: int, ahead: int, band: Band, dtype: torch.dtype, transposed: bool) -> Tensor:
    """0 where row i sees column j, which is `ahead + j − i` tokens before or behind it, and −inf elsewhere."""
    with torch.device("cpu"):  # kept for later calls: preflight makes tensors without values
        distance = torch.arange(columns) + ahead - torch.arange(rows).unsqueeze(-1)
        unseen = torch.zeros(rows, columns, dtype=torch.bool)
        if band.lower is not None:
            unseen |= distance < band.lower
        if band.upper is not None:
            unseen |= distance > band.upper
        mask = torch.zeros(rows, columns, dtype=dtype).masked_fill_(unseen, -math.inf)
    return mask.T.contiguous().T if transposed else mask


def _heads_at_once(query: Tensor, key: Tensor, band: Band) -> Iterator[tuple[int, slice, slice]]:
    """A row of the batch, and its query and key/value heads, as many as fill a tile."""
    share = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        for heads in _spans(0, key.shape[1], _kv_heads_at_once(query, key, band)):
            yield row, slice(heads.start * share, heads.stop * share), heads


def _kv_heads_at_once(query: Tensor, key: Tensor, band: Band) -> int:
    """Key/value heads of a tile."""
    rows = query.shape[1] // key.shape[1] * _tokens_at_once(query, key, band)
    return min(key.shape[1], max(1, _ROWS // rows))


def _scores_at_once(query: Tensor, key: Tensor, band: Band) -> int:
    """Scores of a tile."""
    rows = query.shape[1] // key.shape[1] * _tokens_at_once(query, key, band)
    return _kv_heads_at_once(query, key, band) * rows * min(_KEYS, key.shape[2])


def _tokens_at_once(query: Tensor, key: Tensor, band: Band) -> int:
    """Query tokens of a tile."""
    share = query.shape[1] // key.shape[1]
    most = max(1, _ROWS // share)
    if band != FULL:
        most = min(most, max(_DIAGONAL_QUERIES, _DIAGONAL_ROWS // share))
    return min(most, query.shape[2])


def _spans(start: int, stop: int, most: int) -> Iterator[slice]:
    return (slice(first, min(first + most, stop)) for first in range(start, stop, most))


def _size(span: slice) -> int:
    return int(span.stop - span.start)


def _at(terms: Terms | None, here: tuple[int, slice, slice], keys: slice) -> Terms | None:
    """The terms of one tile."""
    if terms is None:
        return None
    row, heads, queries = here
    return terms.of_pass(slice(row, row + 1), heads).part(queries, keys)
