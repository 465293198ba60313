"""Expert parallelism: the routed experts of a layer are dealt over the ep ranks, and tokens travel to them and back.

Each rank of ep has an equal run of them, as DeepSpeed knows them. Its optimizers then sum their gradients over the
expert-dp ranks alone, shard their states over these, and divide by dp as all other gradients are divided.

Around the experts of transformers, which compute the rows of the local ones: rows go to the ranks of their experts and
come back, and are weighted by the router's scores where they came from, before they leave or when they are back.

Tensor-parallel ranks have the same tokens, and each sends an equal share of them. Ranks that hold slices of the same
experts put the rows that come to them together, and add up what they compute of each. The results of a rank's share are
its part of a sum over tp, which the block of experts ends with: it is zero for all other tokens.

Shapes: A tokens of all tp ranks, k experts of a token, N rows that come to all that hold slices of the same experts, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.groups import EXPERT_DP, Axis
from parcompile.layout.shards import shared_tokens
from parcompile.model.families import FAMILIES
from parcompile.runtime.deepspeed_patches.engine import register_expert_groups
from parcompile.runtime.deepspeed_patches.norm import (
    expert_settings,
    is_expert,
    mark_expert,
    norm_at_once,
    take_over_gradients,
    with_expert_layers,
)
from parcompile.runtime.deepspeed_patches.optimizer_state import mark_sharded_experts, take_over_shards
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.slices import Slice, Slices
from parcompile.runtime.tensor_parallel import mark_shard, take_ranges
from parcompile.runtime.transport import group_rank, group_size
from parcompile.spec.values import workload_of

from .routing import AllToAll, Capacity, Dispatcher, Routing, Sharing, route, route_up_to
from .variants import (
    PassedOn,
    ScaledExperts,
    SharedExpert,
    draw_tables,
    hand_tokens,
    loop_where_narrow,
    pass_on,
    visit_chosen,
    warn_of_empty_tables,
)

REFUSED = "parcompile_refused"
"""The attribute of a model that holds its `Capacity`, which counts the choices that were refused."""

mark_dealt = mark_expert
is_dealt = is_expert


@contextmanager
def for_deepspeed(mesh: Mesh, model: nn.Module, **options: Any) -> Iterator[dict[str, Any]]:
    """Within it `deepspeed.initialize` makes an engine that knows which parameters are experts.

    Args:
        mesh: the live ranks.
        model: the injected model.
        options: what `deepspeed.initialize` is called with; `model_parameters`, and the groups of an optimizer that is
            there already, are taken apart into experts and others.

    Yields:
        The options, with the model, that DeepSpeed is to get.
    """
    options["model"] = model
    with ExitStack() as entered:
        if mesh.parallel_group(Axis.EP) is not None:
            register_expert_groups(mesh.group(Axis.EP), mesh.group(EXPERT_DP))
            optimizer = options.get("optimizer")
            given = options.get("model_parameters")
            ep = mesh.size(Axis.EP)
            groups = [] if given is None else apart(given, ep)
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.param_groups[:] = groups = apart(optimizer.param_groups, ep)
            elif given is not None:
                options["model_parameters"] = groups
            dealt = [parameter for group in groups for parameter in group["params"] if is_dealt(parameter)]
            if dealt and mesh.plan.spec.shards_weights:
                mark_sharded_experts(dealt)
            elif dealt:
                entered.enter_context(with_expert_layers(model))
        yield options


def take_over_norm(engine: Any, mesh: Mesh) -> None:
    """Makes the norm of an engine that of all experts, and of all groups of parameters.

    Every rank, since stages without experts, or without one of the groups, take part in it.
    """
    has_groups = workload_of(mesh.plan.spec).has_groups
    take_over_gradients(engine.optimizer)
    if mesh.plan.spec.shards_weights:
        take_over_shards(engine.optimizer, mesh.size(Axis.CP), mesh.group("dp-cp"))
    elif mesh.parallel_group(Axis.EP) is not None or (has_groups and mesh.parallel_group(Axis.PP) is not None):
        norm_at_once(engine.optimizer)


def apart(given: Iterable[Any], ep: int) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups of experts and groups of others; each with the settings that it had."""
    entries = list(given)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    found = []
    for group in groups:
        parameters = list(group["params"])
        others = [one for one in parameters if not is_dealt(one)]
        experts = [one for one in parameters if is_dealt(one)]
        if others:
            found.append({**group, "params": others})
        if experts:
            found.append({**expert_settings(group, ep), "params": experts})
    return found


