"""Whether the installed DeepSpeed has every name that the runtime changes or reads, before anything is built."""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import Any

from parcompile.runtime.errors import RunError

VERSIONS = "deepspeed>=0.19.8,<0.20"

NAMES = {
    "ops": ("__compatible_ops__",),
    "comm.comm": ("cdb",),
    "utils.groups": (
        *("mpu", "_WORLD_GROUP", "_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS"),
        *("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS"),
    ),
    "moe.layer": ("MoE",),
    "runtime.constants": ("FP16",),
    "runtime.utils": (*("bwc_tensor_model_parallel_rank", "combine_grad_norm_groups", "is_model_parallel_parameter"),),
    "runtime.base_optimizer": ("ZeROOptimizer",),
    "utils.mixed_precision_linkage": ("link_hp_params",),
    "runtime.engine.DeepSpeedEngine": (
        *("_do_optimizer_sanity_check", "_configure_fp16_optimizer", "clip_fp32_gradients", "zero_grad"),
        *("has_moe_layers", "checkpoint_engine", "_copy_recovery_script", "coalesce_grad_reduction"),
        *("set_gradient_accumulation_boundary", "is_gradient_accumulation_boundary", "enable_backward_allreduce"),
        *("allreduce_gradients", "micro_steps", "global_steps", "global_samples", "skipped_steps", "mpu"),
    ),
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (
        *("scaled_global_norm", "get_grad_norm_direct", "_zero_padding", "params_in_partition", "averaged_gradients"),
        *("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups", "round_robin_bit16_meta"),
        *("partition_gradients", "overlap_comm", "use_grad_accum_attribute", "grad_accum", "all_grad_tensors"),
        *("ipg_buckets", "ds_pipe_replicated"),
    ),
    "runtime.bf16_optimizer.BF16_Optimizer": (
        *("get_grads_for_norm", "bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"),
        *("fp32_groups_gradients", "fp32_groups_has_gradients", "fp32_groups_gradients_flat"),
    ),
    "runtime.zero.stage3": ("defragment",),
    "runtime.zero.linear": ("get_accelerator",),
    "runtime.zero.partitioned_param_coordinator": ("assert_ints_same_as_other_ranks",),
    "runtime.zero.partition_parameters.Init": (
        *("_convert_to_zero_parameters", "ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_process_group"),
        "ds_zero_partition_rank",
    ),
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (
        *("fp16_groups", "fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat", "sub_group_to_group_id"),
        *("_grad_norm_counts_every_rank", "_autoep_expert_parallel_group"),
        *("_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads", "ds_zero_placement_family"),
        "ds_zero_partition_group_name",
    ),
}
"""By module or class of DeepSpeed. What is an instance's is found among the names that the methods use."""


def check_names() -> None:
    """Refuse a DeepSpeed that lacks any of them.

    Raises:
        RunError: with the names, on every rank: all have one version.
    """
    if names := missing():
        from deepspeed import __version__

        message = f"DeepSpeed {__version__} has no {', '.join(names)}, on which the runtime relies"
        raise RunError(f'{message}: install "{VERSIONS}"', everywhere=True)


def missing() -> list[str]:
    """The names that are not there, as `module.name`."""
    return [f"{place}.{name}" for place, names in NAMES.items() for name in _without(f"deepspeed.{place}", names)]


def _without(place: str, names: tuple[str, ...]) -> list[str]:
    try:
        found = _load(place)
    except (ImportError, AttributeError):
        return list(names)
    used = _used(found) if isinstance(found, type) else set()
    return [name for name in names if not hasattr(found, name) and name not in used]


def _load(place: str) -> Any:
    module, _, last = place.rpartition(".")
    return getattr(import_module(module), last) if last[0].isupper() else import_module(place)


def _used(of: type) -> set[str]:
    """Attributes and texts in the methods of a class."""
    codes = [one.__code__ for one in vars(of).values() if isinstance(one, FunctionType)]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found |= {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
        codes += [one for one in code.co_consts if hasattr(one, "co_names")]
    return found
