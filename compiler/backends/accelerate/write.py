"""Configurations for accelerate, with FSDP2 or the plan's DeepSpeed configuration, and for transformers' own meshes.

Under DeepSpeed accelerate 1.15 knows data parallelism, ZeRO and Ulysses (`sp_size`), and no other axes. Meshes of
transformers 5.23 (`distributed/configuration_utils.py`) are (pp, dp_replicate, fsdp, tp) and (pp, dp_replicate, efsdp,
ep), outermost axis first.
"""

from __future__ import annotations

from typing import Any

import yaml

from parcompile.backends.artefacts import header, to_text
from parcompile.backends.deepspeed.write import ds_config
from parcompile.layout.sequence import CpImplementation
from parcompile.plan import Plan
from parcompile.spec import Precision

ACCELERATE_VERSION = "1.15.0"
"""Version of accelerate whose configuration classes were read."""


def files(plan: Plan) -> dict[str, Any]:
    """accelerate.yaml, and parallelism_config.json with the arguments of `ParallelismConfig`."""
    spec = plan.spec
    parallelism, precision = spec.parallelism, spec.training.precision
    gathers = parallelism.cp_implementation is CpImplementation.ALL_GATHER
    sizes = {
        "dp_replicate_size": 1,
        "dp_shard_size": parallelism.dp,
        "tp_size": parallelism.tp,
        "cp_size": parallelism.cp,
        "cp_backend": "torch",
    }
    strategy = "allgather" if gathers else "alltoall"
    tree = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "no" if precision is Precision.FP32 else precision.value,
        "num_machines": spec.cluster.nodes,
        "num_processes": plan.world_size,
        "rdzv_backend": "static" if spec.cluster.nodes == 1 else "c10d",
        "use_cpu": spec.cluster.accelerator == "cpu",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": spec.zero_stage == 3,
            "fsdp_activation_checkpointing": spec.training.activation_checkpointing == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": {
            **{f"parallelism_config_{name}": value for name, value in sizes.items()},
            "parallelism_config_cp_comm_strategy": strategy,
        },
    }
    lines = header(plan, "For `accelerate launch --config_file accelerate.yaml`: FSDP2 with tp and cp.")
    return {
        "accelerate.yaml": "\n".join(lines) + "\n" + yaml.safe_dump(tree, sort_keys=False),
        "parallelism_config.json": sizes,
    }


def files_with_deepspeed(plan: Plan) -> dict[str, Any]:
    """accelerate_deepspeed.yaml, and the DeepSpeed configuration that it names."""
    spec = plan.spec
    tree: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "num_machines": spec.cluster.nodes,
        "num_processes": plan.world_size,
        "rdzv_backend": "static" if spec.cluster.nodes == 1 else "c10d",
        "use_cpu": spec.cluster.accelerator == "cpu",
        # All else, the precision too, stands in that file: accelerate refuses a value in both places.
        "deepspeed_config": {
            "deepspeed_config_file": "ds_config.json",
            "zero3_init_flag": spec.zero_stage == 3,
        },
    }
    if spec.parallelism.cp > 1:
        tree["parallelism_config"] = {
            "parallelism_config_sp_size": spec.parallelism.cp,
            "parallelism_config_sp_backend": "deepspeed",
            "parallelism_config_sp_seq_length_is_variable": False,
            "parallelism_config_sp_seq_length": spec.training.sequence_length,
        }
    lines = header(plan, "For `accelerate launch --config_file accelerate_deepspeed.yaml`, beside ds_config.json.")
    return {
        "accelerate_deepspeed.yaml": "\n".join(lines) + "\n" + yaml.safe_dump(tree, sort_keys=False),
        "ds_config.json": to_text(ds_config(plan)),
    }


TRANSFORMERS_VERSION = "5.23.0"
"""Version of transformers whose configuration class was read."""


def distributed_files(plan: Plan) -> dict[str, Any]:
    """distributed_config.json: `DistributedConfig.from_dict` takes it."""
    parallelism = plan.spec.parallelism
    shards = plan.spec.zero_stage == 3
    return {
        "distributed_config.json": {
            "tp_size": parallelism.tp,
            "pp_size": parallelism.pp,
            "ep_size": parallelism.ep,
            "fsdp_size": parallelism.dp,
            "dp_replicate_size": 1,
            **({"ep_implementation": "all_to_all"} if parallelism.ep > 1 else {}),
            **({} if shards else {"fsdp_mixed_precision": False}),
        }
    }
