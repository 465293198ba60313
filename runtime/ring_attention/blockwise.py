"""Exact attention over a sequence that is split over the ranks of a context-parallel group, block by block.

Keys and values of the other ranks come around a ring or all at once (`ring` has both); each block is computed by a
local kernel and merged by its log-sum-exp.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, C further keys, D head dim.

Attention over ranks as one operator of torch, which `torch.compile` keeps whole: nothing of it is traced.

The operator takes tensors, numbers and names only: the process group goes by its name, documents as one list of borders
with the number of them in each row.

Attention over the keys of a sequence and further keys beside them, which every rank has whole.

The keys of the sequence are those of `ring_attention`. The further ones (such as keys that stand for windows of tokens)
are one more block, merged by its log-sum-exp: no more of the scores is in memory than a kernel has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.ring_attention.kernels.kernel import Gradients

from .execution import attention_backward, attention_call, attention_forward, autocast, queries_of_pass
from .kernels import Tile
from .kernels.blocks import RunningAttention, add_gradients, attend
from .kernels.kernel import Kernel, Terms, accumulation_dtype
from .kernels.selection import select_kernel
from .passes import AttentionCall, Pass, once
from .sequence import Documents

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .execution import AttentionOptions, RingOptions


_OPTIONS = (
    "str carrier, str group, str layout, bool causal, float? scale, int? window, int[]? borders, int[]? counts, "
    "bool per_document, float? softcap, float dropout, int? dropout_seed, int first_row, int first_head, "
    "int? inner_ranks"
)
_PLAIN: dict[str, Any] = {
    "causal": True,
    "scale": None,
    "window": None,
    "borders": None,
    "counts": None,
    "per_document": False,
    "softcap": None,
    "dropout": 0.0,
    "dropout_seed": None,
    "first_row": 0,
    "first_head": 0,
    "inner_ranks": None,
}
"""What follows the names of carrier, group and layout in `_OPTIONS`, as it is where nobody says it."""
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? alibi_slopes, Tensor? bias"
_ALONE = ""
"""The name of no group."""


def traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    carrier: str,
    group: dist.ProcessGroup | None,
    sinks: Tensor | None,
    *,
    layout: CpLayout | str = CpLayout.ZIGZAG,
    documents: Documents | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, with the arguments of `ring_attention`; documents as lists only."""
    name = layout.value if isinstance(layout, CpLayout) else layout
    borders, counts = _flat(documents)
    found: tuple[Tensor, Tensor] = torch.ops.parcompile.attention_over_ranks(
        *(query, key, value, sinks, alibi_slopes, bias, carrier),
        _ALONE if group is None else group.group_name,
        *(name, *{**_PLAIN, "borders": borders, "counts": counts, **options}.values()),
    )
    return found


def _flat(documents: Any) -> tuple[list[int] | None, list[int] | None]:
    if documents is None:
        return None, None
    if isinstance(documents, Tensor) or any(isinstance(row, Tensor) for row in documents):
        raise ValueError("ring attention: under torch.compile documents are lists of numbers, not tensors")
    if not documents or isinstance(documents[0], int):
        return list(documents), None
    return [border for row in documents for border in row], [len(row) for row in documents]


def _call(query: Tensor, key: Tensor, value: Tensor, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    (sinks, alibi_slopes, bias), (carrier, group, layout, *others) = tensors, options
    named = dict(zip(_PLAIN, others, strict=True))
    documents, counts = named.pop("borders"), named.pop("counts")
    if counts is not None:
        ends = list(itertools.accumulate(counts))
        documents = [list(documents[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    return attention_call(
        *(query, key, value, carrier),
        group=None if group == _ALONE else _resolve_process_group(group),
        layout=layout,
        documents=documents,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        bias=bias,
        **named,
    )


@torch.library.custom_op(
    "parcompile::attention_over_ranks", mutates_args=(), schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _operator(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return attention_forward(_call(query, key, value, rest[:3], rest[3:]), query, key, value, rest[0])


@_operator.register_fake
def _shapes(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _width = query.shape
    out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, length), dtype=accumulation_dtype(query.dtype))


@torch.library.custom_op(
    "parcompile::attention_over_ranks_backward",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor out, Tensor lse, Tensor grad_out, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_operator(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tensors, (out, lse, grad_out), options = rest[:3], rest[3:6], rest[6:]
    call = _call(query, key, value, tensors, options)
    *grads, of_sinks = attention_backward(call, query, key, value, tensors[0], out, lse, grad_out)
    return *grads, query.new_empty(0) if of_sinks is None else of_sinks


@_backward_operator.register_fake
def _shapes_of_gradients(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks = rest[0]
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *grads, of_sinks = torch.ops.parcompile.attention_over_ranks_backward(*ctx.saved_tensors, grad_out, *ctx.options)
    return *grads, None if ctx.saved_tensors[3] is None else of_sinks, None, None, *[None] * len(ctx.options)


_operator.register_autograd(_differentiate, setup_context=_keep)


@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[RingOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[RingOptions]
) -> Tensor: ...


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Unpack[RingOptions]
) -> Any:
    """Attention of this rank's queries over the keys of every rank of `group`; differentiable in all tensors.

    Every rank of the group calls it with equal shapes and masks. The local tokens are those that the layout deals to
    the rank (`split_sequence`), in their order.

    Args:
        query: [B, H, S, D].
        key: [B, K, S, D] with H a multiple of K; shared heads are neither repeated in memory nor on the wire.
        value: [B, K, S, E]; with E other than D on a slower kernel.
        group: the context-parallel group, any part of the world. None or a group of one rank: plain local attention.
        layout: how the sequence is dealt to the ranks; zigzag, the default, balances causal attention.
        causal: whether a query sees only keys that are not later in the sequence, as it does by default.
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
        dropout: the chance that a weight is dropped, on a slower kernel; default 0.
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
    return attend_over_ranks(query, key, value, "ring", return_lse=return_lse, **options)


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Unpack[AttentionOptions]
) -> Any:
    """The same attention as `ring_attention` with these arguments; the keys of all ranks are gathered at once.

    For short rings: few large tiles instead of many, and next to nothing to merge. What is gathered are the keys and
    values of one group of heads, while the group before it is computed; a window gathers only what it reaches.

    Raises:
        ValueError: as `ring_attention`.

    Source: Llama 3, arXiv 2407.21783, section 3.3.2.
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
        out, lse = _Attention.apply(query, key, value, sinks, options.get("bias"), call)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor]:
        out, lse = once(lambda: attention_forward(call, query, key, value, sinks))
        if bias is not None and bias.is_inference():
            bias = bias.clone()
        ctx.save_for_backward(query, key, value, sinks, bias, out, lse)
        ctx.call = call.biased(None)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, bias, out, lse = ctx.saved_tensors
        call = ctx.call if bias is None else ctx.call.biased(bias)
        return *attention_backward(call, query, key, value, sinks, out, lse, grad_out), None, None


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
    out: Tensor = _AttentionBeside.apply(query, key, value, further, bias, sinks, call, beside)  # type: ignore[no-untyped-call]
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


class _AttentionBeside(torch.autograd.Function):
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
