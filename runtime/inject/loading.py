"""Injected models that never exist whole: each rank reads or draws its own slices of the weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.model.hf_config import ModelConfigError
from parcompile.plan import Plan
from parcompile.progress import tracked
from parcompile.runtime.groups import Mesh, join
from parcompile.runtime.model.configuration import check_folder
from parcompile.runtime.model.initial import InitialWeights, with_numbers
from parcompile.runtime.model.lora import plain_name
from parcompile.runtime.model.pretrained import PretrainedFolder, persistent_of, without_memory
from parcompile.runtime.model.shrinking import shrunk
from parcompile.runtime.model.slices import Slice, Slices
from parcompile.runtime.model.text_head import TORCH_DTYPES

from .adapters import add_adapter
from .injection import inject, register_gradient_sums


def load_pretrained(folder: str | Path, plan: Plan, adapter: Any = None, *, differs: Collection[str] = ()) -> nn.Module:
    """The plan's model with the weights of a Hugging Face folder, injected: each rank reads its own slices only.

    The model is built without memory for its parameters, cut, and then filled from the safetensors, one slice at a time
    and in the plan's precision: no rank ever holds more than its share and one tensor. Joins the other ranks; hand the
    model to `initialize`.

    Args:
        folder: config.json and safetensors.
        plan: the plan.
        adapter: a `LoraConfig` of peft for adapters that are drawn from the plan's seed, or the folder of saved ones.
        differs: keys of config.json that the plan changes on purpose, such as `max_position_embeddings` and
            `rope_parameters` for a longer context. All others have to be the plan's.

    Raises:
        RunError: the folder does not hold the plan's model; what is missing, misshapen or too much is named, and every
            key of config.json that would change numbers.
    """
    mesh, source = join(plan), PretrainedFolder(folder)
    check_folder(folder, plan, differs)
    dtype = TORCH_DTYPES[plan.spec.training.precision]
    model = without_memory(plan, dtype)
    buffers = persistent_of(model)
    source.check(plan, buffers)
    if adapter is not None:
        model = add_adapter(model, adapter, plan.spec.training.seed)
    inject(model, mesh)
    for name, buffer in buffers.items():
        if name in source:
            buffer.copy_(source.whole(name))

    def stored(name: str, piece: Slice, shape: torch.Size) -> Tensor:
        # A copy: what is read is a window on the file, and of a row-parallel weight one with holes.
        read = source.take(name, piece, shape)
        return read.to(dtype, copy=True, memory_format=torch.contiguous_format)

    _fill(model, mesh, stored)
    return model


def draws_all(plan: Plan) -> bool:
    """Whether transformers' rules draw the first weights of all parameters: told by a small model of the same kind."""
    try:
        small = shrunk(plan)
    except ModelConfigError:
        return False
    return InitialWeights(without_memory(small), plan.spec.training.seed).draws_all()


def initial_model(plan: Plan, mesh: Mesh) -> nn.Module:
    """The plan's model with its first weights, injected: those of `build_model`, of which each rank keeps its slices.

    A rank draws the layers that it has a part of, one after the other, and holds one of them whole at a time.

    Raises:
        RunError: as for `build_model`, and where transformers' rules draw no first weights of a parameter.
    """
    weights = InitialWeights(without_memory(plan), plan.spec.training.seed)
    model, dtype = without_memory(plan), TORCH_DTYPES[plan.spec.training.precision]
    inject(model, mesh)

    def drawn(name: str, piece: Slice, _: torch.Size) -> Tensor:
        mine = piece.cut(weights.whole(name)).to(dtype, memory_format=torch.contiguous_format)
        # A window on the whole would keep all of it.
        return mine if mine.untyped_storage().nbytes() == mine.nbytes else mine.clone()

    _fill(model, mesh, drawn, weights.part_of)
    return model


def random_model(plan: Plan) -> nn.Module:
    """The plan's model with weights drawn anew, injected: each rank draws its own slices only, on its device.

    For trials of any size: no rank ever holds the whole model. Matrices are normal, norms one and biases zero; what
    several ranks hold is the same on them. Joins the other ranks; hand the model to `initialize`.

    Raises:
        RunError: as for `build_model`.
    """
    mesh, dtype = join(plan), TORCH_DTYPES[plan.spec.training.precision]
    model = without_memory(plan, dtype)
    inject(model, mesh)
    deviation = float(plan.spec.model.hf_config.get("initializer_range") or 0.02)
    generator = torch.Generator(mesh.device)

    def drawn(name: str, piece: Slice, shape: torch.Size) -> Tensor:
        data = torch.empty(shape, dtype=dtype, device=mesh.device)
        if len(shape) < 2:
            return data.fill_(0.0 if name.endswith("bias") else 1.0)
        place = f"{piece.ranges}" if piece.experts is None else f"{piece.ranges} of experts {piece.experts}"
        generator.manual_seed(zlib.crc32(f"{plan.spec.training.seed} {name} {place}".encode()))
        return data.normal_(std=deviation, generator=generator)

    _fill(model, mesh, drawn)
    return model


def _fill(
    model: nn.Module,
    mesh: Mesh,
    data_of: Callable[[str, Slice, torch.Size], Tensor],
    part_of: Callable[[str], str] = lambda _: "",
) -> None:
    """Gives memory to the parameters of an injected model, one after the other, those of a part together."""
    slices, filled = Slices(mesh), {}
    parameters = sorted(model.named_parameters(remove_duplicate=False), key=lambda one: part_of(plain_name(one[0])))
    for name, empty in tracked(parameters, "loading weights"):
        if not empty.is_meta:
            continue
        if empty not in filled:
            plain = plain_name(name)
            data = data_of(plain, slices.of(plain), empty.shape)
            filled[empty] = with_numbers(empty, data)
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, filled[empty])
    register_gradient_sums(model, mesh)
