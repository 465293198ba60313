"""What DeepSpeed's keys mean for a plan, at which ZeRO stages each is read, and how gradients are averaged.

Writing a configuration, reading one and the rules all look here.

At which ZeRO stages DeepSpeed reads a key of zero_optimization; rules of specs and of files ask here.

`tests/compiler/test_zero_stages.py` reads the same from the code of the installed DeepSpeed.

How DeepSpeed averages gradients, and when it refuses to or does not; rules of specs and of files ask here.

Read in runtime/zero/stage_1_and_2.py and stage3.py, and run: with a factor f each rank divides by f before the
reduction and by (ranks / f) after it. Stage 1 with reduce_scatter divides by the ranks at once, whatever f is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# What DeepSpeed's keys mean for a plan: which of them it decides, which break it, and DeepSpeed's own defaults.

VERSION = "0.19.8"
"""DeepSpeed's version whose configuration was read and is tested."""

DECIDED_BY: Mapping[str, str] = MappingProxyType(
    {
        "train_batch_size": "training.global_batch_size",
        "train_micro_batch_size_per_gpu": "training.micro_batch_size",
        "gradient_accumulation_steps": "training.gradient_accumulation_steps",
        "optimizer": "training.optimizer",
        "gradient_clipping": "training.gradient_clipping",
        "bf16": "training.precision",
        "bfloat16": "training.precision",
        "fp16": "training.precision",
        "amp": "training.precision",
        "torch_autocast": "training.precision",
        "data_types": "training.gradient_accumulation_dtype",
    }
)
"""Keys that the plan writes itself, and where the spec says so."""

FORBIDDEN: Mapping[str, str] = MappingProxyType(
    {
        "tensor_parallel": "AutoTP installs its own groups and discards the plan's",
        "sequence_parallel_size": "without the plan's groups ZeRO shards over dp only, and sequence ranks diverge",
        "data_parallel_size": "the plan's groups set it",
        "mesh_param": "without the plan's groups ZeRO shards over dp only, and sequence ranks diverge",
        "elasticity": "elastic training was removed from DeepSpeed, and the plan's world size is fixed",
        "elastic_checkpoint": "its checkpoints cannot be converted to another layout",
        "pipeline": "the plan decides the stages",
    }
)
"""Keys that break a plan, and why."""

FORBIDDEN_ZERO: Mapping[str, str] = MappingProxyType(
    {
        "stage": "zero.stage sets it",
        "round_robin_gradients": "it writes wrong slice mappings, so that checkpoints cannot be converted",
        "elastic_checkpoint": "its checkpoints cannot be converted to another layout",
        "offload_param": "weights cannot be on the host: stage 3 shards them on the accelerators",
        "offload_optimizer": "zero.offload_optimizer sets it",
        "cpu_offload": "zero.offload_optimizer sets it",
        "cpu_offload_param": "weights cannot be on the host: stage 3 shards them on the accelerators",
        "zero_hpz_partition_size": "the plan's groups decide the shards",
        "mics_shard_size": "the plan's groups decide the shards",
        "mics_hierarchical_params_gather": "the plan's groups decide the shards",
        "zero_quantized_weights": "it changes the numbers of every step",
        "zero_quantized_nontrainable_weights": "it changes the numbers of every step",
        "zero_quantized_gradients": "it changes the numbers of every step",
        "zeropp_loco_param": "it changes the numbers of every step",
        "zenflow": "it changes the numbers of every step",
        "model_persistence_threshold": "stage3_param_persistence_threshold decides which weights stay gathered",
        "stage3_model_persistence_threshold": "stage3_param_persistence_threshold decides which weights stay gathered",
        **dict.fromkeys(
            ("module_granularity_threshold", "stage3_module_granularity_threshold", "leaf_module"),
            "the plan gathers weights of one module at a time; with larger units DeepSpeed stops on CPU ranks",
        ),
    }
)
"""Keys of zero_optimization that break a plan, and why."""


NO_NVME = "states on a drive go with stage 3 alone and a build of async_io, and checkpoints would lack them"
"""Why a plan keeps no optimizer state on NVMe."""


def refusal(path: tuple[Any, ...]) -> str | None:
    """Why a key has no place in a spec's further DeepSpeed keys, whatever stands under it; None when it has one."""
    if path[0] == "zero_optimization":
        if path[1:2] == ("offload_optimizer",) and path[2:] and path[2] not in ("device", "pin_memory"):
            return "of the optimizer on the host a plan says its device and pin_memory"
        return FORBIDDEN_ZERO.get(path[1]) if len(path) > 1 else None
    if path[0] in DECIDED_BY:
        return f"{DECIDED_BY[path[0]]} sets it"
    return FORBIDDEN.get(path[0])


DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "gradient_clipping": 1.0,
        "zero_optimization.stage": 0,
        "fp16.loss_scale": 0,
    }
)
"""DeepSpeed's own values for what a configuration leaves out and a spec says (runtime/config.py)."""

