"""Puts a checkpoint, or a Hugging Face model, into an engine or a checkpoint of another layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.layout.shards import TensorLayout
from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.cpu_adam import in_own_settings
from parcompile.runtime.deepspeed_patches.optimizer_state import (
    gathered,
    groups_of_shards,
    master_shards,
    parameter_groups,
    place_in_shard,
)
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.configuration import check_folder
from parcompile.runtime.model.lora import matrix_of, plain_name
from parcompile.runtime.model.pretrained import PretrainedFolder, persistent_of, without_memory
from parcompile.runtime.model.slices import Slices, cut, slice_of

from .reading import SavedRun, whole_note
from .state_file import MASTER, without_keys
from .writing import Source, fresh_groups, write


def adapt(engine: Any, saved: SavedRun) -> None:
    """Weights, optimizer states, counters and scheduler of a checkpoint in any layout.

    Every tensor is made whole and cut anew, one at a time.

    Raises:
        RunError: the checkpoint cannot be read, or does not hold what the engine trains.
    """
    slices = Slices(engine.mesh)
    optimizer = engine.optimizer
    shards = zip(master_shards(optimizer), parameter_groups(optimizer), strict=True)
    groups = [(shard, optimizer.optimizer.state[shard], parameters) for shard, parameters in shards]
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    placed = {parameter: (flat, state) for flat, state, parameters in groups for parameter in parameters}
    origins = [_origins([plain_name(names[one]) for one in parameters], saved) for _, _, parameters in groups]
    for (_, state, _), origin in zip(groups, origins, strict=True):
        scalars = saved.groups[origin[0]].scalars
        state.update({kind: value.clone() if isinstance(value, Tensor) else value for kind, value in scalars.items()})
        if "step" in state:  # a number where DeepSpeedCPUAdam saved it, which takes torch's tensor, too
            state["step"] = torch.tensor(float(state["step"]))
    with torch.no_grad():
        for parameter, name in names.items():
            for kind in saved.kinds:
                if kind != MASTER and parameter not in placed:
                    continue
                local = _local(saved, slices, name, kind)
                if local is None:
                    continue
                if kind == MASTER:
                    with gathered(parameter, written=True):
                        parameter.copy_(local)
                if parameter in placed:
                    flat, state = placed[parameter]
                    if kind != MASTER and kind not in state:
                        state[kind] = torch.zeros_like(flat)
                    _place(parameter, local, flat if kind == MASTER else state[kind])
        buffers = {plain_name(name): buffer for name, buffer in engine.module.named_buffers()}
        for name, buffer in saved.buffers.items():
            if name in buffers:
                buffers[name].copy_(buffer)
    _settings(engine, saved, origins)


def group_sizes(optimizer: Any) -> list[int]:
    """How many parameters the groups of ZeRO's optimizer have."""
    return [len(parameters) for parameters in parameter_groups(optimizer)]


def _local(saved: SavedRun, slices: Slices, name: str, kind: str) -> Tensor | None:
    """This rank's part of a saved tensor; of experts only its own are read."""
    plain = plain_name(name)
    matrix = matrix_of(name)
    experts = slices.of(plain if matrix is None else matrix.weight).experts
    whole = saved.whole(plain, kind, experts)
    if whole is None:
        return None
    piece = slice_of(slices, name, tuple(whole.shape))
    return cut(whole, piece.layout, piece.ranges)


def _origins(names: Sequence[str], saved: SavedRun) -> list[int]:
    """The saved parameter groups that those of a live one come from; the first, where none were trained before."""
    found = [number for number, group in enumerate(saved.groups) if not set(names).isdisjoint(group.names)]
    return found or [0]


def _place(parameter: nn.Parameter, local: Tensor, flat: Tensor) -> None:
    """Writes what of a parameter lies in this rank's shard."""
    if (place := place_in_shard(parameter)) is not None:
        flat.view(-1)[place.of_shard].copy_(local.reshape(-1)[place.of_parameter])


def _settings(engine: Any, saved: SavedRun, origins: Sequence[Sequence[int]]) -> None:
    """Counters, the scheduler, the loss scale, and the learning rates as they were."""
    counters = saved.counters
    engine.global_steps, engine.global_samples = counters["global_steps"], counters["global_samples"]
    engine.skipped_steps = counters["skipped_steps"]
    if engine.lr_scheduler is not None and counters.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(counters["lr_scheduler"])
    groups = engine.optimizer.optimizer.param_groups
    live = [groups[number] for number in groups_of_shards(engine.optimizer)]
    # Experts are in groups of their own, with the settings of those that they were taken from.
    kinds = [repr(sorted(without_keys(group).items())) for group in live]
    alike = {(number, kind) for origin, kind in zip(origins, kinds, strict=True) for number in origin}
    # Where parameters were grouped otherwise, no group has settings to go on with.
    if len({number for number, _ in alike}) == len(alike) and all(len(origin) == 1 for origin in origins):
        for group, (number,) in zip(live, origins, strict=True):
            group.update(in_own_settings(group, saved.groups[number].settings))
    # A run that changes to fp16 brings no moving scale of its own: the engine's stays.
    if type(saved.loss_scaler) is type(getattr(engine.optimizer, "loss_scaler", None)):
        engine.optimizer.loss_scaler = saved.loss_scaler


def convert(folder: str | Path, plan: Plan, output: str | Path) -> Path:
    """A checkpoint for the layout of `plan` from one of any layout of the same model; returns the new checkpoint.

    Raises:
        RunError: the checkpoint is damaged (which file is said), is of another model, or the plan keeps its optimizer
            states in a form that only DeepSpeed writes; or the new one cannot be written.
    """
    saved = SavedRun(whole_note(folder))
    if saved.note.adapters:
        raise RunError(
            f"{saved.note.folder} has adapters, which are not converted: resume from it, which reshards them"
        )
    ours, theirs = plan.spec.model.architecture, saved.note.plan.spec.model.architecture
    if ours != theirs:
        differing = "; ".join(
            f"{key} is {_shown(theirs, key)} in the checkpoint and {_shown(ours, key)} in the plan"
            for key in sorted({*ours, *theirs})
            if ours.get(key) != theirs.get(key)
        )
        raise RunError(f"the checkpoint is of another model than the plan: {differing}")
    kept = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
    counters = {key: saved.counters.get(key) for key in kept}
    source = Source(plan, _layouts(plan), saved.whole, saved.groups, saved.buffers, saved.loss_scaler)
    return write(source, Path(output), saved.note.step, counters)


def _shown(architecture: Mapping[str, Any], key: str) -> str:
    return json.dumps(architecture[key], default=str) if key in architecture else "not there"


def import_pretrained(folder: str | Path, plan: Plan, output: str | Path) -> Path:
    """The checkpoint `step-0` of a run that starts from Hugging Face weights; returns it.

    Raises:
        RunError: the folder does not hold the plan's model, or as for `convert`.
    """
    source = PretrainedFolder(folder)
    check_folder(folder, plan)
    buffers = persistent_of(without_memory(plan))
    source.check(plan, buffers)
    buffers.update({name: source.whole(name) for name in buffers if name in source})
    counters = {"global_steps": 0, "skipped_steps": 0, "lr_scheduler": None, "global_samples": 0}

    def weights(name: str, kind: str) -> Tensor | None:
        return source.whole(name) if kind == MASTER else None

    return write(Source(plan, _layouts(plan), weights, fresh_groups(plan), buffers), Path(output), 0, counters)


def _layouts(plan: Plan) -> dict[str, TensorLayout]:
    rows = plan.tensors()
    return {name: rows[parameter][1] for name, parameter in plan.parameters.expanded()}
