"""Configurations for accelerate, with FSDP2 or the plan's DeepSpeed configuration, and for transformers' own meshes.

Under DeepSpeed accelerate 1.15 knows data parallelism, ZeRO and Ulysses (`sp_size`), and no other axes. Meshes of
transformers 5.23 (`distributed/configuration_utils.py`) are (pp, dp_replicate, fsdp, tp) and (pp, dp_replicate, efsdp,
ep), outermost axis first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from parcompile.backends.artefacts import (
    Loss,
    decay_schedule_losses,
    header,
    memory_losses,
    order_loss,
    rampup_losses,
    to_text,
)
from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.deepspeed.write import losses as deepspeed_losses
from parcompile.layout.groups import Axis
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


def losses(plan: Plan) -> Iterator[Loss]:
    """What accelerate does not do as the plan says."""
    spec, parallelism = plan.spec, plan.spec.parallelism
    yield from memory_losses(spec, "offloading of FSDP moves the weights, too")
    for axis in (Axis.PP, Axis.EP):
        if (size := parallelism.size(axis)) > 1:
            yield Loss(f"{axis} {size}", f"ParallelismConfig has no {axis}", f"compile with {axis} 1", fatal=True)
    if parallelism.pp == 1:
        yield from order_loss(parallelism, "accelerate", _ORDERS)
    if parallelism.cp > 1 and parallelism.cp_layout is not CpLayout.ZIGZAG:
        layout = parallelism.cp_layout.value
        yield Loss(f"cp_layout {layout}", "torch deals sequences out in zigzag", "zigzag is used")
    if parallelism.cp_implementation not in (CpImplementation.RING, CpImplementation.ALL_GATHER):
        why = "cp_comm_strategy is alltoall (a ring) or allgather"
        yield Loss(f"cp_implementation {parallelism.cp_implementation.value}", why, "alltoall is used")
    if parallelism.sequence_parallel:
        yield Loss("sequence_parallel", "the model's own tp plan sets it", "what transformers does")
    if spec.zero_stage in (0, 1):
        yield Loss(
            f"zero.stage {spec.zero_stage}",
            "FSDP2 shards gradients and weights as well (fsdp_reshard_after_forward false: like stage 2)",
            "less memory, more communication; the numbers of a step are the same up to the order of sums",
        )
    yield from rampup_losses(spec, "Trainer's batch does not grow", "every step has the whole batch")
    yield from decay_schedule_losses(spec, "the optimizer is the script's", "set weight decay in the script")
    if spec.training.router is not None:
        why = "Trainer adds the balancing loss of a model's own output_router_logits and router_aux_loss_coef alone"
        why += "; experts of transformers take all rows" * (spec.training.router.expert_capacity is not None)
        yield Loss(f"router {', '.join(spec.training.router.said)}", why, "scope micro_batch is set there")
    if (recomputed := spec.training.activation_checkpointing) not in ("none", "full"):
        said = recomputed if isinstance(recomputed, str) else ", ".join(recomputed)
        yield Loss(f"activation_checkpointing {said}", "FSDP2 checkpoints whole layers or none", "none")
    if parallelism.cp > 1 and parallelism.cp_implementation is not CpImplementation.ALL_GATHER:
        why = "ParallelismConfig takes it in a cp_handler: TorchContextParallelConfig(cp_comm_strategy='alltoall')"
        name = f"cp_implementation {parallelism.cp_implementation.value} in parallelism_config.json"
        yield Loss(name, why, "add that cp_handler, or it gathers")
    yield Loss("batch, optimizer and clipping", "they are the script's", "take them from plan.json")


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


def losses_with_deepspeed(plan: Plan) -> Iterator[Loss]:
    """What accelerate does not do under DeepSpeed as the plan says."""
    spec, parallelism = plan.spec, plan.spec.parallelism
    for axis in (Axis.TP, Axis.PP, Axis.EP):
        if (size := parallelism.size(axis)) > 1:
            yield Loss(
                f"{axis} {size}", f"accelerate has no {axis} under DeepSpeed", f"compile with {axis} 1", fatal=True
            )
    if parallelism.cp > 1 and parallelism.cp_implementation is not CpImplementation.ULYSSES:
        yield Loss(
            f"cp_implementation {parallelism.cp_implementation.value}",
            "under DeepSpeed accelerate splits sequences by Ulysses alone",
            "compile with cp_implementation ulysses",
            fatal=True,
        )
    elif parallelism.cp > 1:
        yield Loss(
            f"cp_layout {parallelism.cp_layout.value}",
            "DeepSpeed's Ulysses deals sequences out in whole blocks",
            "contiguous is used; the numbers are the same",
        )
    if spec.training.activation_checkpointing != "none":
        what = f"activation_checkpointing {spec.training.activation_checkpointing}"
        yield Loss(what, "the script switches it on", "call model.gradient_checkpointing_enable()")
    yield from deepspeed_losses(plan)


TRANSFORMERS_VERSION = "5.23.0"
"""Version of transformers whose configuration class was read."""
_MESH_ORDERS = (("tp", "cp", "dp", "pp"),)


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


def distributed_losses(plan: Plan) -> Iterator[Loss]:
    """What transformers does not do as the plan says."""
    spec, parallelism = plan.spec, plan.spec.parallelism
    tp, dp, ep, pp = parallelism.tp, parallelism.dp, parallelism.ep, parallelism.pp
    yield from memory_losses(spec, "offloading of FSDP moves the weights, too")
    if parallelism.cp > 1:
        yield Loss(f"cp {parallelism.cp}", "DistributedConfig has no cp", "compile with cp 1", fatal=True)
    if pp > 1 and dp > 1:
        why = "transformers 5.23 refuses FSDP together with pipeline parallelism"
        yield Loss(f"pp {pp} with dp {dp}", why, "compile with pp 1, or with dp 1", fatal=True)
    if ep > 1 and (ep % tp or (dp * tp) % ep):
        why = f"ep has to be a multiple of tp {tp} and divide dp {dp} · tp {tp} = {dp * tp}"
        yield Loss(f"ep {ep}", why, "compile with such an ep", fatal=True)
    yield from order_loss(parallelism, "transformers", _MESH_ORDERS)
    if parallelism.sequence_parallel:
        yield Loss("sequence_parallel", "transformers reserves the key and does nothing with it", "none")
    if spec.zero_stage in (0, 1, 2) and dp > 1:
        yield Loss(
            f"zero.stage {spec.zero_stage}",
            "FSDP2 shards weights as well, which is stage 3",
            "less memory, more communication; the numbers of a step are the same up to the order of sums",
        )
    if parallelism.cp_layout is not CpLayout.ZIGZAG and parallelism.cp > 1:
        yield Loss(f"cp_layout {parallelism.cp_layout.value}", "there is no cp", "none")
    yield from rampup_losses(spec, "the batch is the script's", "see plan.json")
    yield from decay_schedule_losses(spec, "the optimizer is the script's", "see plan.json")
    yield Loss("batch, optimizer, precision and recomputation", "they are the script's", "see plan.json")
