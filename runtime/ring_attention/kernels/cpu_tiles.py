"""Attention on CPUs in matrix products of tiles of scores that stay in the cache.

Weights are powers of two of the scores, which are scaled by log2 e. What is subtracted from each row of scores is a
further column of the product that they are: no pass over them.

KeySource: the online softmax of FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.

torch's fused kernel for CPUs computes 512 keys where a query sees the first of them, sums dK and dV in bf16, and makes
80 GFLOP/s of the 200 of torch's bf16 products on a core that has bf16 dot products but no matrix unit (Zen 4). Here
tiles end where a band ends, and every sum over tiles is in fp32.

Shapes: B batch, H query heads, K key/value heads, G = H / K, S key tokens, D head dim of queries and keys, E head dim
of values; of a tile: N of the K heads, n query tokens, R = G·n rows of all query heads that read one, w key tokens.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parcompile.runtime.ring_attention.kernels.kernel import Gradients, Queries

from . import FULL, Band, spans
from .kernel import Kernel, Terms, accumulation_dtype, without_autocast

_HIGHEST = 40.0
"""Scores above the level of their row by less than this need no new level: fp32 ends at 127."""
LOG2_E = math.log2(math.e)


_memory = threading.local()


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Within it, blocks take their memory from those before: to get new pages from the system takes long.

    A few MB, the same for any length; given back at the end.
    """
    before = getattr(_memory, "held", None)
    _memory.held = {} if before is None else before
    try:
        yield
    finally:
        _memory.held = before


class Scratch:
    """Memory for one tile after the other."""

    def __init__(self, like: Tensor, scores: int) -> None:
        """`exact`: dtype of scores and sums; `fast`: that of products with weights. `scores`: the most of a tile."""
        self.exact = accumulation_dtype(like.dtype)
        self.fast = like.dtype if like.dtype is torch.bfloat16 else self.exact
        self._most, self._device = scores, like.device
        held: dict[tuple[str, torch.dtype], Tensor] | None = getattr(_memory, "held", None)
        self._held = {} if held is None else held

    def take(self, use: str, dtype: torch.dtype, *shape: int, at_least: int = 0) -> Tensor:
        """Memory for one use at a time, with anything in it."""
        count = math.prod(shape)
        held = self._held.get((use, dtype))
        if held is None or held.numel() < count or held.device != self._device:
            held = torch.empty(max(count, at_least), dtype=dtype, device=self._device)
            self._held[use, dtype] = held
        return held[:count].view(shape)

    def scores(self, *shape: int) -> Tensor:
        """For the scores of a tile."""
        return self.take("scores", self.exact, *shape, at_least=self._most)

    def rounded(self, weights: Tensor) -> Tensor:
        """Weights, in the place of the scores, as a factor of fast products."""
        if self.fast is self.exact:
            return weights
        return self.take("weights", self.fast, *weights.shape, at_least=self._most).copy_(weights)

    def beside(self, weights: Tensor) -> Tensor:
        """For the gradients of rounded weights: where the scores were, if the weights are elsewhere."""
        if self.fast is self.exact:
            return self.take("weights", self.fast, *weights.shape, at_least=self._most)
        return self.take("scores", self.exact, self._most).view(self.fast)[: weights.numel()].view(weights.shape)

    def filled(self, use: str, dtype: torch.dtype, x_HnD: Tensor, heads: int, further: int = 0) -> Tensor:
        """[N·G, n, D] → [N, R, D + further columns]: a copy; what is in these columns is open."""
        _, tokens, width = x_HnD.shape
        memory = self.take(use, dtype, len(x_HnD), tokens, width + further)
        memory[..., :width].copy_(x_HnD)
        return memory.view(heads, -1, width + further)

    def with_ones(self, use: str, dtype: torch.dtype, x_NwD: Tensor, columns: int) -> Tensor:
        """[N, w, D] → [N, w, D + further columns of ones]."""
        memory = self.filled(use, dtype, x_NwD, len(x_NwD), columns)
        memory[..., x_NwD.shape[2] :].fill_(1.0)
        return memory


