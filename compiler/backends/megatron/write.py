"""Megatron-LM arguments: as a list, as the YAML of its test recipes, and as a shell array.

Names and types are those of Megatron-LM's argument parser at `MEGATRON_VERSION`; the tests compare them with a table
that was read from it.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from parcompile.backends.environment import variables
from parcompile.backends.header import header
from parcompile.backends.losses import Loss, effective_order, order_loss, sequence_loss
from parcompile.layout.context_parallel import CpImplementation
from parcompile.layout.sequence import CpLayout
from parcompile.plan import Plan
from parcompile.spec import Precision, Spec

from .model import Arguments, model_arguments

MEGATRON_VERSION = "d98e8a64"
"""Commit of NVIDIA/Megatron-LM whose parser was read (2026-08-22)."""

_ORDERS = (("tp", "cp", "ep", "dp", "pp"), ("tp", "cp", "ep", "pp", "dp"))

COMM_TYPES = {
    CpImplementation.RING: "p2p",
    CpImplementation.DOUBLE_RING: "p2p",
    CpImplementation.ALL_GATHER: "all_gather",
    CpImplementation.ULYSSES: "a2a",
    CpImplementation.USP: "a2a+p2p",
}
"""Values of --cp-comm-type."""

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt2")
"""Model types whose layers these arguments describe in full; others have activations, norms or scales of their own."""


def arguments(plan: Plan) -> Arguments:
    """Every argument that the plan decides, also those that equal Megatron-LM's defaults: defaults change."""
    spec = plan.spec
    return {
        **_layout(spec),
        **_stages(spec),
        **model_arguments(spec),
        **_training(spec),
    }


def as_list(found: Arguments) -> list[str]:
    """The arguments as they stand on a command line."""
    listed: list[str] = []
    for name, value in found.items():
        listed.append(f"--{name}")
        if isinstance(value, list):
            listed.extend(map(str, value))
        elif value is not True:
            listed.append(str(value))
    return listed


def files(plan: Plan) -> dict[str, Any]:
    """megatron_args.json (a tree), megatron_args.yaml and megatron_args.sh (texts)."""
    found = arguments(plan)
    return {
        "megatron_args.json": {
            "compiler_version": plan.compiler_version,
            "spec_hash": plan.spec_hash,
            "megatron_version": MEGATRON_VERSION,
            "environment": {one.name: one.value for one in variables(plan)},
            "arguments": as_list(found),
        },
        "megatron_args.yaml": _yaml(plan, found),
        "megatron_args.sh": _shell(plan, found),
    }


def losses(plan: Plan) -> list[Loss]:
    """What Megatron-LM does not do as the plan says."""
    spec = plan.spec
    found = order_loss(spec.parallelism, "Megatron-LM", _ORDERS) + sequence_loss(spec, "Megatron-LM")
    family = spec.model.shape.model_type
    if family not in _FAMILIES:
        found.append(
            Loss(
                f"model_type {family}",
                "the arguments here do not describe its layers in full",
                f"one of {', '.join(_FAMILIES)}",
                fatal=True,
            )
        )
    window = spec.model.shape.sliding_window
    if window is not None and window < spec.training.sequence_length:
        found.append(
            Loss(f"sliding_window {window}", "no argument here sets it", "every token sees the whole sequence")
        )
    if family == "deepseek_v3":
        found.append(
            Loss("expert routing", "scores, groups and biases have arguments of their own", "set --moe-router-*")
        )
    if spec.model.hf_config.get("rope_scaling"):
        found.append(Loss("rope_scaling", "scaling has arguments of its own", "set --use-rope-scaling and its factor"))
    if float(spec.model.hf_config.get("rope_theta", 10000.0)) % 1:
        found.append(Loss("rope_theta", "--rotary-base is a whole number", "the base is rounded down"))
    if spec.zero_stage > 1:
        found.append(
            Loss(f"zero.stage {spec.zero_stage}", "the distributed optimizer is stage 1", "use --use-megatron-fsdp")
        )
    training, parallelism = spec.training, spec.parallelism
    if training.precision is Precision.BF16 and training.gradient_accumulation_dtype is not Precision.FP32:
        found.append(
            Loss("gradient_accumulation_dtype bf16", "bf16 gradients are summed in fp32", "2 bytes more per parameter")
        )
    if training.optimizer.type == "adam":
        found.append(
            Loss("optimizer adam", "--optimizer adam decays weights as AdamW does", "set weight_decay 0, or adamw")
        )
    if parallelism.cp > 1 and parallelism.cp_layout is not CpLayout.ZIGZAG:
        found.append(
            Loss(
                f"cp_layout {parallelism.cp_layout.value}",
                "Megatron-LM deals sequences out in zigzag",
                "zigzag is used",
            )
        )
    found += _context_losses(spec)
    if training.lr_scheduler is not None:
        found.append(
            Loss("lr_scheduler", "Megatron-LM counts steps from 0, DeepSpeed from 1", "rates are one step earlier")
        )
    found.append(Loss("data and tokenizer", "the spec does not name them", "add --data-path and --tokenizer-type"))
    return found


