"""The model of one rank, really built: our layers and injection, on the meta device, the layers of its stage only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.layout.stages import Stage
from parcompile.model.families import FAMILIES
from parcompile.plan import Plan
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject import Slices, inject, register_gradient_sums
from parcompile.runtime.inject.recomputation import recompute_as_planned
from parcompile.runtime.model.building import instantiate
from parcompile.runtime.model.dtypes import TORCH_DTYPES

from .stand_in import META
from .tracker import MetaTracker

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as the rank holds it, and the ranges of the whole one that were copied into it (None: all of it)."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    ranges: Ranges | None
    source: str | None
    """The parameter that they came from; None when several."""


Builder = Callable[[], nn.Module]
"""Builds a user module, whole."""


def build_sharded(mesh: Mesh, tracker: MetaTracker, builder: Builder | None = None) -> tuple[nn.Module, list[Held]]:
    """This rank's part of the whole model, and what it holds; a user module comes from `builder`.

    Raises:
        RunError: the model cannot be injected.
    """
    plan = mesh.plan
    dtype = TORCH_DTYPES[plan.spec.training.precision]
    with META:
        model = instantiate(plan, dtype) if builder is None else builder().to(META, dtype)
        whole = {_storage(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        tracker.keep_copies = True
        inject(model, mesh)
        tracker.keep_copies = False
    if plan.spec.model.shape.user_module is None:
        register_gradient_sums(model, mesh)
    slices = Slices(mesh)
    held = [_held(name, parameter, slices, whole, tracker) for name, parameter in model.named_parameters()]
    tracker.forget_copies()
    recompute_as_planned(model, plan)
    return model.train(), held


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _held(
    name: str, parameter: Tensor, slices: Slices, whole: Mapping[int, tuple[str, Tensor]], tracker: MetaTracker
) -> Held:
    dim = slices.of(name).dim
    shape, original = tuple(parameter.shape), whole.get(_storage(parameter))
    if original is not None:
        return Held(name, shape, parameter.nbytes, None, original[0])
    ranges, sources = [], set()
    for _, piece in sorted(tracker.copies_into(parameter), key=lambda copy: copy[0]):
        found = whole.get(_storage(piece))
        if found is None or piece.numel() == 0:
            continue
        if dim is None and piece.shape == found[1].shape:
            return Held(name, shape, parameter.nbytes, None, found[0])
        if dim is None:
            continue
        start = piece.storage_offset() // found[1].stride(dim) % found[1].shape[dim]
        ranges.append((start, start + piece.shape[dim]))
        sources.add(found[0])
    return Held(name, shape, parameter.nbytes, tuple(_joined(ranges)), sources.pop() if len(sources) == 1 else None)


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Neighbouring ranges as one."""
    pending: tuple[int, int] | None = None
    for start, stop in ranges:
        if pending is not None and pending[1] == start:
            pending = pending[0], stop
            continue
        if pending is not None:
            yield pending
        pending = start, stop
    if pending is not None:
        yield pending


class StageModel(nn.Module):
    """The layers of one stage with the head and loss or without; called with what reaches the stage.

    With one stage it is the model as training calls it. A stage that is not the first takes hidden states for what the
    stage before would send; one that is not the last ends in a scalar whose backward hands in a gradient as the next
    stage would.
    """

    def __init__(self, model: nn.Module, plan: Plan, stages: tuple[Stage, ...]) -> None:
        super().__init__()
        self.first = any(stage.has_embedding for stage in stages)
        self.last = any(stage.has_head for stage in stages)
        whole = self.first and self.last and plan.spec.parallelism.pp == 1
        if not whole:
            _cut_to_stage(model, plan, stages, first=self.first, last=self.last)
        self.part: Any = model
        if not self.last:
            self.part = model.get_submodule(FAMILIES[plan.spec.model.shape.model_type].base)

    def forward(self, hidden: Tensor | None = None, **batch: Any) -> Tensor:
        """The loss of a micro-batch, or what stands for it."""
        if hidden is not None:
            batch.pop("input_ids")
            batch["inputs_embeds"] = hidden
        if self.last:
            with META:  # for modules that make their positions on the default device
                loss: Tensor = self.part(**batch).loss
            return loss
        out = self.part(
            **{name: batch[name] for name in batch if name in ("input_ids", "inputs_embeds", "position_ids")}
        )
        sent: Tensor = _SendToNext.apply(out[0])  # type: ignore[no-untyped-call]
        return sent


class _SendToNext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.like = hidden.shape, hidden.dtype, hidden.device
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


def layer_numbers(stages: tuple[Stage, ...]) -> list[int]:
    """The layers that a rank holds, in order."""
    return [layer for stage in stages for layer in stage.layers]


def is_held(name: str, plan: Plan, stages: tuple[Stage, ...]) -> bool:
    """Whether a parameter of the whole model is on these stages."""
    table = plan.parameters
    prefix = table.layer[0].name.partition("{layer}")[0]
    if name.startswith(prefix):
        return int(name.removeprefix(prefix).partition(".")[0]) in layer_numbers(stages)
    first, last = any(stage.has_embedding for stage in stages), any(stage.has_head for stage in stages)
    if name in {row.name for row in table.before}:
        # A tied embedding is the head's weight too.
        tied = plan.spec.model.shape.tie_word_embeddings and name == table.before[0].name
        return first or (tied and last)
    return last


def _cut_to_stage(model: nn.Module, plan: Plan, stages: tuple[Stage, ...], *, first: bool, last: bool) -> None:
    family = FAMILIES[plan.spec.model.shape.model_type]
    base: Any = model.get_submodule(family.base)
    path = plan.parameters.layer[0].name.partition(".{layer}")[0]
    layers: Any = model.get_submodule(path)
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.ModuleList([layers[index] for index in layer_numbers(stages)]))
    base.config.num_hidden_layers = len(layer_numbers(stages))
    if not last:
        setattr(base, family.final_norm, nn.Identity())
        for child, module in list(model.named_children()):
            if module is not base and all(one is not base for one in module.modules()):
                setattr(model, child, nn.Identity())
    if not first:
        setattr(base, family.embedding, nn.Identity())
