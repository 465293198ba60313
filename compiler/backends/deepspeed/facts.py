"""What DeepSpeed's keys mean for a plan: which of them it decides, which break it, and DeepSpeed's own defaults.

Writing a configuration, reading one and the rules all look here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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
        "data_parallel_size": "the plan's groups decide it",
        "mesh_param": "without the plan's groups ZeRO shards over dp only, and sequence ranks diverge",
        "elasticity": "elastic training was removed from DeepSpeed, and the plan's world size is fixed",
        "elastic_checkpoint": "its checkpoints cannot be converted to another layout",
        "pipeline": "the plan decides the stages",
    }
)
"""Keys that break a plan, and why."""

FORBIDDEN_ZERO: Mapping[str, str] = MappingProxyType(
    {
        "stage": "zero.stage decides it",
        "round_robin_gradients": "it writes wrong slice mappings, so that checkpoints cannot be converted",
        "elastic_checkpoint": "its checkpoints cannot be converted to another layout",
        "offload_param": "offload is not supported: the plan keeps the weights on the accelerator",
        "offload_optimizer": "offload is not supported: the plan keeps the optimizer state on the accelerator",
        "cpu_offload": "offload is not supported: the plan keeps the optimizer state on the accelerator",
        "cpu_offload_param": "offload is not supported: the plan keeps the weights on the accelerator",
        "zero_hpz_partition_size": "the plan's groups decide the shards",
        "zero_quantized_gradients": "it changes the numbers of every step",
        "mics_shard_size": "the plan's groups decide the shards",
    }
)
"""Keys of zero_optimization that break a plan, and why."""


def refusal(path: tuple[Any, ...]) -> str | None:
    """Why a key has no place in a spec's further DeepSpeed keys, whatever stands under it; None when it has one."""
    if path[0] == "zero_optimization":
        return FORBIDDEN_ZERO.get(path[1]) if len(path) > 1 else None
    if path[0] in DECIDED_BY:
        return f"{DECIDED_BY[path[0]]} decides it"
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