def _context_losses(spec: Spec) -> list[Loss]:
    """Where TransformerEngine's context parallelism does less than the plan's implementation."""
    parallelism, shape = spec.parallelism, spec.model.shape
    if parallelism.cp_implementation is CpImplementation.DOUBLE_RING:
        return [Loss("cp_implementation double_ring", "Megatron-LM has one ring", "--cp-comm-type p2p")]
    ranks, kv_heads = parallelism.context.head_ranks, max(1, shape.num_key_value_heads // parallelism.tp)
    if kv_heads % ranks:
        name = parallelism.cp_implementation.value
        return [
            Loss(
                f"cp_implementation {name} with {kv_heads} key/value heads on a rank",
                f"TransformerEngine does not repeat them for {ranks} ranks that exchange heads",
                "cp_implementation ring",
                fatal=True,
            )
        ]
    return []


def _layout(spec: Spec) -> Arguments:
    parallelism = spec.parallelism
    found: Arguments = {
        "tensor-model-parallel-size": parallelism.tp,
        "context-parallel-size": parallelism.cp,
        "pipeline-model-parallel-size": parallelism.pp,
        "expert-model-parallel-size": parallelism.ep,
        "expert-tensor-parallel-size": parallelism.tp,
    }
    if parallelism.sequence_parallel:
        found["sequence-parallel"] = True
    if parallelism.cp > 1:
        found["cp-comm-type"] = [COMM_TYPES[parallelism.cp_implementation]]
    if parallelism.cp_implementation is CpImplementation.USP and parallelism.hierarchical_cp_sizes is not None:
        found["hierarchical-context-parallel-sizes"] = list(parallelism.hierarchical_cp_sizes)
    order = effective_order(parallelism)
    if "dp" in order and "pp" in order and order.index("dp") > order.index("pp"):
        found["use-tp-pp-dp-mapping"] = True
    if spec.zero_stage >= 1:
        found["use-distributed-optimizer"] = True
    return found


def _stages(spec: Spec) -> Arguments:
    """How the layers are dealt to the pipeline, where it is not evenly."""
    parallelism = spec.parallelism
    if parallelism.pp == 1:
        return {}
    flags = {
        "account-for-embedding-in-pipeline-split": parallelism.account_for_embedding_in_pipeline_split,
        "account-for-loss-in-pipeline-split": parallelism.account_for_loss_in_pipeline_split,
    }
    found: Arguments = {name: True for name, on in flags.items() if on}
    numbers = {
        "decoder-first-pipeline-num-layers": parallelism.num_layers_in_first_pipeline_stage,
        "decoder-last-pipeline-num-layers": parallelism.num_layers_in_last_pipeline_stage,
    }
    if parallelism.num_virtual_stages_per_pipeline_rank > 1:
        # Megatron-LM takes this one also where the first or last stage has a number of its own.
        numbers["num-virtual-stages-per-pipeline-rank"] = parallelism.num_virtual_stages_per_pipeline_rank
        group = parallelism.microbatch_group_size_per_virtual_pipeline_stage
        numbers["microbatch-group-size-per-virtual-pipeline-stage"] = group
    return found | {name: value for name, value in numbers.items() if value is not None}


def _training(spec: Spec) -> Arguments:
    training, optimizer, schedule = spec.training, spec.training.optimizer, spec.training.lr_scheduler
    found: Arguments = {
        "seq-length": training.sequence_length,
        "micro-batch-size": training.micro_batch_size,
        "global-batch-size": training.global_batch_size,
        "eval-micro-batch-size": training.eval_micro_batch_size,
        "eval-global-batch-size": training.eval_global_batch_size,
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min-lr": optimizer.lr if schedule is None else schedule.min_lr,
        "lr-decay-style": "constant" if schedule is None else schedule.type,
        "weight-decay": optimizer.weight_decay,
        "adam-beta1": optimizer.betas[0],
        "adam-beta2": optimizer.betas[1],
        "adam-eps": optimizer.eps,
        "clip-grad": training.gradient_clipping,
        "seed": training.seed,
    }
    if schedule is not None:
        found |= {"lr-warmup-iters": schedule.warmup_steps, "lr-warmup-init": schedule.min_lr}
    if training.train_steps is not None:
        found["train-iters"] = training.train_steps
    if training.precision is not Precision.FP32:
        found[training.precision.value] = True
    if training.precision is Precision.BF16:
        found["accumulate-allreduce-grads-in-fp32"] = True
    if training.precision is Precision.FP16 and training.loss_scale:
        found["loss-scale"] = training.loss_scale
    if training.activation_checkpointing != "none":
        found["recompute-granularity"] = training.activation_checkpointing
    if training.activation_checkpointing == "full":
        found |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    return found


def _yaml(plan: Plan, found: Arguments) -> str:
    tree = {
        "ENV_VARS": {one.name: one.value for one in variables(plan)},
        "MODEL_ARGS": {f"--{name}": value for name, value in found.items()},
    }
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=4096)
    return "\n".join(header(plan, "Megatron-LM arguments, as its functional tests write them.")) + "\n" + body


def _shell(plan: Plan, found: Arguments) -> str:
    about = 'Megatron-LM arguments: source this file, then pass "${MEGATRON_ARGS[@]}" to pretrain_gpt.py.'
    lines = ["#!/usr/bin/env bash", *header(plan, about)]
    for one in variables(plan):
        lines += [f"# {one.why}", f"export {one.name}={shlex.quote(one.value)}"]
    lines.append("MEGATRON_ARGS=(")
    for name, value in found.items():
        lines.append("  " + " ".join(shlex.quote(word) for word in as_list({name: value})))
    return "\n".join([*lines, ")"]) + "\n"
