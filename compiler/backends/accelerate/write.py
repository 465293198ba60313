"""accelerate.yaml: a configuration for `accelerate launch` with FSDP2 and a `ParallelismConfig`."""

from __future__ import annotations

from typing import Any

import yaml

from parcompile.backends.artefacts import Loss, header, order_loss
from parcompile.layout.sequence import CpImplementation, CpLayout
from parcompile.plan import Plan
from parcompile.spec import Precision

ACCELERATE_VERSION = "1.15.0"
"""Version of accelerate whose configuration classes were read."""

_ORDERS = (("tp", "cp", "dp"),)


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


def losses(plan: Plan) -> list[Loss]:
    """What accelerate does not do as the plan says."""
    spec, parallelism = plan.spec, plan.spec.parallelism
    found: list[Loss] = []
    for axis in ("pp", "ep"):
        size = getattr(parallelism, axis)
        if size > 1:
            found.append(
                Loss(f"{axis} {size}", f"ParallelismConfig has no {axis}", f"compile with {axis} 1", fatal=True)
            )
    if parallelism.pp == 1:
        found += order_loss(parallelism, "accelerate", _ORDERS)
    if parallelism.cp > 1 and parallelism.cp_layout is not CpLayout.ZIGZAG:
        layout = parallelism.cp_layout.value
        found.append(Loss(f"cp_layout {layout}", "torch deals sequences out in zigzag", "zigzag is used"))
    if parallelism.cp_implementation not in (CpImplementation.RING, CpImplementation.ALL_GATHER):
        found.append(
            Loss(
                f"cp_implementation {parallelism.cp_implementation.value}",
                "cp_comm_strategy is alltoall (a ring) or allgather",
                "alltoall is used",
            )
        )
    if parallelism.sequence_parallel:
        found.append(Loss("sequence_parallel", "the model's own tp plan sets it", "what transformers does"))
    if spec.zero_stage in (0, 1):
        found.append(
            Loss(
                f"zero.stage {spec.zero_stage}",
                "FSDP2 shards gradients and weights as well (fsdp_reshard_after_forward false: like stage 2)",
                "less memory, more communication; the numbers of a step are the same up to the order of sums",
            )
        )
    if spec.training.router is not None:
        why = "Trainer adds the balancing loss of a model's own output_router_logits and router_aux_loss_coef alone"
        found.append(Loss(f"router {', '.join(spec.training.router.said)}", why, "scope micro_batch is set there"))
    if spec.training.activation_checkpointing == "selective":
        found.append(Loss("activation_checkpointing selective", "FSDP2 checkpoints whole layers or none", "none"))
    if parallelism.cp > 1 and parallelism.cp_implementation is not CpImplementation.ALL_GATHER:
        why = "ParallelismConfig takes it in a cp_handler: TorchContextParallelConfig(cp_comm_strategy='alltoall')"
        name = f"cp_implementation {parallelism.cp_implementation.value} in parallelism_config.json"
        found.append(Loss(name, why, "add that cp_handler, or it gathers"))
    found.append(Loss("batch, optimizer and clipping", "they are the script's", "take them from plan.json"))
    return found
