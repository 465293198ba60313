"""Writes a checkpoint of any layout from whole tensors: another checkpoint's, or a Hugging Face model's.

The files are those that DeepSpeed's ZeRO-1 optimizer would write, so that the engine loads them as its own.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parcompile.checkpoints import file_layout
from parcompile.layout.optimizer import padded_shard
from parcompile.plan import Plan
from parcompile.spec import Precision
from parcompile.targets.deepspeed import ds_config

from ..errors import RunError
from ..tensor_parallel import take_ranges
from .manifest import LATEST, NOTE, Note, digest_of, read_note, write_atomically
from .pretrained import PretrainedFolder
from .reading import MASTER, SavedRun

_MOMENTS = ("exp_avg", "exp_avg_sq")
_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}

Source = Callable[[str, str], Tensor | None]
"""From a parameter's name and a kind (fp32, exp_avg, …) to the whole tensor; None stands for zeros."""


def convert(folder: str | Path, plan: Plan, output: str | Path) -> Path:
    """A checkpoint for the layout of `plan` from one of any layout of the same model; returns the new checkpoint.

    Raises:
        RunError: the checkpoint cannot be read, is of another model, or the plan keeps its optimizer states in a form
        that only DeepSpeed writes.
    """
    saved = SavedRun(read_note(Path(folder)))
    if saved.note.adapters:
        raise RunError(
            f"{saved.note.folder} has adapters, which are not converted: resume from it, which cuts them anew"
        )
    ours, theirs = plan.spec.model.hf_config, saved.note.plan.spec.model.hf_config
    if dict(ours) != dict(theirs):
        differing = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        raise RunError(f"the checkpoint is of another model than the plan: {', '.join(differing)} differ")
    counters = {key: saved.counters.get(key) for key in ("global_steps", "skipped_steps", "lr_scheduler")}
    samples = saved.note.step * plan.spec.training.global_batch_size
    settings = saved.optimizer_groups if len(saved.optimizer_groups) == 1 else None
    counters["global_samples"] = samples
    buffers = {name: saved.counters["module"][name] for name in saved.counters.get("buffer_names") or ()}
    return _write(plan, saved.whole, buffers, Path(output), saved.note.step, counters, settings)


def import_pretrained(folder: str | Path, plan: Plan, output: str | Path) -> Path:
    """The checkpoint `step-0` of a run that starts from Hugging Face weights; returns it.

    Raises:
        RunError: the folder does not hold the plan's model, or as for `convert`.
    """
    from ..model import persistent_buffers

    source, buffers = PretrainedFolder(folder), persistent_buffers(plan)
    source.check(plan, buffers)
    buffers.update({name: source.whole(name) for name in buffers if name in source})
    counters = {"global_steps": 0, "skipped_steps": 0, "lr_scheduler": None, "global_samples": 0}

    def weights(name: str, kind: str) -> Tensor | None:
        return source.whole(name) if kind == MASTER else None

    return _write(plan, weights, buffers, Path(output), 0, counters, None)


def _write(
    plan: Plan,
    source: Source,
    buffers: Mapping[str, Tensor],
    output: Path,
    step: int,
    counters: dict[str, Any],
    settings: list[dict[str, Any]] | None,
) -> Path:
    training = plan.spec.training
    if training.precision is Precision.BF16 and training.gradient_accumulation_dtype is Precision.FP32:
        raise RunError(
            "bf16 with gradient_accumulation_dtype fp32 is DeepSpeed's BF16_Optimizer, whose files are not written "
            "here: resume from the checkpoint as it is, which adapts it"
        )
    shape = plan.spec.model.shape
    if shape.own is not None and shape.tie_word_embeddings:
        raise RunError(
            "the plan does not say which module of your own is tied to the embedding, and DeepSpeed's files name both: "
            "resume from the checkpoint as it is, which adapts it"
        )
    place = output / f"step-{step}"
    if place.exists():
        raise RunError(f"{place} exists already: choose another folder")
    unfinished = output / f"unfinished-step-{step}"
    unfinished.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in plan.parameters.expanded()]
    for tp_rank in range(plan.spec.parallelism.tp):
        _write_rank(plan, source, buffers, unfinished, names, tp_rank, {**counters, "step": step}, settings)
    files = {file.name: digest_of(file) for file in sorted(unfinished.iterdir())}
    note = Note(unfinished, step, plan, file_layout(plan), files)
    write_atomically(unfinished / NOTE, json.dumps(note.to_json(), indent=1) + "\n")
    unfinished.rename(place)
    write_atomically(output / LATEST, place.name)
    return place


