"""The routed experts of a layer on the ranks of ep: each has an equal run of them, whole or cut over tp.

Around the experts of transformers, which compute the rows of the local ones: rows go to the ranks of their experts and
come back, and are weighted by the router's scores where they came from. Tensor-parallel ranks of one index exchange
among themselves; each sends all tokens, for its slice of the experts.

Shapes: T tokens, k experts of a token, R = T · k rows, Q rows that come to this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.grid import Axis
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.slices import Slices
from parcompile.runtime.tensor_parallel import take_ranges

from .exchange import exchange
from .marking import mark_dealt
from .routing import in_order_of_choices, route, rows_of


def deal_experts(model: nn.Module, mesh: Mesh, slices: Slices) -> None:
    """Leaves each rank its experts, and lets tokens travel to them. Nothing is done where ep is 1.

    What is left is whole; tensor parallelism cuts it afterwards.
    """
    group = mesh.parallel_group(Axis.EP)
    if group is None:
        return
    for name, module in list(model.named_modules()):
        pieces = {
            kind: piece
            for kind, _ in module.named_parameters(recurse=False)
            # A head that is tied to the embedding has no row of its own.
            if slices.has(whole := f"{name}.{kind}") and (piece := slices.of(whole)).experts is not None
        }
        for kind, piece in pieces.items():
            parameter: nn.Parameter = getattr(module, kind)
            assert piece.experts is not None
            start, stop = piece.experts
            local = parameter.detach().narrow(piece.layout.expert_dim, start, stop - start)
            if not piece.is_cut:  # what tensor parallelism cuts afterwards is copied there
                local = take_ranges(local, piece.layout.expert_dim, [(0, stop - start)])
            setattr(module, kind, nn.Parameter(local, requires_grad=parameter.requires_grad))
            mark_dealt(getattr(module, kind), dist.get_world_size(group))
        if pieces:
            Dispatched(module, group)


class Dispatched:
    """Takes the place of the `forward` of a module of experts."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        experts: Any = module
        self._module, self._group, self._experts = module, group, int(experts.num_experts)
        self._compute: Callable[..., Tensor] = experts.forward
        experts.num_experts = self._experts // dist.get_world_size(group)
        experts.forward = self

    def __call__(self, hidden_TH: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """As the experts of transformers: of each token the sum of what its experts give, by their weights."""
        routing = route(chosen_Tk, self._experts, self._group)
        rows_QH = exchange(rows_of(hidden_TH, routing), routing.send, routing.receive, self._group)
        done_QH = self._local(rows_QH, routing.expert_of_row)
        back_RH = exchange(done_QH, routing.receive, routing.send, self._group)
        each_TkH = in_order_of_choices(back_RH, routing).view(*chosen_Tk.shape, -1)
        return (each_TkH * weights_Tk.unsqueeze(-1)).sum(1).to(hidden_TH.dtype)

    def _local(self, rows_QH: Tensor, expert_of_row: Tensor) -> Tensor:
        count = len(rows_QH)
        if not count:
            # A row of zeros for the first expert, whose result is dropped: weights then have gradients, of zeros, in
            # the order that the ranks with the same experts, which may have got rows, reduce theirs in.
            rows_QH = F.pad(rows_QH, (0, 0, 0, 1))
            expert_of_row = expert_of_row.new_zeros(1)
        ones = torch.ones(len(rows_QH), 1, dtype=rows_QH.dtype, device=rows_QH.device)
        done_QH = self._compute(rows_QH, expert_of_row.unsqueeze(1), ones)
        return done_QH if count else done_QH[:0]
