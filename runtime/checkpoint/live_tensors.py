"""The whole tensors of a model in training, which ranks send to the first one, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.layout.shards import TensorLayout
from parcompile.plan import Plan
from parcompile.plan.holding import ModelParallelPlace, model_parallel_places
from parcompile.runtime.deepspeed_patches.sharded_weights import gathered, local_shape
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.groups.rendezvous import wait_for_all
from parcompile.runtime.model.lora import describe_adapters, matrix_of, plain_name
from parcompile.runtime.settings import COLLECTIVE_TIMEOUT

from .state_file import MASTER
from .whole_tensors import WholeTensors


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
        self._rank = mesh.rank
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
            _persistent_buffers(model),
            describe_adapters(model),
        )
        first_copy = mesh.plan.groups.of_rank("tp-pp", 0)
        self._ranks = dict(zip(model_parallel_places(mesh.plan), first_copy, strict=True))
        self._described = [mine] * mesh.size("pp")
        if not is_whole(mesh.plan):
            wait_for_all(f"{call} gathers slices of all ranks", call)
            # Connections on the host, between those that hold one copy of the model.
            places = self._ranks.items()
            holders = sorted({one for place, first in places for one in (first, *self._sources(place).values())})
            timeout = timedelta(seconds=COLLECTIVE_TIMEOUT.seconds())
            self._group = dist.new_group(holders, timeout=timeout, backend="gloo")
            dist.all_gather_object(self._described, mine, group=mesh.group("pp"))

    @property
    def is_first(self) -> bool:
        """Whether the tensors are put together here."""
        return self._rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether rank 0 needs no other."""
        return self._group is None

    def close(self) -> None:
        """Ends the group."""
        if self._group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            dist.destroy_process_group(self._group)

    def _stage(self, pp_rank: int) -> _Described:
        """What a stage says; types and shapes are those of all its ranks."""
        return self._described[pp_rank]

    def _sources(self, place: ModelParallelPlace) -> dict[int, int]:
        """The ranks that send the experts of a place, by the ep ranks that it has."""
        shards = self.plan.groups.of_rank("dp-cp", self._ranks[place])
        return {self.plan.groups.of_rank(Axis.EP, one).index(one): one for one in reversed(shards)}

    @cached_property
    def adapters(self) -> list[str]:
        """As in `WholeTensors`."""
        stages = range(len(self._stages))
        return [name for stage in stages for name in self._stage(stage).parameters if matrix_of(name) is not None]

    @cached_property
    def described_adapters(self) -> Mapping[str, Any] | None:
        """As in `WholeTensors`."""
        found = [one for stage in range(len(self._stages)) if (one := self._stage(stage).adapters) is not None]
        linears = {name: entry for one in found for name, entry in one["linears"].items()}
        return {**found[0], "linears": linears} if found else None

    @cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        """As in `WholeTensors`."""
        stages = range(len(self._stages))
        return {name: buffer for stage in stages for name, buffer in self._stage(stage).buffers.items()}

    def is_trained(self, name: str) -> bool:
        """Whether a parameter is not frozen."""
        return self._stage(self._holder(name)).parameters[name][2]

    def _adapter_shape(self, name: str, pp_rank: int) -> tuple[int, ...]:
        return self._stage(pp_rank).parameters[name][1]

    def _local(self, name: str, kind: str, place: tuple[int, int], layout: TensorLayout, ep_rank: int) -> Tensor:
        assert kind == MASTER
        at = ModelParallelPlace(*place)
        source = self._ranks[at] if layout.ep == 1 else self._sources(at)[ep_rank]
        dtype, shape, _ = self._stage(place[0]).parameters[name]
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


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[plain_name(f"{path}.{name}" if path else name)] = buffer.detach().cpu()
    return found