class SoftmaxRows:
    """The softmax of rows over one tile of keys after another, and the sum of values that it weighs.

    Weights are relative to a level of each row, which scores are given without: a further column of the product. It is
    the highest score of the first tile, and rises only when weights grow out of bounds.
    """

    def __init__(self, scratch: Scratch, queries_HnD: Tensor, kv_heads: int, scale: float) -> None:
        self._scratch = scratch
        self._rows_and_level = scratch.filled("rows", scratch.exact, queries_HnD, kv_heads, 1)
        self._rows_and_level[..., :-1].mul_(scale * LOG2_E)
        self._level = self._rows_and_level[..., -1:].zero_()
        self._total: Tensor | None = None
        self._some_saw_none = True

    def scores(self, keys_NwD: Tensor) -> Tensor:
        """Those of a tile [N, R, w], below the level."""
        scratch = self._scratch
        tile = scratch.scores(*self._rows_and_level.shape[:2], keys_NwD.shape[1])
        return torch.bmm(self._rows_and_level, scratch.with_ones("keys", scratch.exact, keys_NwD, 1).mT, out=tile)

    def add(self, scores_NRw: Tensor, values_NwE: Tensor) -> None:
        """Another tile, whose scores are used up."""
        if self._some_saw_none or not float(scores_NRw.amax()) < _HIGHEST:
            self._raise_level(scores_NRw)
        scratch, weights = self._scratch, scores_NRw.exp2_()
        total = weights.sum(-1, keepdim=True)
        shape = *weights.shape[:2], values_NwE.shape[2]
        out = scratch.take("product", scratch.fast, *shape)
        torch.bmm(scratch.rounded(weights), values_NwE.to(scratch.fast), out=out)
        if self._total is None:
            self._total, self._out = total, scratch.take("sum", scratch.exact, *shape).copy_(out)
        else:
            self._total += total
            self._out += out

    def _raise_level(self, scores_NRw: Tensor) -> None:
        rise = scores_NRw.amax(-1, keepdim=True)
        seen = rise != -math.inf
        if self._total is None:
            rise.masked_fill_(~seen, 0.0)
        else:
            saw = self._total != 0
            # Without a key so far the level may also fall: to the first scores.
            rise = torch.where(saw, rise.clamp(min=0.0), rise.masked_fill(~seen, 0.0))
            fading = torch.exp2(-rise).masked_fill_(~saw, 1.0)
            self._total *= fading
            self._out *= fading
            seen |= saw
        self._some_saw_none = not bool(seen.all())
        scores_NRw -= rise
        self._level -= rise

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output [N, R, E] and log-sum-exp [N, R]: 0 and −inf in rows of which a bias hides all keys."""
        assert self._total is not None, "the queries see no key"
        lse = self._total.log2().sub_(self._level).squeeze(-1).div_(LOG2_E)
        return self._out.div_(self._total.masked_fill_(self._total == 0, 1.0)), lse


class GradientRows:
    """The query side of tiles [N, w, R] backward, and its gradients."""

    def __init__(self, scratch: Scratch, tensors: Sequence[Tensor], kv_heads: int, scale: float) -> None:
        """`tensors` [N·G, n, …]: queries, gradients of the output, the output, and its natural log-sum-exp."""
        queries, grads, out, lse = tensors
        exact, fast = scratch.exact, scratch.fast
        product = scratch.take("sum", exact, *grads.shape).copy_(grads).mul_(out)
        delta = product.sum(-1).view(kv_heads, -1)
        # In two parts: 16 bits of it, and 16 of what these leave.
        high = delta.to(fast)
        self._scratch, self._scale = scratch, scale
        self._queries = scratch.filled("queries", fast, queries, kv_heads)
        self._grads = scratch.filled("grads", fast, grads, kv_heads)
        self._grads_and_delta = scratch.filled("grads and delta", fast, grads, kv_heads, 2)
        torch.neg(high, out=self._grads_and_delta[..., -2])
        self._grads_and_delta[..., -1].copy_(high - delta)
        self._rows_and_lse = scratch.filled("rows", exact, queries, kv_heads, 1)
        self._rows_and_lse[..., :-1].mul_(scale * LOG2_E)
        torch.mul(lse.reshape(kv_heads, -1), -LOG2_E, out=self._rows_and_lse[..., -1])
        self._sum = scratch.take("sum", exact, *self._queries.shape).zero_()

    def scores(self, keys_NwD: Tensor) -> Tensor:
        """Those of a tile [N, w, R], below the log-sum-exp."""
        scratch = self._scratch
        tile = scratch.scores(*keys_NwD.shape[:2], self._queries.shape[1])
        return torch.bmm(scratch.with_ones("keys", scratch.exact, keys_NwD, 1), self._rows_and_lse.mT, out=tile)

    def add(self, scores: Tensor, keys: Tensor, values: Tensor, grad_keys: Tensor, grad_values: Tensor) -> None:
        """Add the gradients of a tile, whose scores are used up."""
        scratch, fast = self._scratch, self._scratch.fast
        weights = scratch.rounded(scores.exp2_())
        grad_values += torch.bmm(weights, self._grads, out=scratch.take("product", fast, *values.shape))
        values_and_ones = scratch.with_ones("values", fast, values, 2)
        grad_weights = torch.bmm(values_and_ones, self._grads_and_delta.mT, out=scratch.beside(weights))
        grad_scores = grad_weights.mul_(weights)
        product = torch.bmm(grad_scores, self._queries, out=scratch.take("product", fast, *keys.shape))
        grad_keys.add_(product, alpha=self._scale)
        product = scratch.take("product", fast, *self._queries.shape)
        self._sum += torch.bmm(grad_scores.mT, keys.to(fast), out=product)

    def add_to(self, grad_queries_HnD: Tensor) -> None:
        """Add the gradients of the queries."""
        grad_queries_HnD.add_(self._sum.view(grad_queries_HnD.shape), alpha=self._scale)


_ROWS = 1024
"""Rows of a tile, those of all its heads: enough for the full rate of matrix products."""
_KEYS = 512
"""Key tokens of a tile."""
_DIAGONAL_QUERIES, _DIAGONAL_ROWS = 128, 256
"""Query tokens of a tile with a diagonal, half of whose square is computed in vain; more where heads share no keys."""


class CpuTileKernel(Kernel):
    """fp64, fp32, bf16 and fp16, any band, any head dims, and numbers that are added to the scores."""

    name = "cpu-tiles"

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
                for queries in spans(0, length, _tokens_at_once(query, key, band)):
                    here = row, q_heads, queries
                    softmax = SoftmaxRows(scratch, query[here], _size(kv_heads), scale)
                    for keys in spans(*band.columns_of(queries, key.shape[2]), _KEYS):
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
                for queries in spans(0, query.shape[2], _tokens_at_once(query, key, band)):
                    here = row, q_heads, queries
                    tensors = [x[here] for x in (query, grad_out, out, lse)]
                    rows = GradientRows(scratch, tensors, _size(kv_heads), scale)
                    for keys in spans(*band.columns_of(queries, key.shape[2]), _KEYS):
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
    """A row of the batch, and its query and key/value heads, as many as fill a tile.

    Where tensors have no values the first stand for all: no others have larger tiles, and each takes their memory.
    """
    share = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        for heads in spans(0, key.shape[1], _kv_heads_at_once(query, key, band)):
            yield row, slice(heads.start * share, heads.stop * share), heads
            if query.is_meta:
                return


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


def _size(span: slice) -> int:
    return int(span.stop - span.start)


def _at(terms: Terms | None, here: tuple[int, slice, slice], keys: slice) -> Terms | None:
    """The terms of one tile."""
    if terms is None:
        return None
    row, heads, queries = here
    return terms.of_pass(slice(row, row + 1), heads).part(queries, keys)
