"""The way of tokens to the ranks of their experts and back: what another library has to do, and what is done here.

Shapes: A tokens of all tp ranks, T of this rank's share, k experts of a token, R rows that a rank sends, Q rows that
come to it, N rows that its experts compute, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .routing import Routing, exchange, gather_rows, in_order_of_choices, rows_of, scales_of, start_exchange, sum_rows


class Dispatcher(Protocol):
    """Takes tokens to the experts of all ranks of ep, and brings back what these give. Gradients go the same ways.

    Every rank of ep, and of tp where it splits experts, calls both in the same order, also with no token.
    """

    def dispatch(
        self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor, meanwhile: Callable[[], None]
    ) -> tuple[Tensor, Tensor, Any]:
        """The rows for this rank's experts.

        Args:
            hidden_AH: tokens, the same on all ranks of tp.
            chosen_Ak: the experts of each, numbered over all ranks of ep.
            weights_Ak: what the router gives to each choice.
            meanwhile: to be called once, while rows travel.

        Returns:
            Rows [N, H] in any order; of each its expert [N], numbered on this rank; and what `combine` needs.
        """

    def combine(self, done_NH: Tensor, way: Any) -> Tensor:
        """[A, H]: of each token the sum of what its experts give, weighted; this rank's part of a sum over tp.

        Args:
            done_NH: what this rank's experts give for each row; parts of it where tp splits them.
            way: what `dispatch` has returned.
        """


@dataclass(frozen=True, slots=True)
class _Way:
    routing: Routing
    tokens: int
    dtype: torch.dtype
    weights: Tensor | None
    """[T, k]; None: they have scaled what experts take."""
    kept: Tensor | None
    """[.., H], rows that stay: they are given back unchanged."""


class AllToAll:
    """By all-to-alls of torch: one over ep each way, and one over the ranks of tp that hold slices of an expert.

    Args:
        routed: the way of rows, from the experts of each token and their weights.
        group: the ranks over which experts are dealt.
        holders: the ranks that hold slices of the same experts; None: no others do.
        scales: weights scale what experts take, not what they give.
        passes_on: rows behind those that are sent are given back unchanged.
    """

    def __init__(
        self,
        routed: Callable[[Tensor, Tensor], Routing],
        group: dist.ProcessGroup,
        holders: dist.ProcessGroup | None,
        *,
        scales: bool,
        passes_on: bool,
    ) -> None:
        self._routed, self._group, self._holders = routed, group, holders
        self._scales, self._passes_on = scales, passes_on

    def dispatch(
        self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor, meanwhile: Callable[[], None]
    ) -> tuple[Tensor, Tensor, _Way]:
        """See `Dispatcher`."""
        routing = self._routed(chosen_Ak, weights_Ak)
        start, stop = routing.tokens
        sent_RH, kept_H = rows_of(hidden_AH[start:stop], routing), None
        weights_Tk: Tensor | None = weights_Ak[start:stop]
        if self._scales:
            sent_RH = sent_RH * scales_of(weights_Ak[start:stop], routing).unsqueeze(-1)
            weights_Tk = None
        if self._passes_on:
            # What experts give back unchanged lies behind the others, and stays.
            sent_RH, kept_H = torch.split(sent_RH, [sum(routing.send), len(sent_RH) - sum(routing.send)])
            kept_H = kept_H.clone()  # not with all that is sent
        on_their_way = start_exchange(sent_RH, routing.send, routing.receive, self._group)
        del sent_RH
        meanwhile()
        rows_NH = gather_rows(on_their_way.wait(), routing.gathered, self._holders)
        return rows_NH, routing.expert_of_row, _Way(routing, len(hidden_AH), hidden_AH.dtype, weights_Tk, kept_H)

    def combine(self, done_NH: Tensor, way: _Way) -> Tensor:
        """See `Dispatcher`."""
        routing = way.routing
        start, stop = routing.tokens
        done_QH = sum_rows(done_NH, routing.gathered, self._holders)
        back_RH = exchange(done_QH, routing.receive, routing.send, self._group)
        each_TkH = in_order_of_choices(back_RH if way.kept is None else torch.cat([back_RH, way.kept]), routing)
        if way.weights is not None:
            each_TkH = each_TkH * way.weights.unsqueeze(-1)
        return F.pad(each_TkH.sum(1).to(way.dtype), (0, 0, start, way.tokens - stop))