def deal_experts(model: nn.Module, mesh: Mesh, slices: Slices) -> None:
    """Leaves each rank its experts, and lets tokens travel to them. Where ep is 1, a capacity alone is kept to.

    What is left is whole; tensor parallelism cuts it afterwards.
    """
    group, tp = mesh.parallel_group(Axis.EP), mesh.parallel_group(Axis.TP)
    rows = workload_of(mesh.plan.spec).capacity_rows
    capacity = None if rows is None else Capacity(rows)
    if capacity is not None:
        setattr(model, REFUSED, capacity)
    if group is None:
        if capacity is not None:
            names = (name for name, _ in model.named_parameters())
            stacks = [name for name in names if slices.has(name) and slices.of(name).parameter.expert_dim is not None]
            for owner in dict.fromkeys(name.rpartition(".")[0] for name in stacks):
                Limited(model.get_submodule(owner), group_size(tp), capacity)
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
            local = _dealt(parameter.detach(), piece)
            setattr(module, kind, nn.Parameter(local, requires_grad=parameter.requires_grad))
            mark_dealt(getattr(module, kind), dist.get_world_size(group), group_size(tp) if folds else 1)
            if folds or (piece.is_cut and len(piece.experts or ()) > 1):
                mark_shard(getattr(module, kind))
        if pieces:
            block = model.get_submodule(name.rpartition(".")[0])
            shared = getattr(block, shared_name, None) if shared_name else None
            Dispatched(module, group, tp, None if folds else tp, shared, capacity)


def _dealt(whole: Tensor, piece: Slice) -> Tensor:
    """This rank's experts. What tensor parallelism cuts afterwards is copied there; several stretches are cut here."""
    assert piece.experts is not None
    along = piece.layout.expert_dim
    if len(piece.experts) == 1:
        ((start, stop),) = piece.experts
        local = whole.narrow(along, start, stop - start)
        return local if piece.is_cut else take_ranges(local, along, [(0, stop - start)])
    parts = torch.empty(piece.layout.local_shape, dtype=whole.dtype, device=whole.device)
    sizes = [stop - start for start, stop in piece.experts]
    for part, (start, stop) in zip(torch.split(parts, sizes, along), piece.experts, strict=True):
        stretch = whole.narrow(along, start, stop - start)
        if piece.ranges is None or piece.dim is None:
            part.copy_(stretch)
            continue
        widths = [last - first for first, last in piece.ranges]
        for slice_, (first, last) in zip(torch.split(part, widths, piece.dim), piece.ranges, strict=True):
            slice_.copy_(stretch.narrow(piece.dim, first, last - first))
    return parts


