"""LoRA on experts: peft's adapters of a stack of experts [E, O, I], dealt and cut as the stack is.

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
from parcompile.runtime.errors import RunError
from parcompile.runtime.expert_parallel import mark_dealt
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.lora import OF_EXPERTS, Matrix, matrix_layout, stack_of
from parcompile.runtime.model.slices import Slices, cut
from parcompile.runtime.tensor_parallel import mark_shard
from parcompile.runtime.tensor_parallel.partial import sum_in_backward
from parcompile.runtime.transport import group_size


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
            raise RunError(f"{matrix.weight} is whole on every tp rank: LoRA on it is not injected", everywhere=True)
        # Each rank has the part of the gradient that its slice of the experts gives.
        sum_in_backward(local, tp)
    return local
