"""Builds the model of a plan with its initial weights: the same whole weights for every layout."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.plan import Plan
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh, join
from parcompile.runtime.inject import Slice, Slices, inject, sum_partial_gradients
from parcompile.runtime.inject.adapters import add_adapter
from parcompile.spec import Precision

from .lora import plain_name
from .pretrained import PretrainedFolder

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
"""What a plan's precision is called in torch."""


def build_model(plan: Plan, seed: int | None = None) -> nn.Module:
    """The plan's Hugging Face model, whole, in fp32 on the CPU, with weights drawn from `seed` (default: the plan's).

    The random state of the caller is left as it was.

    Raises:
        RunError: transformers is missing or does not know the model type.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.spec.training.seed if seed is None else seed)
        return instantiate(plan, torch.float32)


def load_pretrained(folder: str | Path, plan: Plan, adapter: Any = None) -> nn.Module:
    """The plan's model with the weights of a Hugging Face folder, injected: each rank reads its own slices only.

    The model is built without memory for its parameters, cut, and then filled from the safetensors, one slice at a time
    and in the plan's precision: no rank ever holds more than its share and one tensor. Joins the other ranks; hand the
    model to `initialize`.

    Args:
        folder: config.json and safetensors.
        plan: the plan.
        adapter: a `LoraConfig` of peft for adapters that are drawn from the plan's seed, or the folder of saved ones.

    Raises:
        RunError: the folder does not hold the plan's model; what is missing, misshapen or too much is named.
    """
    mesh, source = join(plan), PretrainedFolder(folder)
    dtype = DTYPES[plan.spec.training.precision]
    with _parameters_without_memory():
        model = instantiate(plan, dtype)
    buffers = _persistent(model)
    source.check(plan, buffers)
    if adapter is not None:
        model = add_adapter(model, adapter, plan.spec.training.seed)
    inject(model, mesh)
    for name, buffer in buffers.items():
        if name in source:
            buffer.copy_(source.whole(name))

    def stored(name: str, piece: Slice, shape: torch.Size) -> Tensor:
        # A copy: what is read is a window on the file, and of a row-parallel weight one with holes.
        read = source.take(name, piece.dim, piece.ranges, shape)
        return read.to(dtype, copy=True, memory_format=torch.contiguous_format)

    _fill(model, mesh, stored)
    return model


def random_model(plan: Plan) -> nn.Module:
    """The plan's model with weights drawn anew, injected: each rank draws its own slices only, on its device.

    For trials of any size: no rank ever holds the whole model. Matrices are normal, norms one and biases zero; what
    several ranks hold is the same on them. Joins the other ranks; hand the model to `initialize`.

    Raises:
        RunError: as for `build_model`.
    """
    mesh, dtype = join(plan), DTYPES[plan.spec.training.precision]
    with _parameters_without_memory():
        model = instantiate(plan, dtype)
    inject(model, mesh)
    deviation = float(plan.spec.model.hf_config.get("initializer_range") or 0.02)
    generator = torch.Generator(mesh.device)

    def drawn(name: str, piece: Slice, shape: torch.Size) -> Tensor:
        data = torch.empty(shape, dtype=dtype, device=mesh.device)
        if len(shape) < 2:
            return data.fill_(0.0 if name.endswith("bias") else 1.0)
        generator.manual_seed(zlib.crc32(f"{plan.spec.training.seed} {name} {piece.ranges}".encode()))
        return data.normal_(std=deviation, generator=generator)

    _fill(model, mesh, drawn)
    return model


def _fill(model: nn.Module, mesh: Mesh, data_of: Callable[[str, Slice, torch.Size], Tensor]) -> None:
    """Gives memory to the parameters of an injected model, one after the other."""
    slices, filled = Slices(mesh), {}
    for name, empty in list(model.named_parameters(remove_duplicate=False)):
        if not empty.is_meta:
            continue
        if empty not in filled:
            plain = plain_name(name)
            data = data_of(plain, slices.of(plain), empty.shape)
            filled[empty] = nn.Parameter(data, requires_grad=empty.requires_grad)
            vars(filled[empty]).update(vars(empty))
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, filled[empty])
    sum_partial_gradients(model, mesh)


def persistent_buffers(plan: Plan) -> dict[str, Tensor]:
    """What the plan's model keeps in its files beside parameters, as it is when the model is built."""
    with _parameters_without_memory():
        return _persistent(instantiate(plan, torch.float32))


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def instantiate(plan: Plan, dtype: torch.dtype) -> nn.Module:
    """The plan's Hugging Face model, whole, on the current default device.

    Raises:
        RunError: the plan is for a module of one's own, transformers is missing, or it does not know the model type.
    """
    if plan.spec.model.shape.own is not None:
        raise RunError(
            "the plan is for a module of your own, which only you can build: give it to initialize as model=",
            everywhere=True,
        )
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    except ImportError:
        raise RunError("building the model needs transformers: pip install 'parcompile[hf]'", everywhere=True) from None
    model: nn.Module = AutoModelForCausalLM.from_config(hf_config(plan, CONFIG_MAPPING), dtype=dtype)
    return model


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Parameters that modules register go to the meta device; buffers stay, since no file holds them."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def hf_config(plan: Plan, known: Any) -> Any:
    """The plan's configuration as transformers' own class."""
    values = dict(plan.spec.model.hf_config)
    family = values.pop("model_type")
    for key in ("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path"):
        values.pop(key, None)
    if family not in known:
        raise RunError(f"transformers does not know the model type {family!r}", everywhere=True)
    # A cache of keys and values serves generation; in training it would only hold memory.
    return known[family](**{**values, "use_cache": False})
