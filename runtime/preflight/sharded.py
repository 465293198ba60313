"""The model of one rank, really built: our layers and injection, without memory, the layers of its stage only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject import Slices, inject, register_gradient_sums
from parcompile.runtime.inject.regions import recompute_as_planned
from parcompile.runtime.model.pretrained import instantiate
from parcompile.runtime.model.text_head import TORCH_DTYPES

from .stand_in import MetaTracker, default_device

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
    experts: Ranges | None = None
    """Of a parameter that holds experts, those that were copied; None: all."""


Builder = Callable[[], nn.Module]
"""Builds a user module, whole."""


def build_sharded(mesh: Mesh, tracker: MetaTracker, builder: Builder | None = None) -> tuple[nn.Module, list[Held]]:
    """This rank's part of the whole model, and what it holds; a user module comes from `builder`.

    Raises:
        RunError: the model cannot be injected.
    """
    plan = mesh.plan
    dtype = TORCH_DTYPES[plan.spec.training.precision]
    with tracker.building():
        model = instantiate(plan, dtype) if builder is None else builder()
    model = tracker.place(model, dtype)
    with default_device(mesh.device):
        whole = {_storage(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        tracker.keep_copies = True
        inject(model, mesh)
        tracker.keep_copies = False
    tracker.injected(model)
    if plan.spec.model.shape.user_module is None and mesh.device.type == "meta":  # elsewhere it has been done
        register_gradient_sums(model, mesh)
    slices = Slices(mesh)
    held = [_held(name, parameter, slices, whole, tracker) for name, parameter in model.named_parameters()]
    tracker.forget_copies()
    recompute_as_planned(model, plan, mesh.rank)
    return model.train(), held


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _held(
    name: str, parameter: Tensor, slices: Slices, whole: Mapping[int, tuple[str, Tensor]], tracker: MetaTracker
) -> Held:
    piece_of = slices.of(name)
    dim, dealt = piece_of.dim, piece_of.layout.ep > 1
    shape, original = tuple(parameter.shape), whole.get(_storage(parameter))
    if original is not None:
        return Held(name, shape, parameter.nbytes, None, original[0])
    ranges, sources = [], set()
    experts: list[tuple[int, int]] = []
    for _, piece in sorted(tracker.copies_into(parameter), key=lambda copy: copy[0]):
        found = whole.get(_storage(piece))
        if found is None or piece.numel() == 0:
            continue
        if dim is None and piece.shape == found[1].shape:
            return Held(name, shape, parameter.nbytes, None, found[0])
        if dealt:
            along = piece_of.layout.expert_dim
            first = piece.storage_offset() // found[1].stride(along)
            experts.append((first, first + piece.shape[along]))
        sources.add(found[0])
        if dim is None:
            continue
        start = piece.storage_offset() // found[1].stride(dim) % found[1].shape[dim]
        ranges.append((start, start + piece.shape[dim]))
    source = sources.pop() if len(sources) == 1 else None
    # Every stretch of experts is cut alike, and every range of them taken from the same stretches.
    held = None if dim is None and experts else joined(dict.fromkeys(ranges))
    return Held(name, shape, parameter.nbytes, held, source, tuple(dict.fromkeys(experts)) or None)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Neighbouring ranges as one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)
