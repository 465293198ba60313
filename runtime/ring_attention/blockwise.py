"""Exact attention over a sequence that is split over the ranks of a context-parallel group, block by block.

Keys and values of the other ranks come around a ring (`ring`) or all at once (`all_gather`); each block is computed by
a local kernel and merged by its log-sum-exp.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parcompile.layout.sequence import CpLayout

from .all_gather import gathered, gathered_backward
from .documents import Documents, documents_of_rows
from .gather_schedule import GatherSchedule, plan_gather
from .inputs import autocast, check_inputs, check_terms
from .kernels.blocks import attend
from .kernels.gradients import Gradients, Queries
from .kernels.merge import RunningAttention, unseen_rows_to_infinity
from .kernels.precision import accumulation_dtype
from .kernels.selection import select_kernel
from .kernels.terms import Terms
from .kernels.tiles import Tile
from .passes import AttentionCall, Pass, head_groups
from .recompute import attention_once
from .ring import around, ring_backward
from .route import Masking, RingStep, effective_layout, plan_route
from .sequence import local_positions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import AttentionOptions


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
) -> Tensor:
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

    Returns:
        [B, H, S, E] in the dtype of the inputs, stored so that `out.transpose(1, 2)` is contiguous. A query that sees
        no key gets 0, and so does its gradient.

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
    )


def all_gather_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    """The same attention as `ring_attention` with these arguments; the keys of all ranks are gathered at once.

    For short rings: few large tiles instead of many, and next to nothing to merge. What is gathered are the keys and
    values of one group of heads, while the group before it is computed; a window gathers only what it reaches.

    Raises:
        ValueError: as `ring_attention`.

    KeySource: Llama 3, arXiv 2407.21783, section 3.3.2.
    """
    return attend_over_ranks(query, key, value, "all_gather", **options)


def attend_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    carrier: str,
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
) -> Tensor:
    """What `ring_attention` and `all_gather_attention` have in common."""
    query, key, value = autocast(query), autocast(key), autocast(value)
    check_inputs(query, key, value, sinks)
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if rank < 0:
        raise ValueError(f"ring attention: global rank {dist.get_rank()} is not in the group that it was given")
    check_terms(query, size, alibi_slopes, bias, dropout, dropout_seed)
    banded = False
    schedules: list[tuple[slice, tuple[RingStep, ...] | GatherSchedule, Terms | None]] = []
    has_terms = alibi_slopes is not None or bias is not None or dropout > 0
    for rows, borders in documents_of_rows(documents, query.shape[0]):
        masking = Masking(causal, window, borders, per_document)
        banded |= masking.has_bands(effective_layout(CpLayout(layout), size))
        place = CpLayout(layout), size, rank, query.shape[2], masking
        schedule = plan_gather(*place) if carrier == "all_gather" else plan_route(*place, inner_ranks)
        terms = None
        if has_terms:
            length = query.shape[2]
            dealt = borders if per_document else None
            positions = [local_positions(layout, size, each, length * size, dealt) for each in range(size)]
            terms = Terms(
                positions[rank].to(query.device),
                torch.cat(positions).to(query.device),
                torch.arange(first_row, first_row + query.shape[0], device=query.device),
                torch.arange(first_head, first_head + query.shape[1], device=query.device),
                alibi_slopes,
                bias,
                dropout,
                dropout_seed or 0,
            )
        schedules.append((rows, schedule, terms))
    call = AttentionCall(
        group,
        select_kernel(
            query,
            value,
            banded=banded,
            softcap=softcap,
            added=alibi_slopes is not None or bias is not None,
            dropout=dropout > 0,
        ),
        query.shape[3] ** -0.5 if scale is None else scale,
        tuple(
            Pass(rows, q_heads, kv_heads, schedule, None if terms is None else terms.of_pass(rows, q_heads))
            for rows, schedule, terms in schedules
            for q_heads, kv_heads in head_groups(query[rows], key[rows], value[rows])
        ),
    )
    out: Tensor = _Attention.apply(query, key, value, sinks, call)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: AttentionCall
    ) -> Tensor:
        out, lse = attention_once(lambda: _forward(call, query, key, value, sinks))
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        bring_home = None
        ahead = gathered(call, key, value)
        for one in call.passes:
            queries = Queries(
                one.of_queries(query),
                one.of_queries(grad_out),
                one.of_queries(out),
                unseen_rows_to_infinity(one.of_queries(lse)),
                call.scale,
            )
            targets = Gradients(one.of_queries(grads[0]), one.of_keys(grads[1]), one.of_keys(grads[2]))
            # The last gradients of this pass travel while the next one computes.
            if isinstance(one.schedule, GatherSchedule):
                bring_home = gathered_backward(call, one, queries, *next(ahead), targets, bring_home)
            else:
                keys, values = one.of_keys(key), one.of_keys(value)
                bring_home = ring_backward(call, one, queries, keys, values, targets, bring_home)
        if bring_home is not None:
            bring_home()
        return (*grads, None if sinks is None else _sink_gradient(sinks, grad_out, out, lse), None)


def _forward(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output [B, H, S, E] and log-sum-exp [B, H, S], pass by pass."""
    batch, heads, length, _ = query.shape
    # [B, S, H, E] in memory: models join the heads of a token next.
    out = query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)
    lse = query.new_empty((batch, heads, length), dtype=accumulation_dtype(query.dtype))
    ahead = gathered(call, key, value)
    for one in call.passes:
        running = RunningAttention(one.of_queries(out), one.of_queries(lse))
        for tiles, keys, values, terms in _blocks(call, one, key, value, ahead):
            attend(call.kernel, tiles, one.of_queries(query), keys, values, running, call.scale, terms)
        if sinks is not None:
            running.add_sinks(sinks[one.q_heads])
        running.finish()
    return out, lse


def _blocks(
    call: AttentionCall, one: Pass, key: Tensor, value: Tensor, ahead: Iterator[tuple[Tensor, Tensor]]
) -> Iterator[tuple[tuple[Tile, ...], Tensor, Tensor, Terms | None]]:
    """Tiles, the keys and values that they are of, and these keys' terms, as the keys come."""
    if isinstance(one.schedule, GatherSchedule):
        yield (one.schedule.tiles, *next(ahead), one.gathered_terms())
        return
    for step, keys, values in around(call.group, one.schedule, one.of_keys(key), one.of_keys(value)):
        yield step.tiles, keys, values, one.terms_of_step(step)


def _sink_gradient(sinks: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """A sink is a key whose value is 0: the gradient of its score is −p · Σ grad_out · out, summed over the queries."""
    delta_BHS = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weight_BHS = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    return -(weight_BHS * delta_BHS).sum((0, 2)).to(sinks.dtype)
