"""The routed experts of a layer on the ranks of ep: each has an equal run of them, whole or cut over tp.

Around the experts of transformers, which compute the rows of the local ones: rows go to the ranks of their experts and
come back, and are weighted by the router's scores where they came from.

Tensor-parallel ranks have the same tokens, and each sends an equal share of them. Ranks that hold slices of the same
experts put the rows that come to them together, and add up what they compute of each. The results of a rank's share are
its part of a sum over tp, which the block of experts ends with: it is zero for all other tokens.

Shapes: A tokens of all tp ranks, T of this rank's share, k experts of a token, R = T · k rows, Q rows that come to this
rank, N to all that hold slices of the same experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.grid import Axis
from parcompile.model.families import FAMILIES
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.slices import Slices
from parcompile.runtime.tensor_parallel import mark_shard, take_ranges
from parcompile.runtime.transport import group_rank, group_size

from .exchange import exchange, gather_rows, start_exchange, sum_rows
from .marking import mark_dealt
from .routing import Sharing, in_order_of_choices, route, rows_of
from .shared import SharedExpert


def deal_experts(model: nn.Module, mesh: Mesh, slices: Slices) -> None:
    """Leaves each rank its experts, and lets tokens travel to them. Nothing is done where ep is 1.

    What is left is whole; tensor parallelism cuts it afterwards.
    """
    group, tp = mesh.parallel_group(Axis.EP), mesh.parallel_group(Axis.TP)
    if group is None:
        return
    # Tensor-parallel ranks then hold other experts, not slices of the same ones.
    folds = slices.folds_experts
    family = FAMILIES[mesh.plan.spec.model.shape.model_type]
    shared_name = family.experts.shared if family.experts is not None else ""
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
            mark_dealt(getattr(module, kind), dist.get_world_size(group), group_size(tp) if folds else 1)
            if folds:
                mark_shard(getattr(module, kind))
        if pieces:
            block = model.get_submodule(name.rpartition(".")[0])
            shared = getattr(block, shared_name, None) if shared_name else None
            Dispatched(module, group, tp, None if folds else tp, shared)


class Dispatched:
    """Takes the place of the `forward` of a module of experts.

    Args:
        module: the experts of transformers, with the weights of this rank.
        group: the ranks over which they are dealt.
        tp: the tensor-parallel ranks, which have the same tokens; None: there are no others.
        holders: those of them that hold slices of the same experts; None: no others do.
        shared: the shared expert of the block, which is computed while rows travel.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        tp: dist.ProcessGroup | None = None,
        holders: dist.ProcessGroup | None = None,
        shared: nn.Module | None = None,
    ) -> None:
        experts: Any = module
        self._module, self._group, self._experts = module, group, int(experts.num_experts)
        self._holders = holders
        self._shared = None if shared is None else SharedExpert(shared)
        self._sharing = Sharing(group_size(tp), group_rank(tp), group_size(holders))
        self._compute: Callable[..., Tensor] = experts.forward
        experts.num_experts = self._experts // dist.get_world_size(group)
        experts.forward = self

    def __call__(self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor) -> Tensor:
        """As the experts of transformers: of each token the sum of what its experts give, by their weights."""
        try:
            return self._dispatched(hidden_AH, chosen_Ak, weights_Ak)
        except BaseException:
            # Recomputation stops by an exception once backward has what it needs: the block never asks for the shared
            # expert then, and what it was computed from, a whole layer, would stay until the next micro-batch.
            if self._shared is not None:
                self._shared.forget()
            raise

    def _dispatched(self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor) -> Tensor:
        routing = route(chosen_Ak, self._experts, self._group, self._sharing)
        start, stop = routing.tokens
        on_their_way = start_exchange(
            rows_of(hidden_AH[start:stop], routing), routing.send, routing.receive, self._group
        )
        if self._shared is not None:
            self._shared.compute(hidden_AH)
        rows_NH = gather_rows(on_their_way.wait(), routing.gathered, self._holders)
        del on_their_way  # it keeps what was sent
        done_NH = self._local(rows_NH, routing.expert_of_row)
        done_QH = sum_rows(done_NH, routing.gathered, self._holders)
        back_RH = exchange(done_QH, routing.receive, routing.send, self._group)
        each_TkH = in_order_of_choices(back_RH, routing)
        done_TH = (each_TkH * weights_Ak[start:stop].unsqueeze(-1)).sum(1).to(hidden_AH.dtype)
        return F.pad(done_TH, (0, 0, start, len(hidden_AH) - stop))

    def _local(self, rows_NH: Tensor, expert_of_row: Tensor) -> Tensor:
        count = len(rows_NH)
        if not count:
            # A row of zeros for the first expert, whose result is dropped: weights then have gradients, of zeros, in
            # the order that the ranks with the same experts, which may have got rows, reduce theirs in.
            rows_NH = F.pad(rows_NH, (0, 0, 0, 1))
            expert_of_row = expert_of_row.new_zeros(1)
        ones = torch.ones(len(rows_NH), 1, dtype=rows_NH.dtype, device=rows_NH.device)
        done_NH = self._compute(rows_NH, expert_of_row.unsqueeze(1), ones)
        return done_NH if count else done_NH[:0]
