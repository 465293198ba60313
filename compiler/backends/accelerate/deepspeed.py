"""accelerate_deepspeed.yaml: a configuration for `accelerate launch` with the plan's DeepSpeed configuration.

Source: accelerate 1.15. Under DeepSpeed it knows data parallelism, ZeRO and Ulysses (`sp_size`), and no other axes.
"""

from __future__ import annotations

from typing import Any

import yaml

from parcompile.backends.artefacts import Loss, header, to_text
from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.deepspeed.write import losses as deepspeed_losses
from parcompile.layout.groups import Axis
from parcompile.layout.sequence import CpImplementation
from parcompile.plan import Plan

FOLDER = "accelerate"


def files(plan: Plan) -> dict[str, Any]:
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


def losses(plan: Plan) -> list[Loss]:
    """What accelerate does not do under DeepSpeed as the plan says."""
    spec, parallelism = plan.spec, plan.spec.parallelism
    found = [
        Loss(
            f"{axis} {getattr(parallelism, axis)}",
            f"accelerate has no {axis} under DeepSpeed",
            f"compile with {axis} 1",
            fatal=True,
        )
        for axis in (Axis.TP, Axis.PP, Axis.EP)
        if getattr(parallelism, axis) > 1
    ]
    if parallelism.cp > 1 and parallelism.cp_implementation is not CpImplementation.ULYSSES:
        found.append(
            Loss(
                f"cp_implementation {parallelism.cp_implementation.value}",
                "under DeepSpeed accelerate splits sequences by Ulysses alone",
                "compile with cp_implementation ulysses",
                fatal=True,
            )
        )
    elif parallelism.cp > 1:
        found.append(
            Loss(
                f"cp_layout {parallelism.cp_layout.value}",
                "DeepSpeed's Ulysses deals sequences out in whole blocks",
                "contiguous is used; the numbers are the same",
            )
        )
    if spec.training.activation_checkpointing != "none":
        found.append(
            Loss(
                f"activation_checkpointing {spec.training.activation_checkpointing}",
                "the script switches it on",
                "call model.gradient_checkpointing_enable()",
            )
        )
    return found + deepspeed_losses(plan)
