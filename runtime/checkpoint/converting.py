"""From a checkpoint of any layout, or a Hugging Face model, to a checkpoint of a plan."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from parcompile.layout.tensor import TensorLayout
from parcompile.plan import Plan
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.building import persistent_buffers
from parcompile.runtime.model.configuration import check_folder
from parcompile.runtime.model.pretrained import PretrainedFolder

from .deepspeed_files import MASTER
from .reading import SavedRun
from .verifying import whole_note
from .writing import ParameterGroup, Source, optimizer_settings, write


def convert(folder: str | Path, plan: Plan, output: str | Path) -> Path:
    """A checkpoint for the layout of `plan` from one of any layout of the same model; returns the new checkpoint.

    Raises:
        RunError: the checkpoint is damaged (which file is said), is of another model, or the plan keeps its optimizer
            states in a form that only DeepSpeed writes; or the new one cannot be written.
    """
    saved = SavedRun(whole_note(folder))
    if saved.note.adapters:
        raise RunError(
            f"{saved.note.folder} has adapters, which are not converted: resume from it, which cuts them anew"
        )
    ours, theirs = plan.spec.model.architecture, saved.note.plan.spec.model.architecture
    if ours != theirs:
        differing = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        raise RunError(f"the checkpoint is of another model than the plan: {', '.join(differing)} differ")
    counters = {key: saved.counters.get(key) for key in ("global_steps", "skipped_steps", "lr_scheduler")}
    counters["global_samples"] = saved.note.step * plan.spec.training.global_batch_size
    groups = [ParameterGroup(one.names, one.settings, one.scalars) for one in saved.groups]
    source = Source(plan, _layouts(plan), saved.whole, groups, saved.buffers, saved.loss_scaler)
    return write(source, Path(output), saved.note.step, counters)


def import_pretrained(folder: str | Path, plan: Plan, output: str | Path) -> Path:
    """The checkpoint `step-0` of a run that starts from Hugging Face weights; returns it.

    Raises:
        RunError: the folder does not hold the plan's model, or as for `convert`.
    """
    source = PretrainedFolder(folder)
    check_folder(folder, plan)
    buffers = persistent_buffers(plan)
    source.check(plan, buffers)
    buffers.update({name: source.whole(name) for name in buffers if name in source})
    counters = {"global_steps": 0, "skipped_steps": 0, "lr_scheduler": None, "global_samples": 0}

    def weights(name: str, kind: str) -> Tensor | None:
        return source.whole(name) if kind == MASTER else None

    names = [name for name, _ in plan.parameters.expanded()]
    group = ParameterGroup(names, optimizer_settings(plan), {"step": torch.tensor(0.0)})
    return write(Source(plan, _layouts(plan), weights, [group], buffers), Path(output), 0, counters)


def _layouts(plan: Plan) -> dict[str, TensorLayout]:
    rows = plan.tensors()
    return {name: rows[parameter][1] for name, parameter in plan.parameters.expanded()}
