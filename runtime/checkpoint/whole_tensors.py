"""Puts whole tensors together by a plan, wherever what its ranks hold comes from: files, or the ranks themselves.

Of each place on pp, tp and ep one part is asked for; where tensor-parallel ranks hold slices these are merged, where
experts are dealt over ep their stretches.

The whole tensors of a model in training, which ranks send to the first one, one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.layout.shards import Ranges, TensorLayout
from parcompile.model import Parameter
from parcompile.plan import Plan
from parcompile.plan.holding import Holding, ModelParallelPlace, expert_places, model_parallel_places
from parcompile.runtime.deepspeed_patches.optimizer_state import gathered, local_shape
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.groups.rendezvous import wait_for_all
from parcompile.runtime.model.lora import describe_adapters, matrix_layout, matrix_of, plain_name
from parcompile.runtime.model.pretrained import persistent_of
from parcompile.runtime.settings import COLLECTIVE_TIMEOUT
from parcompile.runtime.tensor_parallel import merge_ranges

from .state_file import MASTER


class WholeTensors(ABC):
    """The tensors of a plan's model, whole.

    Parameters go by the names of the plan's model, adapters by peft's behind that of their linear.
    """

    def __init__(self, plan: Plan, origin: str) -> None:
        """`origin`: what they come from, for messages."""
        self.plan, self._origin = plan, origin
        self._rows: dict[Parameter, tuple[Parameter, TensorLayout]] = plan.tensors()
        self.parameters = dict(plan.parameters.expanded())
        self._stages = [Holding(plan, pp_rank) for pp_rank in range(plan.spec.parallelism.pp)]
        self._expert_places = [expert_places(plan, tp_rank) for tp_rank in range(plan.spec.parallelism.tp)]

    @property
    @abstractmethod
    def adapters(self) -> list[str]:
        """The names of LoRA matrices."""

    @property
    @abstractmethod
    def described_adapters(self) -> Mapping[str, Any] | None:
        """Configuration of peft, and rank and scale by linear; None: there are none."""

    @property
    @abstractmethod
    def buffers(self) -> Mapping[str, Tensor]:
        """What the model keeps beside parameters, of all stages."""

    @abstractmethod
    def _adapter_shape(self, name: str, pp_rank: int) -> tuple[int, ...]:
        """Of a LoRA matrix on tp rank 0."""

    @abstractmethod
    def _local(self, name: str, kind: str, place: tuple[int, int], layout: TensorLayout, ep_rank: int) -> Tensor | None:
        """What the rank of a place on pp and tp and of an ep rank holds; None: the optimizer has no such state."""

    def whole(self, name: str, kind: str = MASTER, experts: Ranges | None = None) -> Tensor | None:
        """A parameter, or what the optimizer keeps for it, whole and without padding.

        Of a parameter that holds experts, `experts` are the first and the last but one that are wanted; None: all.

        None when the optimizer has none: the parameter was frozen, and only its weights were saved.

        Raises:
            RunError: something is missing or does not fit the plan.
        """
        pp_rank = self._holder(name)
        layout, real_shape = self._layout(name, pp_rank)
        # What is not cut is that of one tp rank; of experts, of whichever holds them.
        tp = 1 if layout.ranges is None else self.plan.spec.parallelism.tp
        locals_ = [self._held(name, kind, (pp_rank, tp_rank), layout, experts) for tp_rank in range(tp)]
        found = [local for local in locals_ if local is not None]
        if len(found) != len(locals_):
            return None
        if layout.ranges is None or layout.dim is None:
            return found[0]
        return self._merged(name, found, layout, real_shape)

    def _merged(self, name: str, slices: list[Tensor], layout: TensorLayout, shape: tuple[int, ...]) -> Tensor:
        assert layout.ranges is not None
        assert layout.dim is not None
        try:
            return merge_ranges(slices, layout.dim, layout.ranges, shape[layout.dim])
        except ValueError as error:
            raise RunError(f"{name} in {self._origin}: {error}") from None

    def _held(
        self, name: str, kind: str, place: tuple[int, int], layout: TensorLayout, experts: Ranges | None
    ) -> Tensor | None:
        """What the ranks of one place on tp and pp hold of a parameter: the wanted experts of all of them.

        Experts that are not cut may be with another tp rank.
        """
        if layout.ep == 1 and experts is None:
            return self._local(name, kind, place, layout, 0)
        dim = layout.expert_dim
        everything = ((0, layout.full_shape[dim]),)
        wanted, found = experts or everything, dict[int, Tensor]()
        for ep_rank in range(layout.ep):
            held = layout.experts(ep_rank) or everything
            if not any(_common(one, other) for one in held for other in wanted):
                continue
            holder = place if layout.ep == 1 else (place[0], self._tp_rank(place[1], ep_rank))
            local = self._local(name, kind, holder, layout, ep_rank)
            if local is None:
                return None
            if held == wanted:
                return local
            stretches = torch.split(local, [stop - start for start, stop in held], dim)
            found.update(zip((start for start, _ in held), stretches, strict=True))
        parts = [
            part.narrow(dim, common.start - first, len(common))
            for asked in wanted
            for first, part in sorted(found.items(), key=lambda one: one[0])
            if (common := _common((first, first + part.shape[dim]), asked))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _tp_rank(self, tp_rank: int, ep_rank: int) -> int:
        """The tp rank itself where it has these experts; else the one that has."""
        if any(place.ep == ep_rank for place in self._expert_places[tp_rank]):
            return tp_rank
        return next(one for one, places in enumerate(self._expert_places) if any(at.ep == ep_rank for at in places))

    def _holder(self, name: str) -> int:
        """The first stage that holds a parameter."""
        matrix = matrix_of(name)
        weight = name if matrix is None else matrix.weight
        return next(pp_rank for pp_rank, stage in enumerate(self._stages) if weight in stage)

    def _layout(self, name: str, pp_rank: int) -> tuple[TensorLayout, tuple[int, ...]]:
        """How a parameter is cut, and its shape without padding."""
        matrix = matrix_of(name)
        if matrix is None:
            parameter = self.parameters[name]
            return self._rows[parameter][1], parameter.shape
        weight = self._rows[self.parameters[matrix.weight]][1]
        layout = matrix_layout(matrix, weight, self._adapter_shape(name, pp_rank))
        return layout, layout.full_shape


def _common(one: tuple[int, int], other: tuple[int, int]) -> range:
    """What two stretches `[start, stop)` have in common."""
    return range(max(one[0], other[0]), min(one[1], other[1]))


class _Described(NamedTuple):
    """What a rank says of its part of the model."""

    parameters: dict[str, tuple[torch.dtype, tuple[int, ...], bool]]
    """Type, shape, and whether it is trained."""
    buffers: dict[str, Tensor]
    adapters: dict[str, Any] | None


def is_whole(plan: Plan) -> bool:
    """Whether every rank holds the whole model."""
    parallelism = plan.spec.parallelism
    in_shards = plan.spec.shards_weights and parallelism.zero_shards > 1
    return parallelism.tp == parallelism.pp == parallelism.ep == 1 and not in_shards


class LiveTensors(WholeTensors):
    """The weights of an injected model, whole on rank 0; elsewhere tensors of the same shapes without memory.

    Every rank asks for the same ones in the same order.

    Args:
        model: as `inject` left it, with or without peft.
        mesh: the live ranks.
        call: what the user called, for messages.

    Raises:
        RunError: not all ranks make this call.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, call: str) -> None:
        super().__init__(mesh.plan, "the live model")
        self._rank, self.is_first, self.is_alone = mesh.rank, mesh.rank == 0, is_whole(mesh.plan)
        """Tensors are put together on the first rank, which needs no other where it is alone."""
        self.error: RunError | None = None
        """What went wrong here while tensors were on their way, which all ranks send to the end."""
        self._own = {plain_name(name): one for name, one in model.named_parameters()}
        self._gathered: tuple[str, Tensor] = "", torch.empty(0)
        self._group: Any = None
        mine = _Described(
            {
                plain_name(name): (one.dtype, local_shape(one), one.requires_grad)
                for name, one in model.named_parameters()
            },
            {plain_name(name): buffer.detach().cpu() for name, buffer in persistent_of(model).items()},
            describe_adapters(model),
        )
        first_copy = mesh.plan.groups.of_rank("tp-pp", 0)
        self._ranks = dict(zip(model_parallel_places(mesh.plan), first_copy, strict=True))
        self._described = [mine] * mesh.size("pp")
        """What each stage says; types and shapes are those of all its ranks."""
        if not self.is_alone:
            wait_for_all(f"{call} gathers slices of all ranks", call)
            # Connections on the host, between those that hold one copy of the model.
            places = self._ranks.items()
            holders = sorted({one for place, first in places for one in (first, *self._sources(place).values())})
            timeout = timedelta(seconds=COLLECTIVE_TIMEOUT.seconds())
            self._group = dist.new_group(holders, timeout=timeout, backend="gloo")
            dist.all_gather_object(self._described, mine, group=mesh.group("pp"))

    def close(self) -> None:
        """Ends the group."""
        if self._group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            dist.destroy_process_group(self._group)

    def _sources(self, place: ModelParallelPlace) -> dict[int, int]:
        """The ranks that send the experts of a place, by the ep ranks that it has."""
        shards = self.plan.groups.of_rank("dp-cp", self._ranks[place])
        return {self.plan.groups.of_rank(Axis.EP, one).index(one): one for one in reversed(shards)}

    @cached_property
    def adapters(self) -> list[str]:
        """As in `WholeTensors`."""
        return [name for stage in self._described for name in stage.parameters if matrix_of(name) is not None]

    @cached_property
    def described_adapters(self) -> Mapping[str, Any] | None:
        """As in `WholeTensors`."""
        return joined_adapters(stage.adapters for stage in self._described)

    @cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        """As in `WholeTensors`."""
        return {name: buffer for stage in self._described for name, buffer in stage.buffers.items()}

    def is_trained(self, name: str) -> bool:
        """Whether a parameter is not frozen."""
        return self._described[self._holder(name)].parameters[name][2]

    def _adapter_shape(self, name: str, pp_rank: int) -> tuple[int, ...]:
        return self._described[pp_rank].parameters[name][1]

    def _local(self, name: str, kind: str, place: tuple[int, int], layout: TensorLayout, ep_rank: int) -> Tensor:
        assert kind == MASTER
        at = ModelParallelPlace(*place)
        source = self._ranks[at] if layout.ep == 1 else self._sources(at)[ep_rank]
        dtype, shape, _ = self._described[place[0]].parameters[name]
        if name in self._own and self._gathered[0] != name:
            with gathered(self._own[name]):
                self._gathered = name, self._own[name].detach().cpu().contiguous()
        if source == self._rank:
            mine = self._gathered[1]
            if not self._rank:
                return mine
            dist.send(_as_bytes(mine), 0, group=self._group)
        elif not self._rank:
            found = torch.empty(shape, dtype=dtype)
            dist.recv(_as_bytes(found), source, group=self._group)
            return found
        return torch.empty(shape, dtype=dtype, device="meta")

    def _merged(self, name: str, slices: list[Tensor], layout: TensorLayout, shape: tuple[int, ...]) -> Tensor:
        if self.is_first:
            try:
                return super()._merged(name, slices, layout, shape)
            except RunError as error:
                self.error = self.error or error
        return torch.empty(shape, dtype=slices[0].dtype, device="meta")


def joined_adapters(of_stages: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Those of the whole model, from what describes those of each stage."""
    described = [one for one in of_stages if one is not None]
    linears = {name: entry for one in described for name, entry in one["linears"].items()}
    return {**described[0], "linears": linears} if described else None


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