def _write_rank(
    plan: Plan,
    source: Source,
    buffers: Mapping[str, Tensor],
    folder: Path,
    names: list[str],
    tp_rank: int,
    counters: dict[str, Any],
    settings: list[dict[str, Any]] | None,
) -> None:
    rows, parameters = plan.tensors(), dict(plan.parameters.expanded())
    parallelism, dtype = plan.spec.parallelism, _DTYPES[plan.spec.training.precision]

    def local(name: str, kind: str) -> Tensor | None:
        whole, tensor_layout = source(name, kind), rows[parameters[name].name][1]
        if whole is None or tensor_layout.ranges is None or tensor_layout.dim is None:
            return whole
        dim = tensor_layout.dim
        return take_ranges(whole, dim, tensor_layout.ranges[tp_rank], padded_size=tensor_layout.full_shape[dim])

    module: OrderedDict[str, Tensor] = OrderedDict()
    for name in names:
        weight = local(name, MASTER)
        assert weight is not None
        module[name] = weight.to(dtype)
    if plan.spec.model.shape.tie_word_embeddings:
        module["lm_head.weight"] = module[names[0]]
    module.update(buffers)
    shapes = OrderedDict((name, module[name].shape) for name in names)
    states = {
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "data_sampler": None,
        "random_ltd": None,
        "dp_world_size": parallelism.zero_shards,
        "mp_world_size": parallelism.tp,
        **_versions(plan),
        **counters,
    }
    torch.save(states, folder / f"mp_rank_{tp_rank:02d}_model_states.pt")
    prefix = "bf16_" if plan.spec.training.precision is Precision.BF16 else ""
    for shard in range(parallelism.zero_shards):
        content = _shard(plan, local, shapes, shard, counters["step"], settings)
        file = folder / f"{prefix}zero_pp_rank_{shard}_mp_rank_{tp_rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": content, **_versions(plan)}, file)


def _versions(plan: Plan) -> dict[str, Any]:
    import deepspeed

    return {"ds_config": ds_config(plan), "ds_version": deepspeed.__version__}


def _shard(
    plan: Plan,
    local: Source,
    shapes: OrderedDict[str, torch.Size],
    shard: int,
    step: int,
    settings: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """One rank's optimizer states, by DeepSpeed's rule: flattened in order, padded, cut evenly."""
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    shards = plan.spec.parallelism.zero_shards
    total = sum(shape.numel() for shape in shapes.values())
    place = padded_shard(total, shards, shard)
    flat = {kind: torch.zeros(place.numel) for kind in (MASTER, *_MOMENTS)}
    places: OrderedDict[str, Any] = OrderedDict()
    offset = 0
    for name, shape in shapes.items():
        begin, end = offset, offset + shape.numel()
        offset = end
        start, stop = max(begin, place.start), min(end, place.stop)
        if start >= stop:
            continue
        places[name] = fragment_address(numel=stop - start, start=start - place.start)
        for kind, run in flat.items():
            tensor = local(name, kind)
            if tensor is not None:
                run[start - place.start : stop - place.start] = tensor.reshape(-1)[start - begin : stop - begin]
    state = {"step": torch.tensor(float(step)), **{kind: flat[kind] for kind in _MOMENTS}}
    padding = place.padding if shard == shards - 1 else 0
    return {
        "loss_scaler": LossScaler(scale=max(1.0, plan.spec.training.loss_scale)),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": plan.spec.training.gradient_clipping,
        "base_optimizer_state": {"state": {0: state}, "param_groups": settings or [_settings(plan)]},
        "single_partition_of_fp32_groups": [flat[MASTER]],
        "zero_stage": ZeroStageEnum.optimizer_states,
        "group_paddings": [padding],
        "param_alignment_paddings": [[0] * len(shapes)],
        "partition_count": [shards],
        "ds_version": deepspeed.__version__,
        "param_slice_mappings": [places],
    }


def _settings(plan: Plan) -> dict[str, Any]:
    """The settings of a fresh AdamW with the plan's values."""
    optimizer = plan.spec.training.optimizer
    make = torch.optim.AdamW if optimizer.type == "adamw" else torch.optim.Adam
    fresh = make(
        [torch.zeros(1)],
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    return dict(fresh.state_dict()["param_groups"][0])
