"""Which rows go where: the choices of the router, and the exchanges that take rows to their experts and back.

Dropless: every choice becomes a row, however many fall on one expert. Rows are sorted by expert, and so by rank. With a
capacity each expert gets equally many rows of each rank, R = experts · capacity.

Tensor-parallel ranks know the choices of all tokens of their data. Each sends those of its own share of the tokens, and
where it holds slices of experts that others hold further slices of, it gets the rows of all of these.

Shapes: A tokens of all tp ranks, T of this rank's share, k experts of a token, R = T · k rows that it sends, Q rows
that come to it, N rows that come to all that hold slices of the same experts, H hidden size.

Over ep each row goes to one rank. Over the ranks that hold slices of the same experts each row goes to all, and what
they compute of it is added up where it came from (arXiv 2504.14960, section 3.2): an all-gather and a reduce-scatter of
parts of unequal lengths, which backends have as an all-to-all only.

The way of tokens to the ranks of their experts and back: what another library has to do, and what is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from parcompile.layout.shards import balanced_rows, shared_tokens
from parcompile.runtime.collectives import linear_map
from parcompile.runtime.micro_batch import is_repeated
from parcompile.runtime.transport import Pending


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who sends which tokens. Without tensor parallelism each rank sends all that it has."""

    tp: int = 1
    tp_rank: int = 0
    slices: int = 1
    """Consecutive tp ranks that hold slices of the same experts."""

    def tokens(self, count: int, *, tp_rank: int) -> tuple[int, int]:
        """The tokens `[start, stop)` of `count` that a tp rank sends."""
        return shared_tokens(count, self.tp, tp_rank)

    @property
    def holders(self) -> range:
        """The tp ranks that hold slices of this rank's experts, this one among them."""
        first = self.tp_rank // self.slices * self.slices
        return range(first, first + self.slices)


@dataclass(frozen=True, slots=True)
class Routing:
    """The way of one layer's rows."""

    tokens: tuple[int, int]
    """This rank's share `[start, stop)` of them."""
    choices: int
    """Experts of a token."""
    order: Tensor
    """[R], from the place of a row among those that are sent to its place among the choices [T, k], flat."""
    places: Tensor
    """[T · k], the other way round."""
    send: list[int]
    """Rows for each rank of ep; what is left of R stays."""
    receive: list[int]
    """Rows from each rank of ep."""
    gathered: list[int]
    """Q of each rank that holds slices of the same experts, in their order."""
    expert_of_row: Tensor
    """[N], which of this rank's experts each row is for."""
    empty: Tensor | None = None
    """[R], the rows that are sent and are no choice's; None: all are."""
    refused: Tensor | None = None
    """[T · k], the choices that no row is sent for; None: one is for each."""


