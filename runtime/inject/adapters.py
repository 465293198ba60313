"""LoRA adapters of peft on a model that is injected: cut with the linears that they stand beside.

Beside a column-parallel linear every rank has a part of the gradient of A. Beside a row-parallel one what A gives is
summed over the ranks (r features, not O). peft wraps a model before it is injected; its layers are taken off for the
injection and put back around what became of their linears.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.runtime.deepspeed_patches.sharded_weights import gathered
from parcompile.runtime.drawing import hold_features
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.lora import Matrix, as_saved, describe_adapters, matrix_layout, matrix_of
from parcompile.runtime.model.slices import Slice, Slices
from parcompile.runtime.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    merge_ranges,
    take_ranges,
)
from parcompile.runtime.tensor_parallel.partial import sum_in_backward
from parcompile.runtime.transport.backend import gather_objects

from .heads import mark, sum_repeated_gradient
from .mechanisms.expert_adapters import ExpertAdapters, why_not
from .mechanisms.state_space import why_untrained, why_whole
from .regions import BLOCK_TAKES_INPUT, Region

INJECTED_FIRST = (
    "adapters are put on a model before it is injected, so that they are sharded with its weights: give "
    "load_pretrained(folder, plan, adapter=config), initialize(model=get_peft_model(whole_model, config)), or "
    "PlanTrainer(model=folder, peft_config=config)"
)


class Adapters:
    """The LoRA layers of a model, taken off it until `put_back`."""

    def __init__(self, model: nn.Module, slices: Slices) -> None:
        self._model = model
        kinds = _kinds(model)
        found: list[tuple[str, Any]] = [(name, one) for name, one in model.named_modules() if isinstance(one, kinds)]
        # A wrapper of experts has those inside it, which it reaches itself.
        found = [(name, layer) for name, layer in found if not name.endswith(".base_layer")]
        for name, layer in found:
            _check(name, layer, slices)
        self._found = [(name, layer) for name, layer in found if not _is_of_experts(layer)]
        self._experts = [ExpertAdapters(name, layer) for name, layer in found if _is_of_experts(layer)]
        for experts in self._experts:
            parent, child = self._place(experts.name)
            setattr(parent, child, experts.experts)
        for name, layer in self._found:
            parent, child = self._place(name)
            setattr(parent, child, layer.base_layer)
            # The linear alone must not gather the hidden states: A reads them too.
            setattr(parent, BLOCK_TAKES_INPUT, True)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        parent, _, child = name.rpartition(".")
        return self._model.get_submodule(parent), child

    def put_back(self, slices: Slices, region: Region | None, mesh: Mesh) -> None:
        """Around the injected linears and beside the experts that this rank holds, cut."""
        for experts in self._experts:
            experts.put_back(slices, mesh)
        for name, layer in self._found:
            if not slices.holds(f"{name}.weight"):
                continue
            parent, child = self._place(name)
            layer.base_layer = parent.get_submodule(child)
            setattr(parent, child, layer)
            for adapter in layer.lora_A:
                if region is not None:
                    _cut(layer, adapter, slices.of(f"{name}.weight"), region)


def _kinds(model: nn.Module) -> tuple[type, ...]:
    if not hasattr(model, "peft_config"):
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return (BaseTunerLayer, AuxiliaryTrainingWrapper)


def _is_of_experts(layer: Any) -> bool:
    from peft.tuners.lora.layer import ParamWrapper

    return isinstance(layer, ParamWrapper)


def _check(name: str, layer: Any, slices: Slices) -> None:
    from peft.tuners.lora import Linear

    why = ""
    if _is_of_experts(layer):
        why = why_not(name, layer, slices)
    elif not isinstance(layer, Linear) or type(layer.base_layer) is not nn.Linear:
        why = f"is a {type(layer).__name__} of peft: only LoRA on nn.Linear and on stacks of experts is injected"
    elif len(layer.lora_magnitude_vector) or getattr(layer, "lora_variant", None):
        why = _variant(layer)
    elif any(matrix.bias is not None for matrix in layer.lora_B.values()):
        why = "has lora_bias, which is not injected"
    elif untrained := why_untrained(name, slices.model_type):
        why = untrained
    else:
        split = slices.of(f"{name}.weight").parameter.split
        if split is not None and split.pads_vocabulary:
            why = "is the head: leave it out of target_modules"
    if isinstance(layer, Linear) and layer.merged_adapters:
        why = "is merged: unmerge it before initialize"
    if isinstance(layer, Linear) and len(layer.lora_A) > 1:
        why = f"has {len(layer.lora_A)} adapters ({', '.join(layer.lora_A)}): leave one"
    if why:
        raise RunError(f"{name} {why}", everywhere=True)


def _variant(layer: Any) -> str:
    """Which variant of LoRA a layer uses, and what to write in its place."""
    if len(layer.lora_magnitude_vector):
        return (
            "uses DoRA (use_dora), whose scale is the norm of a whole row of the weight, which tp ranks hold in parts: "
            "write LoraConfig(use_dora=False), with use_rslora=True where the rank is large"
        )
    names = sorted({type(one).__name__ for one in layer.lora_variant.values()})
    return f"uses a variant of LoRA ({', '.join(names)}), which is not injected: give a plain LoraConfig"


def _cut(layer: Any, adapter: str, piece: Slice, region: Region) -> None:
    base, down, up = layer.base_layer, layer.lora_A[adapter], layer.lora_B[adapter]
    if isinstance(base, ColumnParallelLinear):
        assert piece.ranges is not None
        up.weight = nn.Parameter(take_ranges(up.weight.detach(), 0, piece.ranges), up.weight.requires_grad)
        up.out_features = up.weight.shape[0]
        mark(up.weight, piece)
        sum_in_backward(down.weight, region.group)
        if piece.replica_group is not None:
            sum_repeated_gradient(up.weight, piece)
    elif isinstance(base, RowParallelLinear):
        layer.lora_A[adapter] = RowParallelLinear.from_linear(
            down, ranges=piece.ranges, pad_sequence=True, **region.options
        )
        assert piece.ranges is not None
        hold_features(layer.lora_dropout[adapter], piece.ranges)
        if region.sequence_parallel:
            sum_in_backward(up.weight, region.group)
    elif piece.ranges is not None:
        why = why_whole(piece.parameter.name) or "LoRA inside a block of experts is not injected"
        raise RunError(f"{why}: leave it out of target_modules", everywhere=True)
    elif piece.parameter.partial or (region.sequence_parallel and piece.parameter.sequence_parallel):
        sum_in_backward(down.weight, region.group)
        sum_in_backward(up.weight, region.group)


def add_adapter(model: nn.Module, adapter: Any, seed: int) -> nn.Module:
    """Wraps a model without memory with peft; the adapters themselves are there, whole.

    Args:
        model: a Hugging Face model on the meta device.
        adapter: a `LoraConfig`, for adapters drawn from `seed`, or the folder of saved ones.
        seed: of the draw.

    Raises:
        RunError: the adapters start from the weights, or are no LoRA.
    """
    from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict

    config = adapter if isinstance(adapter, LoraConfig) else LoraConfig.from_pretrained(str(adapter))
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise RunError(
            f"init_lora_weights {config.init_lora_weights!r} starts from the weights, which are not there yet: "
            "give initialize a whole model",
            everywhere=True,
        )
    config.inference_mode = False
    wrapped: nn.Module = get_peft_model(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[Any] = [module for module in wrapped.modules() if hasattr(module, "lora_A")]
        for layer in layers:
            for matrix in (*layer.lora_A.values(), *layer.lora_B.values()):
                matrix.to_empty(device="cpu").reset_parameters()
            layer.reset_lora_parameters("default", config.init_lora_weights)
    if config is not adapter:
        set_peft_model_state_dict(wrapped, load_peft_weights(str(adapter), device="cpu"))
    return wrapped


def adapter_state(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """The adapters of an injected `PeftModel`, whole, under peft's names: what `adapter_model.safetensors` holds.

    A collective call; every rank gets all of them.
    """
    slices, found, described = Slices(mesh), {}, describe_adapters(model) or {}
    for name, parameter in model.named_parameters():
        matrix = matrix_of(name)
        if matrix is not None:
            with gathered(parameter):
                whole = _whole(parameter.detach(), matrix, slices, mesh).cpu().clone()
            stored, tensor = as_saved(name, whole, described)
            found[stored] = tensor.contiguous()
    if (group := mesh.parallel_group("pp")) is None:
        return found
    return {name: tensor for stage in gather_objects(found, group) for name, tensor in stage.items()}


def _whole(local: Tensor, matrix: Matrix, slices: Slices, mesh: Mesh) -> Tensor:
    layout = matrix_layout(matrix, slices.of(matrix.weight).layout, tuple(local.shape))
    if layout.ep > 1:
        of_experts = [torch.empty_like(local) for _ in range(layout.ep)]
        dist.all_gather(of_experts, local.contiguous(), group=mesh.group("ep"))
        local = torch.cat(of_experts, layout.expert_dim)
    group = mesh.parallel_group("tp")
    if group is None or layout.ranges is None:
        return local
    parts = [torch.empty_like(local) for _ in layout.ranges]
    dist.all_gather(parts, local.contiguous(), group=group)
    return merge_ranges(parts, matrix.dim, layout.ranges, layout.full_shape[matrix.dim])
