"""Writes a checkpoint of any layout from whole tensors: another checkpoint's, or a Hugging Face model's.

The files are those that DeepSpeed's ZeRO-1 optimizer would write, so that the engine loads them as its own. At ZeRO
stage 0 they are those of ZeRO-1 with one shard, and one more shard for the experts of each further ep rank.

Experts of each further ep rank lie in a file of their own.
"""

from __future__ import annotations

import copy
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.backends.deepspeed.write import ds_config
from parcompile.layout.groups import EXPERT_DP, Axis
from parcompile.layout.shards import GroupKind, TensorLayout, group_kind, padded_shard
from parcompile.plan import Plan
from parcompile.plan.diff import file_layout
from parcompile.plan.holding import Holding, expert_places, further_ep_ranks, model_parallel_places
from parcompile.progress import tracked
from parcompile.runtime.deepspeed_patches.norm import expert_settings
from parcompile.runtime.errors import RunError
from parcompile.runtime.expert_parallel import is_dealt
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.slices import cut
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.optimizers import fresh_optimizer, muon_settings
from parcompile.spec import Precision

from .agreement import one_line
from .manifest import LATEST, NOTE, Note, check_listed, damages, refuse_inside, universal_checkpoint_info
from .placing import begin, hold, is_noted_there, put_in_place, release, unfinished
from .state_file import MASTER, ParameterGroup, experts_file, shard_file, weights_file, write_state

MODULE = "module"
"""The key of weights in a file, as in DeepSpeed's."""


def experts_to_write(mesh: Mesh) -> str | None:
    """The file of experts that this rank writes; None: it writes none."""
    if mesh.parallel_group(Axis.EP) is None or not mesh.index("dp-cp") or mesh.index(EXPERT_DP):
        return None
    return experts_file(mesh.index(Axis.EP), mesh.index("tp-pp"))


