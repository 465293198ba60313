"""The exchanges of expert parallelism: rows of hidden states go to the ranks of their experts, and come back.

Over ep each row goes to one rank. Over the ranks that hold slices of the same experts each row goes to all, and what
they compute of it is added up where it came from (arXiv 2504.14960, section 3.2): an all-gather and a reduce-scatter of
parts of unequal lengths, which backends have as an all-to-all only.

Shapes: R rows that a rank sends in all, Q rows that it gets, N rows that all ranks of a group have, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.runtime.transport import Pending


def exchange(rows_RH: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends the first `send[0]` rows to rank 0 of the group, the next to rank 1, …; [Q, H] in the order of ranks.

    Its backward is the exchange the other way. Every rank takes part in both, also one that sends or gets nothing.
    """
    return cast(Tensor, cast(Any, _Exchange).apply(rows_RH, list(send), list(receive), group))


def start_exchange(rows_RH: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Started:
    """The same, under way: what is computed until `wait` runs meanwhile, and so does its backward in backward."""
    started = Started(list(send), list(receive), group)
    started.rows = cast(Tensor, cast(Any, _Start).apply(rows_RH, started))
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
        return cast(Tensor, cast(Any, _Wait).apply(rows_QH, self))

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


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, started: Started) -> Tensor:
        ctx.started = started
        return started.begin(rows_RH, started.send, started.receive)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.started.end(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_QH: Tensor, started: Started) -> Tensor:
        ctx.started = started
        return started.end().view_as(rows_QH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        started = ctx.started
        started.begin(gradients[0], started.receive, started.send)
        return gradients[0], None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = receive, send, group
        got_QH = rows_RH.new_empty(sum(receive), *rows_RH.shape[1:])
        dist.all_to_all_single(got_QH, rows_RH.contiguous(), receive, send, group=group)
        return got_QH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(gradients[0], *ctx.back), None, None, None


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
