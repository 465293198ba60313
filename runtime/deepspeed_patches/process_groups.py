"""Process groups of DeepSpeed: where it keeps them, and where the plan's are put."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def forbid_jit_builds() -> None:
    """Keeps DeepSpeed from compiling its shared-memory op at start-up: a minute, or an error without a compiler."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def forget_groups() -> None:
    """Lets DeepSpeed begin anew in this process, with other process groups."""
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups.mpu = None
    groups._WORLD_GROUP = None
    for table in expert_tables():
        table.clear()


def expert_tables() -> tuple[dict[str, Any], ...]:
    """Of ep and of expert-dp: the groups by name, and their ranks."""
    from deepspeed.utils import groups

    return (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    )


def expert_name(ep: int) -> str:
    """DeepSpeed reads the size out of the name."""
    return f"ep_size_{ep}"


def register_expert_groups(ep: dist.ProcessGroup, expert_dp: dist.ProcessGroup) -> None:
    """Puts this rank's groups of experts where DeepSpeed looks for them."""
    name, ranks = expert_name(dist.get_world_size(ep)), dist.get_process_group_ranks
    for table, entry in zip(expert_tables(), (ep, ranks(ep), expert_dp, ranks(expert_dp)), strict=True):
        table[name] = entry