def content_of_experts(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What such a file holds: the experts of this rank."""
    experts = {name: parameter.detach() for name, parameter in model.named_parameters() if is_dealt(parameter)}
    return {MODULE: experts}


def with_experts(weights: Mapping[str, Any], experts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file of weights with other experts."""
    return {**weights, MODULE: type(weights[MODULE])({**weights[MODULE], **experts[MODULE]})}


Whole = Callable[[str, str], Tensor | None]
"""From a parameter's name and a kind (fp32, exp_avg, …) to the whole tensor; None stands for zeros."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is written: whole tensors for a plan. Parameters in no group are frozen."""

    plan: Plan
    layouts: Mapping[str, TensorLayout]
    whole: Whole
    groups: Sequence[ParameterGroup]
    buffers: Mapping[str, Tensor]
    loss_scaler: Any = None

    def of_stage(self, held: Holding) -> Source:
        """The same of one stage: its parameters in the groups that it has some of."""
        groups = [
            part
            for group in self.groups
            for part in self._apart(replace(group, names=[name for name in group.names if name in held]))
        ]
        buffers = {name: buffer for name, buffer in self.buffers.items() if held.has_buffer(name)}
        return replace(self, groups=[group for group in groups if group.names], buffers=buffers)

    def _apart(self, group: ParameterGroup) -> Iterator[ParameterGroup]:
        """As the engine has it: what is dealt over ep is in a group of its own."""
        dealt = [name for name in group.names if self.layouts[name].ep > 1]
        yield replace(group, names=[name for name in group.names if self.layouts[name].ep == 1])
        if dealt:
            settings = expert_settings(group.settings, self.plan.spec.parallelism.ep)
            # The optimizer counts its steps in place, in each group.
            scalars = copy.deepcopy(dict(group.scalars))
            yield replace(group, names=dealt, settings=settings, scalars=scalars, of_experts=True)

    def local(self, name: str, kind: str, tp_rank: int, ep_rank: int = 0) -> Tensor | None:
        """A tensor as a rank of tp and ep holds it."""
        whole, layout = self.whole(name, kind), self.layouts[name]
        if whole is None:
            return None
        return cut(whole, layout, None if layout.ranges is None else layout.ranges[tp_rank], layout.experts(ep_rank))


def write(source: Source, output: Path, step: int, counters: dict[str, Any]) -> Path:
    """The checkpoint of a source; returns its folder.

    Raises:
        RunError: the files would name a module that the plan does not know, or the folder cannot be written to.
    """
    shape = source.plan.spec.model.shape
    if shape.user_module is not None and shape.tie_word_embeddings:
        raise RunError(
            "the plan does not say which module of your own is tied to the embedding, and DeepSpeed's files name both: "
            "resume from the checkpoint as it is, which adapts it"
        )
    place = output / f"step-{step}"
    refuse_inside(output)
    if output.exists() and not output.is_dir():
        raise RunError(f"{output} is a file: name a folder")
    if (place / NOTE).exists() and (output / LATEST).exists():
        raise _exists(place)
    try:
        output.mkdir(parents=True, exist_ok=True)
        hold(output)
        try:
            return _write_files(source, begin(place), place, {**counters, "step": step})
        finally:
            shutil.rmtree(unfinished(place), ignore_errors=True)  # it is in place, or was given up
            release(output)
    except OSError as error:
        raise RunError(f"{place} cannot be written: {one_line(error)}") from None


def _write_files(source: Source, folder: Path, place: Path, counters: dict[str, Any]) -> Path:
    plan, files = source.plan, {}
    stages = [Holding(plan, pp_rank) for pp_rank in range(plan.spec.parallelism.pp)]
    for number, rank in enumerate(tracked(model_parallel_places(plan), "writing the checkpoint's files")):
        held = stages[rank.pp]
        files.update(_write_rank(source.of_stage(held), held, folder, (number, rank.tp), counters))
    check_listed(plan, files)
    sizes = [[len(group.names) for group in source.of_stage(held).groups] for held in stages]
    note = Note(place, counters["step"], plan, file_layout(plan), files, groups=sizes)
    same = is_noted_there(note) and not damages(note, files)
    if place.exists() and not same:
        raise _exists(place)
    put_in_place(note, same=same)
    return place


def _exists(place: Path) -> RunError:
    return RunError(f"{place} exists already: choose another folder")


def _write_rank(
    source: Source, held: Holding, folder: Path, place: tuple[int, int], counters: dict[str, Any]
) -> dict[str, tuple[int, str]]:
    """The files of a model-parallel rank, each with its size in bytes and SHA-256.

    `place` is the number of the rank and its tp rank.
    """
    plan, (mp_rank, tp_rank) = source.plan, place
    parallelism, precision = plan.spec.parallelism, plan.spec.training.precision
    names, first_ep_rank = held.names, expert_places(plan, tp_rank)[0].ep
    module: OrderedDict[str, Tensor] = OrderedDict()
    for name in names:
        weight = source.local(name, MASTER, tp_rank, first_ep_rank)
        assert weight is not None
        module[name] = weight.to(TORCH_DTYPES[precision])
    tied = {"lm_head.weight": names[0]} if plan.spec.model.shape.tie_word_embeddings and held.has_head else {}
    module.update({name: module[other] for name, other in tied.items()})
    module.update(source.buffers)
    trained = {name for group in source.groups for name in group.names}
    frozen = OrderedDict((name, module[name]) for name in names if name not in trained)
    states = {
        "module": module,
        "buffer_names": list(source.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((name, module[name].shape) for name in group.names) for group in source.groups],
        "frozen_param_shapes": OrderedDict((name, one.shape) for name, one in frozen.items()) or None,
        "shared_params": tied,
        "frozen_param_fragments": frozen or None,
        "data_sampler": None,
        "random_ltd": None,
        "dp_world_size": parallelism.zero_shards,
        "mp_world_size": parallelism.tp * parallelism.pp,
        **universal_checkpoint_info(plan, adapters=False),
        **versions(plan),
        **counters,
    }
    files = {weights_file(mp_rank): write_state(folder / weights_file(mp_rank), states)}
    dealt = [name for name in names if source.layouts[name].ep > 1]
    for ep_rank in further_ep_ranks(plan, tp_rank):
        experts = {name: source.local(name, MASTER, tp_rank, ep_rank) for name in dealt}
        weights = {name: one.to(TORCH_DTYPES[precision]) for name, one in experts.items() if one is not None}
        file = experts_file(ep_rank, mp_rank)
        files[file] = write_state(folder / file, {MODULE: weights})
    for shard in range(len(expert_places(plan))):
        name = shard_file(shard, mp_rank, bf16=precision is Precision.BF16)
        content = {"optimizer_state_dict": _shard(source, module, shard, tp_rank), **versions(plan)}
        files[name] = write_state(folder / name, content)
    return files


def versions(plan: Plan) -> dict[str, Any]:
    """What a file says of the configuration and of DeepSpeed."""
    import deepspeed

    return {"ds_config": ds_config(plan), "ds_version": deepspeed.__version__}


def _shard(source: Source, module: Mapping[str, Tensor], shard: int, tp_rank: int) -> dict[str, Any]:
    """One rank's optimizer states."""
    import deepspeed
    from deepspeed.runtime.zero.config import ZeroStageEnum

    plan, groups = source.plan, source.groups
    expert_shards = len({place.expert_dp for place in expert_places(plan)})
    runs = [_run(source, group, module, shard, tp_rank) for group in groups]
    scaler, dynamic = _scaler(source)
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": dynamic,
        "overflow": False,
        "clip_grad": plan.spec.training.gradient_clipping,
        "base_optimizer_state": {
            "state": {
                number: {**group.scalars, **{kind: run.flat[kind] for kind in group.moments}}
                for number, (group, run) in enumerate(zip(groups, runs, strict=True))
            },
            "param_groups": [{**group.settings, "params": [number]} for number, group in enumerate(groups)],
        },
        # DeepSpeed saves master weights without the padding, and states with it.
        "single_partition_of_fp32_groups": [run.flat[MASTER][: len(run.flat[MASTER]) - run.padding] for run in runs],
        "zero_stage": ZeroStageEnum(plan.spec.zero_stage),
        "group_paddings": [run.padding for run in runs],
        "param_alignment_paddings": [[0] * len(group.names) for group in groups],
        "partition_count": [expert_shards if group.of_experts else plan.spec.optimizer_shards for group in groups],
        "ds_version": deepspeed.__version__,
        "param_slice_mappings": [run.places for run in runs],
    }


