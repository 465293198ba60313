"""Attention over the keys of a sequence and further keys beside them, which every rank has whole.

The keys of the sequence are those of `ring_attention`. The further ones (such as keys that stand for windows of tokens)
are one more block, merged by its log-sum-exp: no more of the scores is in memory than a kernel has.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, C further keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.runtime.ring_attention.kernels.kernel import Gradients

from .execution import attention_backward, attention_call, attention_forward, queries_of_pass
from .inputs import autocast
from .kernels import Tile
from .kernels.blocks import add_gradients, attend
from .kernels.kernel import Kernel, Terms, accumulation_dtype
from .kernels.merge import RunningAttention
from .kernels.selection import select_kernel
from .passes import AttentionCall, Pass, once


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def attention_beside(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    further: Tensor,
    bias: Tensor,
    *,
    tiles: Sequence[tuple[slice, slice]] | None = None,
    sinks: Tensor | None = None,
    implementation: str = "ring",
    **options: Any,
) -> Tensor:
    """Attention of this rank's queries over the keys of every rank of a group, and over further keys.

    Args:
        query: [B, H, S, D].
        key: [B, K, S, D].
        value: [B, K, S, D].
        further: [B, K, C, D], keys that are values too.
        bias: added to their scores, [B, 1, S, C]; −inf hides a key. No gradient.
        tiles: queries and further keys outside of which everything is hidden; None: nothing is known of it.
        sinks: for each query head [H] the score of one more key, which has no value.
        implementation: "ring", "double_ring" or "all_gather", by which the keys of the sequence meet the queries.
        options: what it takes of them.

    Returns:
        [B, H, S, D], stored so that `out.transpose(1, 2)` is contiguous.
    """
    query, key, value, further = (autocast(one) for one in (query, key, value, further))
    carrier = "all_gather" if implementation == "all_gather" else "ring"
    call = attention_call(query, key, value, carrier, sinks=sinks, **options)
    every = [(slice(0, query.shape[2]), slice(0, further.shape[2]))] if tiles is None else tiles
    beside = _Beside(select_kernel(query, further, added=True), tuple(Tile(*one) for one in every))
    out: Tensor = _Attention.apply(query, key, value, further, bias, sinks, call, beside)  # type: ignore[no-untyped-call]
    return out


class _Beside:
    """How the further keys are computed."""

    def __init__(self, kernel: Kernel, tiles: tuple[Tile, ...]) -> None:
        self.kernel, self.tiles = kernel, tiles

    def terms(self, bias: Tensor, query: Tensor, one: Any) -> Terms:
        """What is added to their scores in a pass."""
        batch, heads, length, _ = query.shape
        queries, keys, rows, every = (
            torch.arange(count, device=query.device) for count in (length, bias.shape[3], batch, heads)
        )
        return Terms(queries, keys, rows, every, bias=bias).of_pass(one.rows, one.q_heads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        further: Tensor,
        bias: Tensor,
        sinks: Tensor | None,
        call: AttentionCall,
        beside: _Beside,
    ) -> Tensor:
        def further_keys(one: Pass, running: RunningAttention) -> None:
            every, terms = one.of_keys(further), beside.terms(bias, query, one)
            attend(beside.kernel, beside.tiles, one.of_queries(query), every, every, running, call.scale, terms)

        out, lse = once(lambda: attention_forward(call, query, key, value, sinks, further_keys))
        ctx.save_for_backward(query, key, value, further, bias, sinks, out, lse)
        ctx.call, ctx.beside = call, beside
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, further, bias, sinks, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        of_query, of_key, of_value, of_sinks = attention_backward(call, query, key, value, sinks, out, lse, grad_out)
        dtype = accumulation_dtype(query.dtype)
        of_further = torch.zeros_like(further, dtype=dtype)
        for one in call.passes:
            queries = queries_of_pass(call, one, query, grad_out, out, lse)
            keys, terms = one.of_keys(further), ctx.beside.terms(bias, query, one)
            total = one.of_queries(of_query).to(dtype)
            into = Gradients(total, one.of_keys(of_further), one.of_keys(of_further))  # a key is its value
            add_gradients(ctx.beside.kernel, ctx.beside.tiles, queries, keys, keys, into, terms)
            one.of_queries(of_query).copy_(total)
        return of_query, of_key, of_value, of_further.to(further.dtype), None, of_sinks, None, None