class Capacity:
    """How many rows an expert takes of a rank's tokens, and how many choices found none left."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._choices = 0
        self._refused: Tensor | None = None

    def told(self) -> tuple[int, int]:
        """How many choices training has refused, and all of them, since this was asked last; the host waits."""
        found = 0 if self._refused is None else int(self._refused), self._choices
        self._refused, self._choices = None, 0
        return found

    def slots(self, chosen_R: Tensor, weights_R: Tensor, experts: int) -> Tensor:
        """[R], the place of each choice among the `rows` of each expert, and `experts · rows` where it is refused.

        An expert keeps the choices with the highest weights, and of equal ones the first: Megatron-Core's policy
        "probs" (`apply_router_token_dropping` of core/transformer/moe/moe_utils.py).
        """
        by_weight = weights_R.detach().argsort(descending=True, stable=True)
        order = by_weight.index_select(0, chosen_R.index_select(0, by_weight).argsort(stable=True))
        counts = torch.zeros(experts, dtype=torch.long, device=chosen_R.device)
        counts.scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
        of_expert = chosen_R.index_select(0, order)
        within = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts).index_select(0, of_expert)
        places = torch.where(within < self.rows, of_expert * self.rows + within, experts * self.rows)
        if not is_repeated():
            self._choices += len(order)
            refused = (within >= self.rows).sum()
            self._refused = refused if self._refused is None else self._refused + refused
        return torch.empty_like(order).scatter_(0, order, places)


def route(chosen_Ak: Tensor, experts: int, group: dist.ProcessGroup, sharing: Sharing, identities: int = 0) -> Routing:
    """Exchanges with the other ranks how many rows go to each expert.

    The host waits for these numbers, once: an all-to-all of unequal parts wants its sizes there, on CUDA too. Nothing
    else here stalls the device.

    Args:
        chosen_Ak: the experts of each of the A tokens of all tp ranks together, of all `experts`.
        experts: how many there are over all ranks.
        group: the ranks over which they are dealt.
        sharing: which of the tokens this rank sends.
        identities: further experts behind them, which give back what they take: rows for them are sent to nobody, and
            are the last of R.
    """
    ranks, local = dist.get_world_size(group), experts // dist.get_world_size(group)
    # Without values, as preflight has it, every rank stands for the one with most tokens.
    tp_rank = sharing.tp_rank if _has_values(chosen_Ak) else 0
    start, stop = sharing.tokens(len(chosen_Ak), tp_rank=tp_rank)
    chosen_R = chosen_Ak[start:stop].reshape(-1)
    counts = _counts(chosen_Ak, experts + identities, sharing)[:, :experts]  # [holders, experts]
    # To each rank the numbers of its experts, by holder.
    leaving = counts.view(-1, ranks, local).transpose(0, 1).contiguous()
    coming = torch.empty_like(leaving)
    work = dist.all_to_all_single(coming, leaving, group=group, async_op=True)
    # Sorted while the numbers travel.
    order = chosen_R.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    work.wait()
    own = sharing.tp_rank - sharing.holders.start
    leave = len(chosen_R) * experts // (experts + identities)
    send, receive, gathered = _sizes(leaving, coming, leave, dist.get_rank(group), own)
    ids = torch.arange(local, device=coming.device).repeat(sharing.slices * ranks)
    rows, by_holder = sum(gathered), coming.transpose(0, 1).flatten()
    of_rows = ids.new_empty(rows) if coming.is_meta else ids.repeat_interleave(by_holder, output_size=rows)
    return Routing((start, stop), chosen_Ak.shape[1], order, places, send, receive, gathered, of_rows)


def route_up_to(
    capacity: Capacity, chosen_Ak: Tensor, weights_Ak: Tensor, experts: int, group: dist.ProcessGroup, sharing: Sharing
) -> Routing:
    """Each rank sends `capacity` rows to each expert, zeros where it has less: nothing is exchanged or waited for.

    Args:
        capacity: of an expert for the tokens of one rank; the same on all ranks.
        chosen_Ak: the experts of each of the A tokens of all tp ranks together, of all `experts`.
        weights_Ak: their weights.
        experts: how many there are over all ranks.
        group: the ranks over which they are dealt.
        sharing: which of the tokens this rank sends.
    """
    ranks, local, rows = dist.get_world_size(group), experts // dist.get_world_size(group), experts * capacity.rows
    start, stop = sharing.tokens(len(chosen_Ak), tp_rank=sharing.tp_rank if _has_values(chosen_Ak) else 0)
    chosen_R = chosen_Ak[start:stop].reshape(-1)
    slots = capacity.slots(chosen_R, weights_Ak[start:stop].reshape(-1), experts)
    # What is refused goes behind the last row.
    order = slots.new_full((rows + 1,), -1).scatter_(0, slots, torch.arange(len(slots), device=slots.device))[:rows]
    each, came = [local * capacity.rows] * ranks, sharing.slices * ranks
    of_rows = torch.arange(local, device=slots.device).view(1, -1, 1).expand(came, -1, capacity.rows).flatten()
    gathered = [rows] * sharing.slices
    places, choices = slots.clamp(max=rows - 1), chosen_Ak.shape[1]
    return Routing(
        (start, stop), choices, order.clamp(min=0), places, each, each, gathered, of_rows, order < 0, slots == rows
    )


def _counts(chosen_Ak: Tensor, experts: int, sharing: Sharing) -> Tensor:
    """[holders, experts]: how many rows each of those that hold slices of the same experts sends to each expert."""
    found = torch.zeros(sharing.slices, experts, dtype=torch.long, device=chosen_Ak.device)
    for number, holder in enumerate(sharing.holders):
        start, stop = sharing.tokens(len(chosen_Ak), tp_rank=holder)
        chosen = chosen_Ak[start:stop].reshape(-1)
        found[number].scatter_add_(0, chosen, torch.ones_like(chosen))
    return found


def _sizes(leaving: Tensor, coming: Tensor, rows: int, rank: int, own: int) -> tuple[list[int], list[int], list[int]]:
    ranks, holders = leaving.shape[:2]
    # One transfer to the host.
    told = torch.cat([leaving[:, own].sum(1), coming[:, own].sum(1), coming.sum((0, 2))]).cpu()
    if not _has_values(leaving):
        # Without values, as the estimate has it: every expert is chosen equally often.
        others = balanced_rows(rows, ranks)
        sizes = [others] * ranks
        sizes[rank] = rows - (ranks - 1) * others
        return sizes, sizes, [rows] * holders
    sizes = told.tolist()
    return sizes[:ranks], sizes[ranks : 2 * ranks], sizes[2 * ranks :]


def _has_values(tensor: Tensor) -> bool:
    """Whether there is anything to read: not where preflight runs a plan without memory."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def rows_of(tokens_TH: Tensor, routing: Routing) -> Tensor:
    """[R, H]: each token once for each of its experts, in the order in which they are sent."""
    return cast(Tensor, cast(Any, _Rows).apply(tokens_TH, routing))


