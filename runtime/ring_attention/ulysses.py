"""Attention by exchanging heads for tokens: every rank attends over the whole sequence with its share of the heads.

Two all-to-all exchanges instead of a ring, and nothing to merge; but no more ranks than query heads, and key/value
heads travel once for each rank that needs them where there are fewer of them than ranks. Both together: heads are
exchanged between the ranks of a node, and keys go around a ring of nodes (USP).

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, P ranks, D head dim.

Sources: DeepSpeed Ulysses, arXiv 2309.14509; USP, arXiv 2405.07719.

Attention over ranks by name: every implementation takes the same tokens and gives the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.collectives import linear_map
from parcompile.runtime.transport.backend import to_device

from .blockwise import all_gather_attention, attend_over_ranks, ring_attention
from .execution import autocast, check_inputs, check_terms
from .sequence import documents_of_rows, local_positions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .execution import AttentionOptions


@dataclass(frozen=True, slots=True)
class UspGroups:
    """This rank's place in a grid of ranks: rank r · U + u of the context-parallel group is u of `heads`, r of `ring`.

    `heads`: the U neighbouring ranks that exchange heads for tokens. `ring`: the ranks at the same place of all such
    neighbourhoods.
    """

    heads: dist.ProcessGroup
    ring: dist.ProcessGroup

    @classmethod
    def of(cls, group: dist.ProcessGroup, heads_ranks: int) -> UspGroups:
        """Both groups within a context-parallel group, whose ranks all call this; `heads_ranks` is U.

        Raises:
            ValueError: U does not divide the group, or this rank is not in it.
        """
        ranks = dist.get_process_group_ranks(group)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"usp: global rank {dist.get_rank()} is not in the group that it was given")
        if heads_ranks < 1 or len(ranks) % heads_ranks:
            raise ValueError(
                f"usp: {heads_ranks} ranks that exchange heads do not divide a group of {len(ranks)} ranks"
            )
        first = rank // heads_ranks * heads_ranks
        members = ranks[first : first + heads_ranks], ranks[rank % heads_ranks :: heads_ranks]
        heads, ring = (dist.new_group(each, use_local_synchronization=True) for each in members)
        return cls(heads, ring)


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **options: Unpack[AttentionOptions]
) -> Any:
    """The same attention, of the same local tokens, as `ring_attention` with these arguments.

    Raises:
        ValueError: as `ring_attention`; also heads that the number of ranks does not divide, or documents dealt one by
            one that differ between rows.
    """
    group = options.get("group")
    alone: AttentionOptions = {**options, "group": None}
    if group is None or dist.get_world_size(group) == 1:
        return attend_over_ranks(query, key, value, "ring", return_lse=return_lse, **alone)
    return _exchange_heads(query, key, value, group, 0, alone, return_lse)


def usp_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    groups: UspGroups,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """The same attention, of the same local tokens, as `ring_attention` over all ranks of both groups.

    Raises:
        ValueError: as `ulysses_attention`, for the ranks that exchange heads; also the striped layout, of which no
            neighbourhood holds what one rank of a shorter ring would.
    """
    if CpLayout(options.get("layout", CpLayout.ZIGZAG)) is CpLayout.STRIPED:
        raise ValueError("usp: usp cannot run striped chunks; use zigzag or contiguous")
    across: AttentionOptions = {**options, "group": groups.ring}
    if dist.get_world_size(groups.heads) == 1:
        return attend_over_ranks(query, key, value, "ring", return_lse=return_lse, **across)
    return _exchange_heads(query, key, value, groups.heads, dist.get_rank(groups.ring), across, return_lse)


def _exchange_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    neighbourhood: int,
    options: AttentionOptions,
    return_lse: bool,
) -> Any:
    """Attend with this rank's share of the heads and the tokens of all ranks of `group`, the given neighbourhood."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"ulysses: global rank {dist.get_rank()} is not in the group that it was given")
    query, key, value = autocast(query), autocast(key), autocast(value)
    sinks = options.get("sinks")
    check_inputs(query, key, value, sinks)
    ring = options.get("group")
    size = ranks * (1 if ring is None else dist.get_world_size(ring))
    slopes, bias = options.get("alibi_slopes"), options.get("bias")
    check_terms(query, size, slopes, bias, options.get("dropout", 0.0), options.get("dropout_seed"))
    heads = query.shape[1] // ranks
    key, value = _enough_heads(query, key, ranks), _enough_heads(query, value, ranks)
    order, back = _sequence_order(query, ranks, size, neighbourhood, options)

    def in_order(tensor: Tensor) -> Tensor:
        return _permuted(_all_to_all(tensor, group, 1, 2), order, back)

    query, key, value = map(in_order, (query, key, value))
    mine = slice(rank * heads, (rank + 1) * heads)
    if sinks is not None:
        options = {**options, "sinks": sinks[mine]}
    if slopes is not None:
        options = {**options, "alibi_slopes": slopes[mine]}
    if bias is not None:
        # What all heads share goes to every rank, as one head of its share.
        shares = bias.expand(-1, ranks if bias.shape[1] == 1 else -1, -1, -1)
        options = {**options, "bias": _all_to_all(shares, group, 1, 2).index_select(2, order)}
    options = {**options, "first_head": options.get("first_head", 0) + mine.start}
    out, lse = attend_over_ranks(query, key, value, "ring", return_lse=True, **options)
    exchanged = _all_to_all(_permuted(out, back, order), group, 2, 1)
    if not return_lse:
        return exchanged
    return exchanged, _all_to_all(_permuted(lse, back, order), group, 2, 1)


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int) -> Tensor:
    """Cut `scatter_dim` over the ranks and join what they send along `gather_dim`; backward does the reverse."""
    back = partial(_all_to_all, group=group, scatter_dim=gather_dim, gather_dim=scatter_dim)
    return linear_map(tensor, partial(_exchanged, group, scatter_dim, gather_dim), back)