@dataclass(frozen=True, slots=True)
class _Run:
    """What of a group lies in one shard: flat tensors by kind, where parameters are in them, and the end."""

    flat: dict[str, Tensor]
    places: OrderedDict[str, Any]
    padding: int


def _run(source: Source, group: ParameterGroup, module: Mapping[str, Tensor], shard: int, tp_rank: int) -> _Run:
    """By DeepSpeed's rule: flattened in order, padded, cut evenly."""
    from deepspeed.utils.tensor_fragment import fragment_address

    shards, ep_rank = source.plan.spec.optimizer_shards, 0
    if group.of_experts:
        places_of_experts = expert_places(source.plan, tp_rank)
        ep_rank, shard = places_of_experts[shard]
        shards = len({place.expert_dp for place in places_of_experts})
    elif shard >= shards:  # at stage 0 what all ep ranks hold is in the first file only
        return _Run({kind: torch.zeros(0) for kind in (MASTER, *group.moments)}, OrderedDict(), 0)
    place = padded_shard(sum(module[name].numel() for name in group.names), shards, shard)
    flat = {kind: torch.zeros(place.numel) for kind in (MASTER, *group.moments)}
    places: OrderedDict[str, Any] = OrderedDict()
    offset = 0
    for name in group.names:
        begin, end = offset, offset + module[name].numel()
        offset = end
        start, stop = max(begin, place.start), min(end, place.stop)
        if start >= stop:
            continue
        places[name] = fragment_address(numel=stop - start, start=start - place.start)
        for kind, run in flat.items():
            if (tensor := source.local(name, kind, tp_rank, ep_rank)) is not None:
                run[start - place.start : stop - place.start] = tensor.reshape(-1)[start - begin : stop - begin]
    return _Run(flat, places, place.padding)


def _scaler(source: Source) -> tuple[Any, bool]:
    """The loss scaler that goes on with the run, and whether it moves."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    training = source.plan.spec.training
    dynamic = training.precision is Precision.FP16 and training.loss_scale == 0
    if dynamic and isinstance(source.loss_scaler, DynamicLossScaler):
        return source.loss_scaler, True
    options = DeepSpeedFP16Config(**ds_config(source.plan)["fp16"]).dynamic_loss_scale_args()
    dtype = TORCH_DTYPES[training.precision]
    return CreateLossScaler(dtype, training.loss_scale, dynamic, options), dynamic


def fresh_groups(plan: Plan) -> list[ParameterGroup]:
    """All parameters in the groups of a fresh optimizer, with the plan's settings."""
    optimizer, rows = plan.spec.training.optimizer, list(plan.parameters.expanded())
    fresh = fresh_optimizer([torch.zeros(1)], optimizer).state_dict()["param_groups"][0]
    scalars = {} if optimizer.type == "sgd" else {"step": torch.tensor(0.0)}
    names: dict[GroupKind, list[str]] = {}
    for name, row in rows:
        kind = group_kind(row, muon=optimizer.is_muon, no_weight_decay=optimizer.no_weight_decay)
        names.setdefault(kind, []).append(name)
    found = []
    # In the order of the engine's: what is decayed first, and of each Muon's matrices first.
    for kind in sorted(names, key=lambda one: (not one.is_decayed, not one.takes_muon)):
        settings = fresh if kind.is_decayed else {**fresh, "weight_decay": 0.0}
        own = {**settings, **muon_settings(optimizer)} if kind.takes_muon else settings
        found.append(ParameterGroup(names[kind], own, {} if kind.takes_muon else copy.deepcopy(scalars)))
    return found
