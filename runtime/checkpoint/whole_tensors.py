"""Puts whole tensors together by a plan, wherever what its ranks hold comes from: files, or the ranks themselves.

Of each place on pp, tp and ep one part is asked for; where tensor-parallel ranks hold slices these are merged, where
experts are dealt over ep their stretches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parcompile.layout.shards import Ranges, TensorLayout
from parcompile.model import Parameter
from parcompile.plan import Plan
from parcompile.plan.holding import Holding, expert_places
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.lora import matrix_layout, matrix_of
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