def in_order_of_choices(rows_RH: Tensor, routing: Routing) -> Tensor:
    """What came back [R, H], in the order of the choices [T, k], as [T, k, H]; zeros for those that were refused."""
    found = cast(Tensor, cast(Any, _Permuted).apply(rows_RH, routing))
    return found.view(-1, routing.choices, rows_RH.shape[-1])


def scales_of(weights_Tk: Tensor, routing: Routing) -> Tensor:
    """[R]: the weight of each row."""
    weights = weights_Tk.flatten()
    return weights.index_select(0, routing.order) if len(weights) else weights.new_zeros(len(routing.order))


def taken(rows: Tensor, places: Tensor, none: Tensor | None) -> Tensor:
    """The rows at these places, zeros where there is none."""
    if none is None:
        return rows.index_select(0, places)
    if not len(rows):  # a rank without tokens
        return rows.new_zeros(len(places), *rows.shape[1:])
    return rows.index_select(0, places).masked_fill_(none.view(-1, *[1] * (rows.dim() - 1)), 0)


class _Rows(torch.autograd.Function):
    """Backward adds up the rows of a token in the order of its choices, whatever the order of arrival."""

    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(routing.places, routing.refused)
        ctx.choices = routing.choices
        return taken(tokens_TH, routing.order // routing.choices, routing.empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = taken(gradients[0], *ctx.saved_tensors)
        return gradient.view(-1, ctx.choices, gradient.shape[-1]).sum(1), None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(routing.order, routing.empty)
        return taken(rows_RH, routing.places, routing.refused)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return taken(gradients[0], *ctx.saved_tensors), None


def exchange(rows_RH: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends the first `send[0]` rows to rank 0 of the group, the next to rank 1, …; [Q, H] in the order of ranks.

    Its backward is the exchange the other way. Every rank takes part in both, also one that sends or gets nothing.
    """

    def sent(rows: Tensor) -> Tensor:
        got_QH = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(got_QH, rows.contiguous(), list(receive), list(send), group=group)
        return got_QH

    return linear_map(rows_RH, sent, lambda gradient: exchange(gradient, receive, send, group))


def start_exchange(rows_RH: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Started:
    """The same, under way: what is computed until `wait` runs meanwhile, and so does its backward in backward."""
    started = Started(list(send), list(receive), group)
    started.rows = linear_map(
        rows_RH, lambda rows: started.begin(rows, started.send, started.receive), lambda _: started.end()
    )
    return started


class Started:
    """An exchange under way."""

    def __init__(self, send: list[int], receive: list[int], group: dist.ProcessGroup) -> None:
        self.send, self.receive, self.group = send, receive, group
        self.rows: Tensor | None = None
        self._pending: Pending | None = None

    def wait(self) -> Tensor:
        """[Q, H], when they have come."""
        rows_QH, self.rows = self.rows, None
        assert rows_QH is not None
        return linear_map(rows_QH, lambda rows: self.end().view_as(rows), self._back)

    def _back(self, gradient: Tensor) -> Tensor:
        self.begin(gradient, self.receive, self.send)
        return gradient

    def begin(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Starts one way; returns what the rows come to."""
        got, rows = rows.new_empty(sum(receive), *rows.shape[1:]), rows.contiguous()
        work = dist.all_to_all_single(got, rows, receive, send, group=self.group, async_op=True)
        # Keeps what is sent alive until it has left.
        self._pending = Pending([work], lambda: (got, rows)[0])
        return got

    def end(self) -> Tensor:
        """Waits for it (on CUDA: makes the current stream wait)."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


def gather_rows(rows_QH: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """[N, H]: the rows of all ranks, of which rank i has `counts[i]`. Its backward adds up what the ranks contribute.

    None as the group leaves the rows as they are; it does so in `sum_rows` too.
    """
    if group is None:
        return rows_QH
    return exchange(rows_QH.repeat(len(counts), 1), [len(rows_QH)] * len(counts), counts, group)


def sum_rows(parts_NH: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """[Q, H]: of this rank's own rows the sum of what all ranks have for them; the transpose of `gather_rows`."""
    if group is None:
        return parts_NH
    own = counts[dist.get_rank(group)]
    received = exchange(parts_NH, counts, [own] * len(counts), group)
    return received.view(len(counts), own, parts_NH.shape[-1]).sum(0)


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
