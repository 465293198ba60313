"""Attention over ranks as one operator of torch, which `torch.compile` keeps whole: nothing of it is traced.

The operator takes tensors, numbers and names only: the process group goes by its name, documents as one list of borders
with the number of them in each row.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from parcompile.layout.sequence import CpLayout

from .execution import attention_backward, attention_call, attention_forward
from .kernels.kernel import accumulation_dtype
from .packing import Documents

_OPTIONS = (
    "str carrier, str group, str layout, bool causal, float? scale, int? window, int[]? borders, int[]? counts, "
    "bool per_document, float? softcap, float dropout, int? dropout_seed, int first_row, int first_head, "
    "int? inner_ranks"
)
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
    layout: CpLayout | str = "zigzag",
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    documents: Documents | None = None,
    per_document: bool = False,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    first_row: int = 0,
    first_head: int = 0,
    inner_ranks: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, with the arguments of `ring_attention`; documents as lists only."""
    borders, counts = _flat(documents)
    found: tuple[Tensor, Tensor] = torch.ops.parcompile.attention_over_ranks(
        query,
        key,
        value,
        sinks,
        alibi_slopes,
        bias,
        carrier,
        _ALONE if group is None else group.group_name,
        layout.value if isinstance(layout, CpLayout) else layout,
        causal,
        scale,
        window,
        borders,
        counts,
        per_document,
        softcap,
        dropout,
        dropout_seed,
        first_row,
        first_head,
        inner_ranks,
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
    (sinks, alibi_slopes, bias), (carrier, group, layout, causal, scale, window, borders, counts, *rest) = (
        tensors,
        options,
    )
    per_document, softcap, dropout, dropout_seed, first_row, first_head, inner_ranks = rest
    documents: Any = borders
    if counts is not None:
        ends = list(itertools.accumulate(counts))
        documents = [list(borders[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    return attention_call(
        query,
        key,
        value,
        carrier,
        group=None if group == _ALONE else _resolve_process_group(group),
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
