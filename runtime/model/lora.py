"""Names of peft's LoRA adapters: which linear each belongs to, and how it is cut beside a tensor-parallel one.

Beside a column-parallel linear A [r, I] is whole on every rank and B [O, r] is cut like the weight; beside a
row-parallel one A is cut like the weight and B is whole. Beside a stack of experts [E, O, I] they are stacks too,
A [E, r, I] and B [E, O, r], cut alike, and dealt over ep with the experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from parcompile.layout.shards import TensorLayout

PREFIX = "base_model.model."
"""What peft's names begin with."""

OF_EXPERTS = "_of_experts"
"""Follows the name of a stack of experts in that of the module with its adapters."""

_NAME = re.compile(r"(?P<linear>.+)\.lora_(?P<kind>[AB])\.[^.]+\.weight")


class Matrix(NamedTuple):
    """A or B of a linear, or of a stack of experts."""

    linear: str
    kind: str

    @property
    def is_stack(self) -> bool:
        """Whether it holds a matrix for each expert."""
        return self.linear.endswith(OF_EXPERTS)

    @property
    def weight(self) -> str:
        """The name of the parameter that it adapts."""
        return self.linear.removesuffix(OF_EXPERTS) if self.is_stack else f"{self.linear}.weight"

    @property
    def dim(self) -> int:
        """The dim of features that it shares with the weight."""
        return (0 if self.kind == "B" else 1) + int(self.is_stack)


def matrix_of(name: str) -> Matrix | None:
    """What the parameter of that name is; None unless it is an adapter's."""
    match = _NAME.fullmatch(plain_name(name))
    return Matrix(match["linear"], match["kind"]) if match else None


def plain_name(name: str) -> str:
    """The name that a parameter of an adapted model has without peft; adapters keep theirs behind the linear's."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def stack_of(kind: str, matrix: Tensor, experts: int) -> Tensor:
    """A [E, r, I] or B [E, O, r] of peft's A [E · r, I] or B [O, r · E], which are one matrix for E experts."""
    if kind == "A":
        return matrix.reshape(experts, -1, matrix.shape[1])
    return matrix.reshape(matrix.shape[0], -1, experts).permute(2, 0, 1)


def as_saved(name: str, whole: Tensor, adapters: Mapping[str, Any]) -> tuple[str, Tensor]:
    """The name and the tensor of A or B in `adapter_model.safetensors`; `adapters` is what describes them all."""
    matrix = matrix_of(name)
    if matrix is None or not matrix.is_stack:
        # Without the name of the adapter.
        return PREFIX + re.sub(r"\.(lora_[AB])\.[^.]+\.", r".\1.", plain_name(name)), whole
    if matrix.kind == "A":
        flat = whole.reshape(-1, whole.shape[2])
    else:
        flat = whole.permute(1, 2, 0).reshape(whole.shape[1], -1)
    return f"{PREFIX}{adapters['linears'][matrix.linear]['place']}.lora_{matrix.kind}.weight", flat


def matrix_layout(matrix: Matrix, weight: TensorLayout, shape: tuple[int, ...]) -> TensorLayout:
    """How A or B is cut beside a weight of that layout; `shape` is a rank's or the whole one."""
    full = list(shape)
    if matrix.is_stack:
        full[0] = weight.full_shape[0]
    if weight.dim != matrix.dim:
        return TensorLayout(tuple(full), None, None, 1, weight.ep if matrix.is_stack else 1)
    full[matrix.dim] = weight.full_shape[matrix.dim]
    return replace(weight, full_shape=tuple(full))


def without_peft(model: nn.Module) -> nn.Module:
    """The Hugging Face model in a `PeftModel`; any other model as it is."""
    get_base: Any = getattr(model, "get_base_model", None)
    base: nn.Module = model if get_base is None else get_base()
    return base


def describe_adapters(model: nn.Module) -> dict[str, Any] | None:
    """What a checkpoint notes of a model's adapters: peft's configuration, rank and scale; None: it has none."""
    configs: Mapping[str, Any] | None = getattr(model, "peft_config", None)
    if not configs:
        return None
    ((adapter, config),) = configs.items()
    linears = {
        name: {"r": module.r[adapter], "scaling": module.scaling[adapter]}
        # Where peft's files have adapters of experts.
        | ({"place": module.parcompile_place} if hasattr(module, "parcompile_place") else {})
        for name, module in without_peft(model).named_modules()
        if hasattr(module, "lora_A")
    }
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return {"config": values, "linears": linears}


def merged(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """W + scaling · B · A, in the type of `weight`."""
    return weight + scaling * (up.to(weight.dtype) @ down.to(weight.dtype))
