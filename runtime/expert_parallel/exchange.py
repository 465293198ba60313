"""The all-to-all of expert parallelism: rows of hidden states go to the ranks of their experts, and come back.

Shapes: R rows that a rank sends in all, Q rows that it gets, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(rows_RH: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends the first `send[0]` rows to rank 0 of the group, the next to rank 1, …; [Q, H] in the order of ranks.

    Its backward is the exchange the other way. Every rank takes part in both, also one that sends or gets nothing.
    """
    return cast(Tensor, cast(Any, _Exchange).apply(rows_RH, list(send), list(receive), group))


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
