"""LoRA adapters of peft on a model that is injected: cut with the linears that they stand beside.

Beside a column-parallel linear A [r, I] is held by every rank, with a part of its gradient, and B [O, r] is cut like
the weight. Beside a row-parallel one A is cut like the weight, what it gives is summed over the ranks (r features, not
O), and B is held whole. peft wraps a whole model before `initialize`; its layers are taken off for the injection and
put back around what became of their linears.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RunError
from ..groups import Mesh
from ..tensor_parallel import ColumnParallelLinear, RowParallelLinear, mark_shard, take_ranges
from .regions import BLOCK_TAKES_INPUT, Region, sum_gradient
from .slices import Slice, Slices

_NAME = re.compile(r"(?P<linear>.+)\.lora_(?P<kind>[AB])\.[^.]+\.weight")
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A LoRA layer and where it stands."""

    name: str
    layer: Any


def without_peft(model: nn.Module) -> nn.Module:
    """The Hugging Face model in a `PeftModel`; any other model as it is."""
    get_base: Any = getattr(model, "get_base_model", None)
    base: nn.Module = model if get_base is None else get_base()
    return base


class Adapters:
    """The LoRA layers of a model, taken off it until `put_back`."""

    def __init__(self, model: nn.Module, slices: Slices) -> None:
        self._model = model
        self._found = [
            _Adapted(name, module) for name, module in model.named_modules() if isinstance(module, _kinds(model))
        ]
        for one in self._found:
            _check(one, slices)
        for one in self._found:
            parent, child = self._place(one.name)
            setattr(parent, child, one.layer.base_layer)
            # Its columns cannot take the hidden states in by themselves: A wants them too.
            setattr(parent, BLOCK_TAKES_INPUT, True)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        parent, _, child = name.rpartition(".")
        return self._model.get_submodule(parent), child

    def put_back(self, slices: Slices, region: Region | None) -> None:
        """Around the injected linears, cut."""
        for one in self._found:
            parent, child = self._place(one.name)
            one.layer.base_layer = parent.get_submodule(child)
            setattr(parent, child, one.layer)
            for adapter in one.layer.lora_A:
                if region is not None:
                    _cut(one.layer, adapter, slices.of(f"{one.name}.weight"), region)


def _kinds(model: nn.Module) -> tuple[type, ...]:
    if not hasattr(model, "peft_config"):
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return (BaseTunerLayer, AuxiliaryTrainingWrapper)


def _check(one: _Adapted, slices: Slices) -> None:
    from peft.tuners.lora import Linear

    layer, why = one.layer, ""
    if not isinstance(layer, Linear) or type(layer.base_layer) is not nn.Linear:
        why = f"is a {type(layer).__name__} of peft: only LoRA on nn.Linear is injected"
    elif len(layer.lora_magnitude_vector) or getattr(layer, "lora_variant", None):
        why = "uses a variant of LoRA (DoRA or the like), which is not injected"
    elif any(matrix.bias is not None for matrix in layer.lora_B.values()):
        why = "has lora_bias, which is not injected"
    else:
        split = slices.of(f"{one.name}.weight").parameter.split
        if split is not None and split.pads_vocabulary:
            why = "is the head: leave it out of target_modules"
    if layer.merged_adapters if isinstance(layer, Linear) else False:
        why = "is merged: unmerge it before initialize"
    if why:
        raise RunError(f"{one.name} {why}", everywhere=True)


def _cut(layer: Any, adapter: str, piece: Slice, region: Region) -> None:
    base, down, up = layer.base_layer, layer.lora_A[adapter], layer.lora_B[adapter]
    if isinstance(base, ColumnParallelLinear):
        assert piece.ranges is not None
        up.weight = nn.Parameter(take_ranges(up.weight.detach(), 0, piece.ranges), up.weight.requires_grad)
        up.out_features = up.weight.shape[0]
        mark_shard(up.weight, piece.replica_group)
        sum_gradient(down.weight, region.group)
        if piece.replica_group is not None:
            sum_gradient(up.weight, piece.replica_group)
    elif isinstance(base, RowParallelLinear):
        layer.lora_A[adapter] = RowParallelLinear.from_linear(
            down, ranges=piece.ranges, pad_sequence=True, **region.options
        )
        if region.sequence_parallel:
            sum_gradient(up.weight, region.group)
    elif piece.ranges is not None:
        raise RunError(
            "LoRA inside a block of experts is not injected: leave it out of target_modules", everywhere=True
        )
    elif piece.parameter.partial or (region.sequence_parallel and piece.parameter.sequence_parallel):
        sum_gradient(down.weight, region.group)
        sum_gradient(up.weight, region.group)


def original_name(name: str) -> str:
    """The name that a parameter of an adapted model has without adapters."""
    return name.replace(_BASE, ".")


def adapter_slice(slices: Slices, name: str, shape: tuple[int, ...]) -> Slice | None:
    """This rank's part of A or B, whose whole shape is given; None for other parameters."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    weight = slices.of(f"{match['linear']}.weight")
    dim = 0 if match["kind"] == "B" else 1
    if weight.dim != dim:
        return replace(weight, layout=replace(weight.layout, full_shape=shape, dim=None, ranges=None), ranges=None)
    return replace(weight, layout=replace(weight.layout, full_shape=shape))


def adapter_state(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """The adapters of an injected `PeftModel`, whole, under peft's names: what `adapter_model.safetensors` holds.

    A collective call; every rank gets all of them.
    """
    slices, group, found = Slices(mesh), mesh.parallel_group("tp"), {}
    for name, parameter in without_peft(model).named_parameters():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        local, layout = parameter.detach(), slices.of(f"{match['linear']}.weight").layout
        dim = 0 if match["kind"] == "B" else 1
        if group is not None and layout.dim == dim and layout.ranges is not None:
            parts = [torch.empty_like(local) for _ in layout.ranges]
            dist.all_gather(parts, local.contiguous(), group=group)
            size = list(local.shape)
            size[dim] = layout.full_shape[dim]
            whole = local.new_empty(size)
            for part, ranges in zip(parts, layout.ranges, strict=True):
                offset = 0
                for start, stop in ranges:
                    whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
                    offset += stop - start
            local = whole
        # peft leaves the name of the adapter out.
        plain = re.sub(r"\.(lora_[AB])\.[^.]+\.", r".\1.", name)
        found[f"base_model.model.{plain}"] = local.cpu().clone()
    return found
