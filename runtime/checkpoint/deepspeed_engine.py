"""What DeepSpeed's engine saves and loads through, and states that it would write otherwise than other layouts read.

DeepSpeed's engine names files and leaves them to a checkpoint engine (`deepspeed.runtime.checkpoint_engine`, 0.19.8).
Its own unpickles whatever a glob finds, and raises on one rank while the others wait for it.

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
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from parcompile.layout.groups import EXPERT_DP, Axis
from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.norm import EXPERT_KEYS
from parcompile.runtime.deepspeed_patches.optimizer_state import (
    gathered,
    groups_of_shards,
    master_shards,
    parameter_groups,
    place_in_shard,
)
from parcompile.runtime.errors import RunError
from parcompile.runtime.expert_parallel import is_dealt
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.pretrained import persistent_of
from parcompile.spec import Precision

from . import writing
from .manifest import Note
from .reading import load_trusted
from .state_file import StateFile, shard_file, weights_file
from .writing import with_experts


class _Engine(CheckpointEngine):  # type: ignore[misc]
    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def commit(self, info: CheckpointCommitInfo) -> bool:  # noqa: ARG002 -- DeepSpeed's
        return True

    def save(self, state_dict: Any, path: str) -> None:  # noqa: ARG002 -- DeepSpeed's
        raise RunError(f"DeepSpeed would write {path} while a checkpoint is loaded")

    def load(self, path: str, map_location: Any = None) -> Any:  # noqa: ARG002 -- DeepSpeed's
        raise RunError(f"DeepSpeed would load {path} while a checkpoint is saved")


class Writer(_Engine):
    """Takes what is to be saved, into files that `finish` brings to the disk.

    Args:
        folder: where the files will lie.
        memories: host memory for the content of each file by its name, used again by the next save. None: contents go
            to the disk at once.
    """

    def __init__(self, folder: Path, memories: dict[str, bytearray] | None) -> None:
        super().__init__()
        self._folder, self._memories = folder, memories
        self._files: list[StateFile] = []
        self._error: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """An error waits for `finish`: other ranks are on their way to a collective."""
        name = Path(path).name
        memory = None if self._memories is None else self._memories.setdefault(name, bytearray())
        file = StateFile(self._folder / name, memory)
        self._files.append(file)
        try:
            file.put(state_dict)
        except Exception as error:  # what cannot be pickled raises what it likes
            self._error = self._error or error

    def finish(self) -> dict[str, tuple[int, str]]:
        """Size in bytes and SHA-256 of each file, which is on the disk then.

        Raises:
            RunError: something cannot be pickled.
            OSError: something cannot be written.
        """
        try:
            if self._error is not None:
                raise RunError(f"the state cannot be saved: {type(self._error).__name__}: {self._error}")
            return {file.path.name: file.finish() for file in self._files}
        finally:
            for file in self._files:
                file.close()


class Reader(_Engine):
    """Opens the files of a note, whose contents have been compared, and no other; what they hold is data alone.

    Args:
        note: of the checkpoint.
        experts: files of experts by the file of weights that they are read with. DeepSpeed opens files of other ranks,
            too, to look at them; these are read as they are.
    """

    def __init__(self, note: Note, experts: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__()
        self._note, self._experts = note, experts

    def load(self, path: str, map_location: Any = None) -> Any:  # noqa: ARG002 -- DeepSpeed's
        """The content of a file, mapped.

        Raises:
            RunError: the file is not of the checkpoint, or is not what it was.
        """
        name = Path(path).name
        if name not in self._note.files or Path(path).parent.resolve() != self._note.folder.resolve():
            raise RunError(f"{path} is not of the checkpoint {self._note.folder}: not loaded")
        content = load_trusted(self._note.folder / name)
        if name not in self._experts:
            return content
        return with_experts(content, load_trusted(self._note.folder / self._experts[name]))


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
    return {"optimizer_state_dict": states, **writing.versions(mesh.plan)}


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
    experts_file = writing.experts_to_write(mesh)
    module: OrderedDict[str, Tensor] = OrderedDict()
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with gathered(parameter):
            if not mesh.index("dp-cp") or (experts_file is not None and is_dealt(parameter)):
                module[name] = parameter.detach().cpu().clone()
    if mesh.index("dp-cp"):
        return {} if experts_file is None else {experts_file: {writing.MODULE: dict(module)}}
    buffers = persistent_of(engine.module)
    module.update({name: buffer.detach().cpu() for name, buffer in buffers.items()})
    schedule = engine.lr_scheduler
    found = {
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": None,
        "lr_scheduler": None if schedule is None else schedule.state_dict(),
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "dp_world_size": mesh.size("dp-cp"),
        "mp_world_size": mesh.size("tp-pp"),
        **writing.versions(mesh.plan),
        **client_state,
    }
    return {weights_file(mesh.index("tp-pp")): found}
