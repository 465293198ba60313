"""Exact attention over a sequence that is split over the ranks of a context-parallel group, block by block.

Keys and values of the other ranks come around a ring (`ring`) or all at once (`all_gather`); each block is computed by
a local kernel and merged by its log-sum-exp.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.layout.sequence import CpLayout

from .execution import attention_backward, attention_call, attention_forward
from .inputs import autocast
from .packing import Documents
from .passes import AttentionCall, attention_once
from .traced import traced_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .inputs import AttentionOptions, RingOptions


@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[RingOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[RingOptions]
) -> Tensor: ...


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: CpLayout | str = CpLayout.ZIGZAG,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    documents: Documents | None = None,
    per_document: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    first_row: int = 0,
    first_head: int = 0,
    inner_ranks: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of this rank's queries over the keys of every rank of `group`; differentiable in all tensors.

    Every rank of the group calls it with equal shapes and masks. The local tokens are those that the layout deals to
    the rank (`split_sequence`), in their order.

    Args:
        query: [B, H, S, D].
        key: [B, K, S, D] with H a multiple of K; shared heads are neither repeated in memory nor on the wire.
        value: [B, K, S, E]; with E other than D on a slower kernel.
        group: the context-parallel group, any part of the world. None or a group of one rank: plain local attention.
        layout: how the sequence is dealt to the ranks; zigzag balances causal attention.
        causal: whether a query sees only keys that are not later in the sequence.
        scale: factor on the scores; default 1/√D.
        window: a query sees only keys less than this many tokens away, itself included.
        documents: where packed documents begin in the whole sequence, and its length: `cu_seqlens`, [0, …, S · ranks].
            A query sees only keys of its document. One list for all rows of the batch, or one list per row.
        per_document: the layout was applied to each document on its own, which balances the ranks.
        sinks: for each query head [H] the score of one more key, which has no value. The gradient is this rank's part
            of the sum over ranks.
        softcap: scores s become softcap · tanh(s / softcap), on a slower kernel.
        alibi_slopes: for each query head [H] the slope of ALiBi: slope · distance is subtracted from the scores. No
            gradient.
        bias: added to the scores: [1 or B, 1 or H, S, S · ranks] for this rank's queries and all keys in the order of
            the sequence; −inf hides a key. No gradient.
        dropout: the chance that a weight is dropped, on a slower kernel.
        dropout_seed: equal on all ranks, and another one for each layer and step. A mask depends on the seed and the
            place in the whole batch and sequence only, not on ranks, layout or implementation.
        first_row: what dropout counts rows of the batch from, where these are some of all (data parallelism).
        first_head: what dropout counts query heads from, where these are some of all (tensor parallelism).
        inner_ranks: a double ring: keys go round among this many neighbouring ranks (those of a node) before all of
            them move on to the next node at once.
        return_lse: give the log-sum-exp of the scores too, of all keys and of the sink.

    Returns:
        [B, H, S, E] in the dtype of the inputs, stored so that `out.transpose(1, 2)` is contiguous. A query that sees
        no key gets 0, and so does its gradient. With `return_lse` also [B, H, S] in fp32 (fp64 for fp64), −inf for such
        a query; no gradient goes through it.

    Raises:
        ValueError: shapes, dtypes, devices or masks that do not fit together, with the numbers.
    """
    return attend_over_ranks(
        query,
        key,
        value,
        "ring",
        group=group,
        layout=layout,
        causal=causal,
        scale=scale,
        window=window,
        documents=documents,
        per_document=per_document,
        sinks=sinks,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        dropout=dropout,
        dropout_seed=dropout_seed,
        first_row=first_row,
        first_head=first_head,
        inner_ranks=inner_ranks,
        return_lse=return_lse,
    )


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Unpack[AttentionOptions]
) -> Any:
    """The same attention as `ring_attention` with these arguments; the keys of all ranks are gathered at once.

    For short rings: few large tiles instead of many, and next to nothing to merge. What is gathered are the keys and
    values of one group of heads, while the group before it is computed; a window gathers only what it reaches.

    Raises:
        ValueError: as `ring_attention`.

    KeySource: Llama 3, arXiv 2407.21783, section 3.3.2.
    """
    return attend_over_ranks(query, key, value, "all_gather", return_lse=return_lse, **options)


def attend_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    carrier: str,
    *,
    group: dist.ProcessGroup | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """What `ring_attention` and `all_gather_attention` have in common."""
    query, key, value = autocast(query), autocast(key), autocast(value)
    if torch.compiler.is_compiling():
        out, lse = traced_attention(query, key, value, carrier, group, sinks, **options)
    else:
        call = attention_call(query, key, value, carrier, group=group, sinks=sinks, **options)
        out, lse = _Attention.apply(query, key, value, sinks, call)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        out, lse = attention_once(lambda: attention_forward(call, query, key, value, sinks))
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        return *attention_backward(ctx.call, query, key, value, sinks, out, lse, grad_out), None
