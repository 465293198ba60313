"""Which rows go where: the router's choices of one rank, and those of the others that come to its experts.

Dropless: every choice becomes a row, however many fall on one expert. Rows are sorted by expert, and so by rank.

Shapes: T tokens of this rank, k experts of a token, R = T · k rows, Q rows that come, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.layout.experts import balanced_rows


@dataclass(frozen=True, slots=True)
class Routing:
    """The way of one layer's rows."""

    order: Tensor
    """[R], from the place of a row among those that are sent to its place among the choices [T, k], flat."""
    places: Tensor
    """[R], the other way round."""
    send: list[int]
    """Rows for each rank."""
    receive: list[int]
    """Rows from each rank."""
    expert_of_row: Tensor
    """[Q], which of this rank's experts each row that comes is for."""


def route(chosen_Tk: Tensor, experts: int, group: dist.ProcessGroup) -> Routing:
    """Exchanges with the other ranks how many rows go to each expert. The host waits for these numbers, once.

    Args:
        chosen_Tk: the experts of each token, of all `experts`.
        experts: how many there are over all ranks.
        group: the ranks that share them.
    """
    ranks, local = dist.get_world_size(group), experts // dist.get_world_size(group)
    chosen_R = chosen_Tk.reshape(-1)
    counts = torch.zeros(experts, dtype=torch.long, device=chosen_R.device)
    counts = counts.scatter_add(0, chosen_R, torch.ones_like(chosen_R)).view(ranks, local)
    coming = torch.empty_like(counts)
    work = dist.all_to_all_single(coming, counts, group=group, async_op=True)
    # Sorted while the numbers travel.
    order = chosen_R.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    work.wait()
    send, receive = _sizes(counts, coming, len(chosen_R), dist.get_rank(group))
    ids = torch.arange(local, device=coming.device).repeat(ranks)
    rows = sum(receive)
    of_rows = ids.new_empty(rows) if coming.is_meta else ids.repeat_interleave(coming.flatten(), output_size=rows)
    return Routing(order, places, send, receive, of_rows)


def _sizes(counts: Tensor, coming: Tensor, rows: int, rank: int) -> tuple[list[int], list[int]]:
    ranks = len(counts)
    if counts.is_meta:
        # Without values, as the estimate has it: every expert is chosen equally often.
        others = balanced_rows(rows, ranks)
        sizes = [others] * ranks
        sizes[rank] = rows - (ranks - 1) * others
        return sizes, sizes
    send, receive = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
    return send, receive


def rows_of(tokens_TH: Tensor, routing: Routing) -> Tensor:
    """[R, H]: each token once for each of its experts, in the order in which they are sent."""
    return cast(Tensor, cast(Any, _Rows).apply(tokens_TH, routing.order, routing.places))


def in_order_of_choices(rows_RH: Tensor, routing: Routing) -> Tensor:
    """What came back [R, H], in the order of the choices [T, k]."""
    return cast(Tensor, cast(Any, _Permuted).apply(rows_RH, routing.places, routing.order))


class _Rows(torch.autograd.Function):
    """Backward adds up the rows of a token in the order of its choices, whatever the order of arrival."""

    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.tokens = tokens_TH.shape[0]
        return tokens_TH.index_select(0, order // (len(order) // ctx.tokens))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, places = ctx.saved_tensors
        gradient = gradients[0].index_select(0, places)
        return gradient.view(ctx.tokens, -1, gradient.shape[-1]).sum(1), None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, places: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows_RH.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order), None, None
