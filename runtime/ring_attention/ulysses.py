"""Attention by exchanging heads for tokens: every rank attends over the whole sequence with its share of the heads.

Two all-to-all exchanges instead of a ring, and nothing to merge; but no more ranks than query heads, and key/value
heads travel once for each rank that needs them where there are fewer of them than ranks.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, P ranks, D head dim.

Source: DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout

from .documents import Documents, documents_of_rows
from .inputs import autocast, check_inputs
from .ring import ring_attention
from .sequence import local_positions


def ulysses_attention(
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
) -> Tensor:
    """The same attention, of the same local tokens, as `ring_attention` with these arguments.

    Raises:
        ValueError: as `ring_attention`; also heads that the number of ranks does not divide, or documents dealt one by
            one that differ between rows.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks > 1:
        assert group is not None
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"ulysses: global rank {dist.get_rank()} is not in the group that it was given")
        query, key, value = autocast(query), autocast(key), autocast(value)
        check_inputs(query, key, value, sinks)
        heads = query.shape[1] // ranks
        key, value = _enough_heads(query, key, ranks), _enough_heads(query, value, ranks)
        order = _sequence_order(CpLayout(layout), ranks, query, documents if per_document else None)
        back = torch.argsort(order)
        query, key, value = (
            _AllToAll.apply(tensor, group, 1, 2).index_select(2, order)  # type: ignore[no-untyped-call]
            for tensor in (query, key, value)
        )
        sinks = None if sinks is None else sinks[rank * heads : (rank + 1) * heads]
    out = ring_attention(
        query,
        key,
        value,
        causal=causal,
        scale=scale,
        window=window,
        documents=documents,
        sinks=sinks,
        softcap=softcap,
    )
    if ranks > 1:
        out = _AllToAll.apply(out.index_select(2, back), group, 2, 1)  # type: ignore[no-untyped-call]
    return out


class _AllToAll(torch.autograd.Function):
    """Cut `scatter_dim` over the ranks and join what they send along `gather_dim`; backward does the reverse."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int) -> Tensor:
        ctx.arguments = group, gather_dim, scatter_dim
        ranks = dist.get_world_size(group)
        outgoing = torch.stack(tensor.chunk(ranks, scatter_dim))
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        return torch.cat(incoming.unbind(), gather_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, *ctx.arguments), None, None, None  # type: ignore[no-untyped-call]


def _enough_heads(query: Tensor, shared: Tensor, ranks: int) -> Tensor:
    """Key/value heads such that every rank gets those that its query heads read."""
    heads, kv_heads = query.shape[1], shared.shape[1]
    if heads % ranks:
        raise ValueError(f"ulysses: {heads} query heads cannot be dealt to {ranks} ranks; ring_attention can")
    if kv_heads % ranks == 0:
        return shared
    if ranks % kv_heads == 0:
        return shared.repeat_interleave(ranks // kv_heads, 1)
    raise ValueError(
        f"ulysses: {kv_heads} key/value heads and {ranks} ranks: one must be a multiple of the other; "
        "ring_attention takes any number"
    )


def _sequence_order(layout: CpLayout, ranks: int, query: Tensor, documents: Documents | None) -> Tensor:
    """Where each token of the sequence is among the tokens of all ranks, laid end to end."""
    length = query.shape[2] * ranks
    rows = list(documents_of_rows(documents, query.shape[0]))
    if len(rows) > 1:
        raise ValueError("ulysses: documents that are dealt one by one must be the same for all rows of the batch")
    dealt = [local_positions(layout, ranks, rank, length, rows[0][1]) for rank in range(ranks)]
    return torch.argsort(torch.cat(dealt)).to(query.device)
