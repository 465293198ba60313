"""Names of peft's LoRA adapters: which linear each belongs to, and how it is cut beside a tensor-parallel one.

Beside a column-parallel linear A [r, I] is whole on every rank and B [O, r] is cut like the weight; beside a
row-parallel one A is cut like the weight and B is whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from parcompile.layout.tensor import TensorLayout

PREFIX = "base_model.model."
"""What peft's names begin with."""

_NAME = re.compile(r"(?P<linear>.+)\.lora_(?P<kind>[AB])\.[^.]+\.weight")


class Matrix(NamedTuple):
    """A or B of a linear."""

    linear: str
    kind: str

    @property
    def dim(self) -> int:
        """The dim that it shares with the linear's weight."""
        return 0 if self.kind == "B" else 1


def matrix_of(name: str) -> Matrix | None:
    """What the parameter of that name is; None unless it is an adapter's."""
    match = _NAME.fullmatch(plain_name(name))
    return Matrix(match["linear"], match["kind"]) if match else None


def plain_name(name: str) -> str:
    """The name that a parameter of an adapted model has without peft; adapters keep theirs behind the linear's."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def saved_name(name: str) -> str:
    """The name of A or B in `adapter_model.safetensors`: without that of the adapter."""
    return PREFIX + re.sub(r"\.(lora_[AB])\.[^.]+\.", r".\1.", plain_name(name))


def matrix_layout(matrix: Matrix, weight: TensorLayout, shape: tuple[int, ...]) -> TensorLayout:
    """How A or B is cut beside a weight of that layout; `shape` is a rank's or the whole one."""
    if weight.dim != matrix.dim:
        return TensorLayout(shape, None, None, 1)
    full = list(shape)
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
        for name, module in without_peft(model).named_modules()
        if hasattr(module, "lora_A")
    }
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return {"config": values, "linears": linears}


def merged(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """W + scaling · B · A, in the type of `weight`."""
    return weight + scaling * (up.to(weight.dtype) @ down.to(weight.dtype))
