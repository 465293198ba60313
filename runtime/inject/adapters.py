"""LoRA adapters of peft on a model that is injected: cut with the linears that they stand beside.

Beside a column-parallel linear every rank has a part of the gradient of A. Beside a row-parallel one what A gives is
summed over the ranks (r features, not O). peft wraps a model before it is injected; its layers are taken off for the
injection and put back around what became of their linears.

LoRA on experts: peft's adapters of a stack of experts [E, O, I], dealt and cut as the stack is.

peft reaches a stack by `target_parameters`, keeps the adapters of all experts in two matrices, A [E · r, I] and
B [O, r · E], whose experts lie along different dims, and nests one wrapper in another where a module has two stacks.
Here they are stacks too, A [E, r, I] and B [E, O, r], in a module beside the stack: an ep rank holds those of its
experts, and a tp rank holds of one matrix what it holds of the experts, and the other one whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.groups import Axis
from parcompile.model import Parameter
from parcompile.runtime.deepspeed_patches.optimizer_state import gathered
from parcompile.runtime.drawing import hold_features
from parcompile.runtime.errors import everywhere
from parcompile.runtime.expert_parallel import mark_dealt
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.lora import (
    OF_EXPERTS,
    Matrix,
    as_saved,
    describe_adapters,
    matrix_layout,
    matrix_of,
    stack_of,
)
from parcompile.runtime.model.slices import Slice, Slices, cut
from parcompile.runtime.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    mark_shard,
    merge_ranges,
    take_ranges,
)
from parcompile.runtime.tensor_parallel.partial import sum_in_backward
from parcompile.runtime.transport import group_size
from parcompile.runtime.transport.backend import gather_objects, gather_tensors

from .heads import mark, sum_repeated_gradient
from .mechanisms import why_untrained, why_whole
from .regions import BLOCK_TAKES_INPUT, Region


class ExpertAdapters:
    """The adapters of one module of experts, taken off it until `put_back`.

    Args:
        name: of the module, without peft.
        outermost: the wrapper of peft around it.
    """

    def __init__(self, name: str, outermost: Any) -> None:
        self.name, self.experts = name, outermost.get_base_layer()
        self.wrappers: dict[str, Any] = {}
        place, wrapper = name, outermost
        while wrapper is not self.experts:
            wrapper.parcompile_place = place  # where peft looks for it in its files
            self.wrappers[wrapper.parameter_name] = wrapper
            place, wrapper = f"{place}.base_layer", wrapper.base_layer
        for wrapper in self.wrappers.values():
            del wrapper.base_layer

    def put_back(self, slices: Slices, mesh: Mesh) -> None:
        """Beside the stacks of the injected module."""
        held = {kind: one for kind, one in self.wrappers.items() if slices.holds(f"{self.name}.{kind}")}
        for kind, wrapper in held.items():
            child = f"{kind}{OF_EXPERTS}"
            for adapter in wrapper.lora_A:
                for letter, matrices in (("A", wrapper.lora_A), ("B", wrapper.lora_B)):
                    weight = matrices[adapter].weight
                    stack = stack_of(letter, weight.detach(), wrapper.num_experts)
                    matrix = Matrix(f"{self.name}.{child}", letter)
                    matrices[adapter] = _Stack(_local(stack, matrix, slices, mesh, trained=weight.requires_grad))
            self.experts.add_module(child, wrapper)
        if held:
            _Adapted(self.experts, held)


class _Stack(nn.Module):
    """A or B of all experts that this rank holds."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class _Adapted:
    """Takes the place of the `forward` of a module of experts: within it the stacks are W + scaling · B · A."""

    def __init__(self, module: nn.Module, wrappers: Mapping[str, Any]) -> None:
        self._module, self._wrappers = module, wrappers
        self._compute: Callable[..., Any] = module.forward
        module.forward = self

    def __call__(self, *args: Any, **options: Any) -> Any:
        with ExitStack() as entered:
            for kind, wrapper in self._wrappers.items():
                if not wrapper.disable_adapters:
                    for adapter in wrapper.active_adapters:
                        entered.enter_context(_in_place(self._module, kind, wrapper, adapter))
            return self._compute(*args, **options)


@contextmanager
def _in_place(module: nn.Module, kind: str, wrapper: Any, adapter: str) -> Iterator[None]:
    held: Any = module._parameters
    plain: Tensor = held[kind]
    down, up = (matrices[adapter].weight.to(plain.dtype) for matrices in (wrapper.lora_A, wrapper.lora_B))
    held[kind] = torch.baddbmm(plain, up, down, alpha=wrapper.scaling[adapter])
    try:
        yield
    finally:
        held[kind] = plain


