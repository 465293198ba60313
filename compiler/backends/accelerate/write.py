"""Configurations for accelerate, with FSDP2 or the plan's DeepSpeed configuration, and for transformers' own meshes.

Under DeepSpeed accelerate 1.15 knows data parallelism, ZeRO and Ulysses (`sp_size`), and no other axes. Meshes of
transformers 5.23 (`distributed/configuration_utils.py`) are (pp, dp_replicate, fsdp, tp) and (pp, dp_replicate, efsdp,
ep), outermost axis first. What stands in the files is in `files.json`.
"""

from __future__ import annotations

from typing import Any

from parcompile.backends.artefacts import file_tree, to_text, yaml_file
from parcompile.backends.deepspeed.write import ds_config
from parcompile.plan import Plan

VERSION = "1.15.0"
"""Version of accelerate whose configuration classes were read."""
TRANSFORMERS_VERSION = "5.23.0"
"""Version of transformers whose configuration class was read."""


def files(plan: Plan) -> dict[str, Any]:
    """accelerate.yaml, and parallelism_config.json with the arguments of `ParallelismConfig`."""
    about = "For `accelerate launch --config_file accelerate.yaml`: FSDP2 with tp and cp."
    return {
        "accelerate.yaml": yaml_file(plan, about, file_tree("accelerate", plan)),
        "parallelism_config.json": file_tree("parallelism_config", plan),
    }


def files_with_deepspeed(plan: Plan) -> dict[str, Any]:
    """accelerate_deepspeed.yaml, and the DeepSpeed configuration that it names.

    All else, the precision too, stands in that configuration: accelerate refuses a value in both places.
    """
    about = "For `accelerate launch --config_file accelerate_deepspeed.yaml`, beside ds_config.json."
    return {
        "accelerate_deepspeed.yaml": yaml_file(plan, about, file_tree("accelerate_deepspeed", plan)),
        "ds_config.json": to_text(ds_config(plan)),
    }


def distributed_files(plan: Plan) -> dict[str, Any]:
    """distributed_config.json: `DistributedConfig.from_dict` takes it."""
    return {"distributed_config.json": file_tree("distributed_config", plan)}