def _exchanged(group: dist.ProcessGroup, scatter_dim: int, gather_dim: int, tensor: Tensor) -> Tensor:
    outgoing = torch.stack(tensor.chunk(dist.get_world_size(group), scatter_dim))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return torch.cat(incoming.unbind(), gather_dim)


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


def _permuted(tensor: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Tokens in another order."""
    permuted: Tensor = _Permuted.apply(tensor, order, back)  # type: ignore[no-untyped-call]
    return permuted


class _Permuted(torch.autograd.Function):
    """Tokens in another order; backward puts them back, where `index_select` would add into zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return tensor.index_select(2, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, back = ctx.saved_tensors
        return _permuted(grad, back, order), None, None


def _sequence_order(
    query: Tensor, ranks: int, size: int, neighbourhood: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Where each token of the neighbourhood is among the tokens of its ranks, laid end to end, and the way back."""
    layout = CpLayout(options.get("layout", CpLayout.ZIGZAG))
    rows = list(documents_of_rows(options.get("documents") if options.get("per_document") else None, query.shape[0]))
    if len(rows) > 1:
        raise ValueError("ulysses: documents that are dealt one by one must be the same for all rows of the batch")
    # What torch.compile traces with stand-ins of tensors is not kept.
    find = _orders.__wrapped__ if torch.compiler.is_compiling() else _orders
    return find(layout, ranks, size, neighbourhood, query.shape[2], rows[0][1], query.device)


@functools.lru_cache(maxsize=8)
def _orders(
    layout: CpLayout,
    ranks: int,
    size: int,
    neighbourhood: int,
    length: int,
    documents: tuple[int, ...] | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    first = neighbourhood * ranks
    with torch.device("cpu"):  # preflight makes tensors without values elsewhere
        dealt = [local_positions(layout, size, rank, length * size, documents) for rank in range(first, first + ranks)]
        order = torch.argsort(torch.cat(dealt))
        return to_device(order, device), to_device(torch.argsort(order), device)


def double_ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    inner_ranks: int,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """`ring_attention` in rings of `inner_ranks` neighbours, which pass their keys on to the next ring all at once."""
    return attend_over_ranks(query, key, value, "ring", inner_ranks=inner_ranks, return_lse=return_lse, **options)


IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = {
    "ring": ring_attention,
    "double_ring": double_ring_attention,
    "all_gather": all_gather_attention,
    "ulysses": ulysses_attention,
    "usp": usp_attention,
}
"""What a plan can name."""


def attention(query: Tensor, key: Tensor, value: Tensor, *, implementation: str = "ring", **options: Any) -> Any:
    """Attention of this rank's queries over the keys of every rank, by the implementation of that name.

    Args:
        query: [B, H, S, D].
        key: [B, K, S, D].
        value: [B, K, S, E].
        implementation: a name of `IMPLEMENTATIONS`.
        options: what `ring_attention` takes; "double_ring" also wants `inner_ranks`, "usp" `groups` (`UspGroups`) in
            the place of `group`.

    Returns:
        [B, H, S, E], as `ring_attention`; with `return_lse` also the log-sum-exp.

    Raises:
        ValueError: there is no implementation of that name, or what it raises.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: there is no implementation {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation](query, key, value, **options)