def why_not(name: str, outermost: Any, slices: Slices) -> str:
    """Why these adapters are not injected; nothing where they are."""
    module, wrapper = outermost.get_base_layer(), outermost
    while wrapper is not module:
        weight = f"{name}.{wrapper.parameter_name}"
        if wrapper.merged_adapters:
            return "is merged: unmerge it before initialize"
        if len(wrapper.lora_A) > 1:
            return f"has {len(wrapper.lora_A)} adapters ({', '.join(wrapper.lora_A)}): leave one"
        parameter = slices.of(weight).parameter if slices.has(weight) else None
        if parameter is None or parameter.expert_dim != 0 or len(parameter.shape) != 3:
            return f"has LoRA on {wrapper.parameter_name}: of target_parameters only stacks of experts are injected"
        if getattr(module, "is_transposed", False) or _is_transposed(parameter):
            return f"stores {wrapper.parameter_name} as [experts, in, out]: LoRA on such experts is not injected"
        if not getattr(wrapper, "_did_swap_in_out_features", False):
            return "has adapters of an older peft, which takes the inputs of experts for their outputs: update peft"
        wrapper = wrapper.base_layer
    return ""


def _is_transposed(parameter: Parameter) -> bool:
    """Whether a stack is [experts, in, out]: tp cuts outputs of the first projection and inputs of the second."""
    dim = None if parameter.split is None else parameter.split.dim
    return dim == (2 if parameter.name.endswith("up_proj") else 1)


def by_stack(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of a model's parameters, with those of experts as they are named and shaped once injected.

    Those of a model without adapters on experts, or of an injected one, as they are.
    """
    found = dict(tensors)
    for name, module in model.named_modules():
        wrapper: Any = module
        if not hasattr(wrapper, "parameter_name") or not hasattr(wrapper, "base_layer"):
            continue
        plain = name.replace(".base_layer", "")
        for letter, matrices in (("A", wrapper.lora_A), ("B", wrapper.lora_B)):
            for adapter in matrices:
                matrix = found.pop(f"{name}.lora_{letter}.{adapter}.weight", None)
                if matrix is not None:
                    injected = f"{plain}.{wrapper.parameter_name}{OF_EXPERTS}.lora_{letter}.{adapter}.weight"
                    found[injected] = stack_of(letter, matrix, wrapper.num_experts)
        if wrapper.base_layer is wrapper.get_base_layer():
            inner = f"{name}.base_layer."
            found = {
                f"{plain}.{one.removeprefix(inner)}" if one.startswith(inner) else one: tensor
                for one, tensor in found.items()
            }
    return found


def _local(stack: Tensor, matrix: Matrix, slices: Slices, mesh: Mesh, *, trained: bool) -> nn.Parameter:
    """This rank's part of A or B, marked as the experts that it stands beside."""
    piece = slices.of(matrix.weight)
    layout = matrix_layout(matrix, piece.layout, tuple(stack.shape))
    local = nn.Parameter(
        cut(stack, layout, piece.ranges if layout.ranges else None, piece.experts).contiguous(), requires_grad=trained
    )
    tp, ep = mesh.parallel_group(Axis.TP), mesh.parallel_group(Axis.EP)
    folds = slices.folds_experts and piece.experts is not None
    if piece.experts is not None:
        assert ep is not None
        mark_dealt(local, dist.get_world_size(ep), group_size(tp) if folds else 1)
    if folds or layout.ranges is not None:
        mark_shard(local)
    elif tp is not None and trained:
        if piece.ranges is None:
            raise everywhere(f"{matrix.weight} is whole on every tp rank: LoRA on it is not injected")
        # Each rank has the part of the gradient that its slice of the experts gives.
        sum_in_backward(local, tp)
    return local


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
            model.set_submodule(experts.name, experts.experts)
        for name, layer in self._found:
            model.set_submodule(name, layer.base_layer)
            # The linear alone must not gather the hidden states: A reads them too.
            setattr(model.get_submodule(name.rpartition(".")[0]), BLOCK_TAKES_INPUT, True)

    def put_back(self, slices: Slices, region: Region | None, mesh: Mesh) -> None:
        """Around the injected linears and beside the experts that this rank holds, cut."""
        for experts in self._experts:
            experts.put_back(slices, mesh)
        for name, layer in self._found:
            if not slices.holds(f"{name}.weight"):
                continue
            layer.base_layer = self._model.get_submodule(name)
            self._model.set_submodule(name, layer)
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
        raise everywhere(f"{name} {why}")


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
        raise everywhere(f"{why}: leave it out of target_modules")
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
        raise everywhere(
            f"init_lora_weights {config.init_lora_weights!r} starts from the weights, which are not there yet: "
            "give initialize a whole model"
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
        if (matrix := matrix_of(name)) is not None:
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
        local = torch.cat(gather_tensors(local, mesh.group("ep")), layout.expert_dim)
    group = mesh.parallel_group("tp")
    if group is None or layout.ranges is None:
        return local
    return merge_ranges(gather_tensors(local, group), matrix.dim, layout.ranges, layout.full_shape[matrix.dim])