class Dispatched:
    """Takes the place of the `forward` of a module of experts.

    Args:
        module: the experts of transformers, with the weights of this rank.
        group: the ranks over which they are dealt.
        tp: the tensor-parallel ranks, which have the same tokens; None: there are no others.
        holders: those of them that hold slices of the same experts; None: no others do.
        shared: the shared expert of the block, which is computed while rows travel.
        capacity: how many rows an expert takes of a rank in training; None: all.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        tp: dist.ProcessGroup | None = None,
        holders: dist.ProcessGroup | None = None,
        shared: nn.Module | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        experts: Any = module
        own, count = experts.forward, int(experts.num_experts)
        identities = own.count if isinstance(own, PassedOn) else 0
        self._module, self._scaled = module, isinstance(own, ScaledExperts)
        self._shared = None if shared is None else SharedExpert(shared)
        self._compute: Callable[..., Tensor] = own.computed if isinstance(own, PassedOn | ScaledExperts) else own
        experts.num_experts = count // dist.get_world_size(group)
        experts.forward = self
        sharing = Sharing(group_size(tp), group_rank(tp), group_size(holders))

        def limited(chosen_Ak: Tensor, weights_Ak: Tensor) -> Routing:
            assert capacity is not None
            return route_up_to(capacity, chosen_Ak, weights_Ak, count, group, sharing)

        def dispatcher(routed: Callable[[Tensor, Tensor], Routing]) -> Dispatcher:
            # The one place that says which library takes rows to their experts.
            return AllToAll(routed, group, holders, scales=self._scaled, passes_on=identities > 0)

        self._dropless = dispatcher(lambda chosen_Ak, _: route(chosen_Ak, count, group, sharing, identities))
        self._training = self._dropless if capacity is None else dispatcher(limited)

    def __call__(self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor) -> Tensor:
        """As the experts of transformers: of each token the sum of what its experts give, by their weights."""
        dispatcher = self._training if self._module.training else self._dropless

        def meanwhile() -> None:
            if self._shared is not None:
                self._shared.compute(hidden_AH)

        try:
            rows_NH, expert_of_row, way = dispatcher.dispatch(hidden_AH, chosen_Ak, weights_Ak, meanwhile)
            return dispatcher.combine(self._local(rows_NH, expert_of_row), way)
        except BaseException:
            # Recomputation stops by an exception once backward has what it needs: the block never asks for the shared
            # expert then, and what it was computed from, a whole layer, would stay until the next micro-batch.
            if self._shared is not None:
                self._shared.forget()
            raise

    def _local(self, rows_NH: Tensor, expert_of_row: Tensor) -> Tensor:
        count = len(rows_NH)
        if not count:
            # A row of zeros for the first expert, whose result is dropped: weights then have gradients, of zeros, in
            # the order that the ranks with the same experts, which may have got rows, reduce theirs in.
            rows_NH = F.pad(rows_NH, (0, 0, 0, 1))
            expert_of_row = expert_of_row.new_zeros(1)
        ones = () if self._scaled else (torch.ones_like(rows_NH[:, :1]),)
        done_NH = self._compute(rows_NH, expert_of_row.unsqueeze(1), *ones)
        return done_NH if count else done_NH[:0]


class Limited:
    """Takes the place of the `forward` of experts that every rank has: what a capacity refuses has the weight 0.

    Args:
        module: the experts of transformers.
        tp: ranks among which the tokens are shared out, as where experts are dealt.
        capacity: how many rows an expert takes of each share in training.
    """

    def __init__(self, module: nn.Module, tp: int, capacity: Capacity) -> None:
        experts: Any = module
        self._module, self._tp, self._capacity = experts, tp, capacity
        self._experts, self._compute = int(experts.num_experts), experts.forward
        experts.forward = self

    def __call__(self, hidden_AH: Tensor, chosen_Ak: Tensor, weights_Ak: Tensor) -> Tensor:
        """As the experts of transformers."""
        if self._module.training:
            experts, (_, share) = self._tp * self._experts, shared_tokens(len(chosen_Ak), self._tp, 0)
            first = torch.arange(len(chosen_Ak), device=chosen_Ak.device) // max(1, share) * self._experts
            slots = self._capacity.slots((chosen_Ak + first[:, None]).flatten(), weights_Ak.flatten(), experts)
            weights_Ak = weights_Ak.masked_fill((slots == experts * self._capacity.rows).view_as(chosen_Ak), 0)
        done: Tensor = self._compute(hidden_AH, chosen_Ak, weights_Ak)
        return done
