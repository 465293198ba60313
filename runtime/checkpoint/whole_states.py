"""States in checkpoints that DeepSpeed would write otherwise than other layouts read them: those of stages 0 and 3.

At ZeRO stage 0 DeepSpeed would put optimizer states, without most experts, beside the weights. They lie in files like
those of ZeRO-1: what all ranks hold in the first, the experts of each ep rank in its own.

At stage 3 DeepSpeed's files hold the shards of weights without their names and shapes. Here they are those of other
stages: the weights of a model-parallel rank in one file, and of each rank the shards of fp32 weights and optimizer
states, with the elements of each parameter that lie there. The rank that writes weights holds them on its host.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from parcompile.backends.deepspeed.write import ds_config
from parcompile.layout.groups import EXPERT_DP, Axis
from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.norm import EXPERT_KEYS
from parcompile.runtime.deepspeed_patches.optimizer_state import (
    groups_of_shards,
    master_shards,
    parameter_groups,
    place_in_shard,
)
from parcompile.runtime.deepspeed_patches.sharded_weights import gathered
from parcompile.runtime.expert_parallel import is_dealt
from parcompile.runtime.groups import Mesh
from parcompile.spec import Precision

from . import expert_weights
from .deepspeed_files import shard_file, weights_file


def deepspeed_writes(plan: Plan) -> bool:
    """Whether DeepSpeed itself writes and reads all states: those of stages 1 and 2."""
    return plan.spec.zero_stage in (1, 2)


def file_to_write(mesh: Mesh) -> str | None:
    """The file of optimizer states that this rank writes; None: it writes none."""
    if deepspeed_writes(mesh.plan):
        return None
    bf16 = mesh.plan.spec.training.precision is Precision.BF16
    if mesh.plan.spec.shards_weights:
        return shard_file(mesh.index("dp-cp"), mesh.index("tp-pp"), bf16=bf16)
    dealt = mesh.parallel_group(Axis.EP) is not None
    if mesh.index(EXPERT_DP) if dealt else mesh.index("dp-cp"):
        return None
    return shard_file(mesh.index(Axis.EP) if dealt else 0, mesh.index("tp-pp"), bf16=bf16)


def content(engine: Any) -> dict[str, Any]:
    """What such a file holds."""
    mesh: Mesh = engine.mesh
    states = _of_shards(engine) if mesh.plan.spec.shards_weights else engine.optimizer.state_dict()
    if not mesh.plan.spec.zero_stage and mesh.parallel_group(Axis.EP) is not None and mesh.index(Axis.EP):
        base = states["base_optimizer_state"]
        for number, group in enumerate(base["param_groups"]):
            if not any(key in group for key in EXPERT_KEYS):
                base["state"].pop(number, None)
                states["single_partition_of_fp32_groups"][number] = torch.zeros(0)
                states["param_slice_mappings"][number].clear()
    return {"optimizer_state_dict": states, "ds_config": ds_config(mesh.plan), "ds_version": deepspeed.__version__}


def _of_shards(engine: Any) -> dict[str, Any]:
    """As ZeRO-1's, of this rank's shards: sub-groups of one group of parameters lie behind each other."""
    optimizer, names = engine.optimizer, {one: name for name, one in engine.module.named_parameters()}
    shards, numbers = master_shards(optimizer), groups_of_shards(optimizer)
    states, masters, places = {}, [], []
    for number, found in itertools.groupby(range(len(shards)), key=numbers.__getitem__):
        members, offset = list(found), 0
        mapping: OrderedDict[str, Any] = OrderedDict()
        for member in members:
            for parameter in parameter_groups(optimizer)[member]:
                if (place := place_in_shard(parameter)) is not None:
                    first, stop = place.of_shard.start, place.of_shard.stop
                    mapping[names[parameter]] = fragment_address(numel=stop - first, start=offset + first)
            offset += shards[member].numel()
        kept = [optimizer.optimizer.state.get(shards[member], {}) for member in members]
        states[number] = {
            kind: torch.cat([one[kind] for one in kept]) if isinstance(value, Tensor) and value.dim() else value
            for kind, value in kept[0].items()
        }
        masters.append(torch.cat([shards[member].detach() for member in members]))
        places.append(mapping)
    settings = [{**group, "params": [number]} for number, group in enumerate(optimizer.optimizer.param_groups)]
    return {
        "loss_scaler": optimizer.loss_scaler,
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        "clip_grad": optimizer.clip_grad,
        "base_optimizer_state": {"state": states, "param_groups": settings},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": ZeroStageEnum.weights,
        "group_paddings": [0] * len(masters),
        "partition_count": [engine.mesh.size(EXPERT_DP if "moe" in group else "dp-cp") for group in settings],
        "ds_version": deepspeed.__version__,
        "param_slice_mappings": places,
    }


def gathered_weights(engine: Any, client_state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """At stage 3, the files of weights that this rank writes, and their contents. Every rank calls it."""
    mesh: Mesh = engine.mesh
    experts_file = expert_weights.file_to_write(mesh)
    module: OrderedDict[str, Tensor] = OrderedDict()
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with gathered(parameter):
            if not mesh.index("dp-cp") or (experts_file is not None and is_dealt(parameter)):
                module[name] = parameter.detach().cpu().clone()
    if mesh.index("dp-cp"):
        return {} if experts_file is None else {experts_file: {expert_weights.MODULE: dict(module)}}
    buffers = [
        f"{path}.{name}" if path else name
        for path, one in engine.module.named_modules()
        for name, _ in one.named_buffers(recurse=False)
        if name not in one._non_persistent_buffers_set
    ]
    own = dict(engine.module.named_buffers(remove_duplicate=False))
    module.update({name: own[name].detach().cpu() for name in buffers})
    schedule = engine.lr_scheduler
    found = {
        "module": module,
        "buffer_names": buffers,
        "optimizer": None,
        "lr_scheduler": None if schedule is None else schedule.state_dict(),
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "dp_world_size": mesh.size("dp-cp"),
        "mp_world_size": mesh.size("tp-pp"),
        "ds_config": ds_config(mesh.plan),
        "ds_version": deepspeed.__version__,
        **client_state,
    }
    return {weights_file(mesh.index("tp-pp")): found}