ADAM: Mapping[str, Any] = MappingProxyType({"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0})
"""Defaults of ops/adam/fused_adam.py, ops/adam/cpu_adam.py and torch.optim.Adam."""
TORCH_ADAMW: Mapping[str, Any] = MappingProxyType({**ADAM, "weight_decay": 0.01})
"""Those of torch.optim.AdamW, which "torch_adam": true brings."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "muon": {"momentum": 0.95, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0},
        "sgd": {"lr": 1e-3, "momentum": 0, "nesterov": False, "weight_decay": 0},
        "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0},
    }
)
"""Of runtime/zero/muon/original_muon.py, torch.optim.SGD and torch.optim.Adagrad. Muon has two rates, and neither for
both."""
OFF: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("amsgrad", "maximize", "per_head_muon"), False),
        **dict.fromkeys(("dampening", "lr_decay", "initial_accumulator_value"), 0),
    }
)
"""Settings of optimizers that a spec has no word for, with the value that switches each off: also the default."""
SAME_NUMBERS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that choose between implementations."""

SCHEDULERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
        "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"},
        "WarmupCosineLR": {
            "warmup_min_ratio": 0.0,
            "cos_min_ratio": 1e-4,
            "warmup_num_steps": 1000,
            "warmup_type": "log",
        },
    }
)
"""Defaults of the schedules that a spec can say (runtime/lr_schedules.py)."""
SCHEDULE_TYPES: Mapping[str, str] = MappingProxyType(
    {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
)
"""What a spec calls them."""


# At which ZeRO stages DeepSpeed reads a key of zero_optimization; rules of specs and of files ask here.

_STAGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "offload_param",
                "sub_group_size",
                "param_persistence_threshold",
                "model_persistence_threshold",
                "max_live_parameters",
                "max_reuse_distance",
                "prefetch_bucket_size",
                "gather_16bit_weights_on_model_save",
                "module_granularity_threshold",
                "use_all_reduce_for_fetch_params",
                "allgather_sequential",
                "memory_efficient_linear",
                "pipeline_loading_checkpoint",
                "override_module_apply",
                "log_trace_cache_warnings",
                "enable_sanity_checks",
                "save_muon_momentum_buffer_in_memory",
                "zero_hpz_partition_size",
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_gradients",
                "zeropp_loco_param",
                "mics_shard_size",
                "mics_hierarchical_params_gather",
                "leaf_module",
            ),
            (3, 3),
        ),
        **dict.fromkeys(
            (
                "offload_optimizer",
                "contiguous_gradients",
                "reduce_scatter",
                "reduce_bucket_size",
                "overlap_comm",
                "load_from_fp32_weights",
                "elastic_checkpoint",
                "legacy_stage1",
            ),
            (1, 3),
        ),
        **dict.fromkeys(
            (
                "round_robin_gradients",
                "use_multi_rank_bucket_allreduce",
                "ignore_unused_parameters",
                "parameter_alignment",
                "allgather_bucket_size",
                "compute_grad_norm",
            ),
            (1, 2),
        ),
    }
)
"""First and last stage at which DeepSpeed 0.19.8 reads a key (runtime/engine.py, runtime/zero)."""

UNREAD = frozenset({"allgather_partitions"})
"""What DeepSpeed 0.19.8 takes and reads at no stage."""

OWN_CHECKPOINTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "gather_16bit_weights_on_model_save",
                "stage3_gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
            ),
            "the runtime's save_16bit_model gathers the weights always",
        ),
        **dict.fromkeys(
            ("pipeline_loading_checkpoint", "load_from_fp32_weights"),
            "the runtime, not DeepSpeed, reads the checkpoints of this stage",
        ),
    }
)
"""Keys of stage 3 that DeepSpeed reads where the runtime saves and loads in its place, and what the runtime does."""

MEMORY = frozenset({"offload_param", "offload_optimizer", "zero_hpz_partition_size", "zero_quantized_weights"})
"""Keys whose users count on what they save."""


def first_stage(key: str) -> int:
    """The first stage at which a key has an effect; 0 when it always has."""
    return _range(key)[0]


def last_stage(key: str) -> int:
    """The last one, mostly 3."""
    return _range(key)[1]


def has_effect(key: str, stage: int) -> bool:
    """Whether DeepSpeed reads a key at a stage."""
    return key not in UNREAD and first_stage(key) <= stage <= last_stage(key)


def _range(key: str) -> tuple[int, int]:
    return (3, 3) if key.startswith("stage3_") else _STAGES.get(key, (0, 3))


def reach(key: str) -> str:
    """The stages at which a key has an effect, as "from stage 3 on" or "at stages 1 and 2"."""
    if key in UNREAD:
        return "at no stage"
    first, last = _range(key)
    return f"at stages {first} and {last}" if last < 3 and first else f"from stage {first} on"


# How DeepSpeed averages gradients, and when it refuses to or does not; rules of specs and of files ask here.


def refused_scaling(stage: int, *, reduce_scatter: bool, prescale: bool, predivide: float) -> str | None:
    """Why DeepSpeed does not start; None when it does."""
    if stage < 2 or not reduce_scatter:
        return None
    if predivide != 1:
        return f"gradient_predivide_factor {predivide:g} needs reduce_scatter false at stage {stage}"
    return f"prescale_gradients needs reduce_scatter false at stage {stage}" if prescale else None


def wrong_scale(
    stage: int, *, reduce_scatter: bool, prescale: bool, predivide: float, ranks: int, cp: int = 1
) -> str | None:
    """By how much gradients come out wrong on `ranks` ranks (dp · cp); None when they are right."""
    if prescale or predivide == 1 or predivide != ranks:
        return None
    if stage == 3 and not reduce_scatter:
        return f"{predivide:g} times too small: a factor equal to the number of ranks is not multiplied back at stage 3"
    if cp > 1 and stage in (1, 2) and not reduce_scatter:
        return f"{cp} times too small: with a factor equal to dp · cp = {ranks}, the sum over cp is left out"
    return None
