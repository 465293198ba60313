"""Optimizer states of ZeRO stage 0 in checkpoints: DeepSpeed would put them, without most experts, beside the weights.

They lie in files like those of ZeRO-1: what all ranks hold in the first, the experts of each ep rank in its own.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

from parcompile.backends.deepspeed.write import ds_config
from parcompile.layout.groups import EXPERT_DP, Axis
from parcompile.runtime.deepspeed_patches.norm import EXPERT_KEYS
from parcompile.runtime.groups import Mesh
from parcompile.spec import Precision

from .deepspeed_files import shard_file


def file_to_write(mesh: Mesh) -> str | None:
    """The file of states that this rank writes; None: it writes none."""
    if mesh.plan.spec.zero_stage:
        return None
    is_dealt = mesh.parallel_group(Axis.EP) is not None
    if mesh.index(EXPERT_DP) if is_dealt else mesh.index("dp-cp"):
        return None
    bf16 = mesh.plan.spec.training.precision is Precision.BF16
    return shard_file(mesh.index(Axis.EP) if is_dealt else 0, mesh.index("tp-pp"), bf16=bf16)


def content(engine: Any) -> dict[str, Any]:
    """What such a file holds."""
    mesh: Mesh = engine.mesh
    states = engine.optimizer.state_dict()
    if mesh.parallel_group(Axis.EP) is not None and mesh.index(Axis.EP):
        base = states["base_optimizer_state"]
        for number, group in enumerate(base["param_groups"]):
            if not any(key in group for key in EXPERT_KEYS):
                base["state"].pop(number, None)
                states["single_partition_of_fp32_groups"][number] = torch.zeros(0)
                states["param_slice_mappings"][number].clear()
    return {"optimizer_state_dict": states, "ds_config": ds_config(mesh.plan), "ds_version": deepspeed.__version__}
