"""Realistic mistakes, each planted into a configuration that DeepSpeed accepts and honours.

They are those of issue threads and of public files: misspelt and misplaced keys, values of a wrong type or unit, keys
that exclude or need each other, keys of other versions and other tools, and broken text. `refused` is what DeepSpeed
does with each of them, or the one who reads the file for it; what it takes silently is the worse half.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BASE: Mapping[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500000000,
        "allgather_bucket_size": 500000000,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0003, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.0003, "warmup_num_steps": 100, "total_num_steps": 1000},
    },
    "activation_checkpointing": {"partition_activations": False},
}
_ZERO, _OPTIMIZER, _SCHEDULER = "zero_optimization", "optimizer.params", "scheduler.params"
_STAGE_3 = {f"{_ZERO}.stage": 3}
_HALF = {"bf16": None, "fp16": {"enabled": True}}


@dataclass(frozen=True)
class Mistake:
    """One of them, as the text of a file. `at` is a part of the path, or the code, that a finding must have."""

    name: str
    text: str
    at: str
    refused: bool
    filler: str = "bare"


def finds(mistake: Mistake, diagnostics: Sequence[Any]) -> bool:
    """Whether one of the checker's findings names the mistake: as an error when it keeps a job from starting."""
    named = [
        one
        for one in diagnostics
        if mistake.at in one.code or mistake.at in one.message or any(mistake.at in str(step) for step in one.path)
    ]
    return any(one.is_error for one in named) if mistake.refused else bool(named)


def edited(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with values at dotted paths; None removes a key."""
    tree: dict[str, Any] = copy.deepcopy(dict(BASE))
    for dotted, value in changes.items():
        *steps, last = dotted.split(".")
        node = tree
        for step in steps:
            node = node.setdefault(step, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return tree


def renamed(dotted: str, name: str) -> dict[str, Any]:
    """The base with one key written in another way, at its place."""
    tree: dict[str, Any] = copy.deepcopy(dict(BASE))
    *steps, last = dotted.split(".")
    node = tree
    for step in steps:
        node = node[step]
    entries = [(name if key == last else key, value) for key, value in node.items()]
    node.clear()
    node.update(entries)
    return tree


_RENAMED = (
    # key, as it is written, whether DeepSpeed refuses it
    ("gradient_clipping", "gradient_cliping", False),
    ("gradient_clipping", "max_grad_norm", False),
    ("gradient_accumulation_steps", "gradient_acumulation_steps", False),
    ("train_micro_batch_size_per_gpu", "micro_batch_size_per_gpu", False),
    ("zero_optimization", "zero_optimisation", False),
    ("optimizer", "optimiser", False),
    ("scheduler", "lr_scheduler", False),
    ("bf16", "bfp16", False),
    ("activation_checkpointing", "activation_checkpoint", False),
    ("steps_per_print", "step_per_print", False),
    ("bf16.enabled", "enable", True),
    ("zero_optimization.stage", "zero_stage", True),
    ("zero_optimization.overlap_comm", "overlap_communication", True),
    ("zero_optimization.contiguous_gradients", "contigous_gradients", True),
    ("zero_optimization.reduce_bucket_size", "reduce_bucketsize", True),
    ("zero_optimization.allgather_bucket_size", "all_gather_bucket_size", True),
    ("activation_checkpointing.partition_activations", "partition_activation", False),
    ("optimizer.params.lr", "learning_rate", True),
    ("optimizer.params.betas", "beta", True),
    ("optimizer.params.eps", "epsilon", True),
    ("optimizer.params.weight_decay", "weight_decy", True),
    ("scheduler.params.warmup_num_steps", "warmup_steps", True),
    ("scheduler.params.total_num_steps", "total_steps", True),
    ("optimizer.type", "name", False),
)
_EDITED: tuple[tuple[str, dict[str, Any], str, bool], ...] = (
    ("an offload inside no section", {"offload_optimizer": {"device": "cpu"}}, "offload_optimizer", False),
    ("a stage beside the section", {"stage": 2}, "stage", False),
    ("a loss scale beside fp16", {**_HALF, "loss_scale": 0}, "loss_scale", False),
    ("clipping among the optimizer's", {f"{_OPTIMIZER}.max_grad_norm": 1.0}, "max_grad_norm", True),
    ("a misspelt device", {f"{_ZERO}.offload_optimizer": {"devise": "cpu"}}, "devise", True),
    ("a misspelt key of a stage", {**_STAGE_3, f"{_ZERO}.stage3_max_live_params": 1e9}, "stage3_max_live_params", True),
    ("a misspelt scale", {**_HALF, "fp16.initial_scale": 16}, "initial_scale", True),
    ("fp16's key in bf16", {"bf16.loss_scale": 0}, "loss_scale", True),
    ("a stage that is none", {f"{_ZERO}.stage": 4}, "stage", True),
    ("a stage in words", {f"{_ZERO}.stage": "two"}, "stage", True),
    ("a switch in Python's words", {"wall_clock_breakdown": "False"}, "wall_clock_breakdown", True),
    # The fused Adam fails in its first step, which the judge does not take.
    ("a rate as text", {f"{_OPTIMIZER}.lr": "3e-4"}, "lr", False),
    ("betas as text", {f"{_OPTIMIZER}.betas": "0.9,0.95"}, "betas", False),
    ("an epsilon that is no number", {f"{_OPTIMIZER}.eps": "1.0e_8"}, "eps", False),
    ("a bucket below zero", {f"{_ZERO}.reduce_bucket_size": -1}, "reduce_bucket_size", True),
    ("a bucket in megabytes", {f"{_ZERO}.reduce_bucket_size": "500MB"}, "reduce_bucket_size", True),
    ("a micro-batch of nothing", {"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu", True),
    ("half a sample", {"train_micro_batch_size_per_gpu": 2.5}, "train_micro_batch_size_per_gpu", True),
    ("a batch as text", {"train_batch_size": "64"}, "train_batch_size", True),
    ("a device that is none", {f"{_ZERO}.offload_optimizer": {"device": "gpu"}}, "device", True),
    ("an optimizer that is none", {"optimizer.type": "AdamWW"}, "type", True),
    ("a schedule that is none", {"scheduler.type": "WarmupLinearLR"}, "type", True),
    ("a type that is none", {"communication_data_type": "fp8"}, "communication_data_type", True),
    ("batches that do not multiply up", {"train_batch_size": 100}, "train_batch_size", True),
    ("two precisions", {"fp16": {"enabled": True}}, "enabled", True),
    ("no batch", dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu")), "K002", True),
    ("a schedule without its end", {f"{_SCHEDULER}.total_num_steps": None}, "total_num_steps", True),
    ("ZeRO without a stage", {f"{_ZERO}.stage": None}, "zero_optimization", False),
    ("parameters off the device too early", {f"{_ZERO}.offload_param": {"device": "cpu"}}, "offload_param", False),
    ("ZeRO++ below stage 3", {f"{_ZERO}.zero_hpz_partition_size": 8}, "zero_hpz_partition_size", False),
    (
        "weights quantized below stage 3",
        {f"{_ZERO}.zero_quantized_weights": True},
        "zero_quantized_weights",
        False,
    ),
    (
        "round robin at stage 3",
        {**_STAGE_3, f"{_ZERO}.round_robin_gradients": True},
        "round_robin_gradients",
        False,
    ),
    (
        "nvme without a path",
        {**_STAGE_3, f"{_ZERO}.offload_param": {"device": "nvme"}},
        "offload_param",
        True,
    ),
    (
        "a path for the host's memory",
        {f"{_ZERO}.offload_optimizer": {"device": "cpu", "nvme_path": "/nvme"}},
        "nvme_path",
        False,
    ),
    (
        "pinned memory of nothing",
        {f"{_ZERO}.offload_optimizer": {"device": "none", "pin_memory": True}},
        "pin_memory",
        False,
    ),
    ("a warm-up longer than the run", {f"{_SCHEDULER}.warmup_num_steps": 5000}, "warmup_num_steps", False),
    ("a rate that falls", {f"{_SCHEDULER}.warmup_min_lr": 0.01}, "warmup_min_lr", False),
    ("Lamb with ZeRO", {"optimizer": {"type": "Lamb", "params": {"lr": 0.001}}}, "type", True),
    ("a factor that stage 2 does not take", {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor", True),
    ("division before the sum at stage 2", {"prescale_gradients": True}, "prescale_gradients", True),
    ("a sum at stage 3", {**_STAGE_3, "gradient_allreduce_op": "sum"}, "gradient_allreduce_op", True),
    (
        "both ways to offload",
        {f"{_ZERO}.cpu_offload": True, f"{_ZERO}.offload_optimizer": {"device": "cpu"}},
        "cpu_offload",
        True,
    ),
    ("an old key", {f"{_ZERO}.cpu_offload": True}, "cpu_offload", False),
    ("an implementation that is gone", {f"{_ZERO}.legacy_stage1": True}, "legacy_stage1", True),
    ("a section that is gone", {"sparse_attention": {"mode": "fixed"}}, "sparse_attention", True),
    ("Apex's precision", {"amp": {"enabled": True, "opt_level": "O1"}}, "amp", True),
    ("an optimizer that is gone", {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.001}}}, "type", True),
    (
        "Muon without whole matrices",
        {**_STAGE_3, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
        "type",
        True,
    ),
    ("tensor parallelism by the wrong key", {"tensor_parallel": {"tp": {"tp_size": 2}}}, "tp_size", False),
    (
        "two sizes of tensor parallelism",
        {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
        "tp_size",
        True,
    ),
    (
        "a preset that is none",
        {"expert_parallel": {"enabled": True, "autoep_size": 4, "preset_model": "mixtrall"}},
        "preset_model",
        True,
    ),
    (
        "experts that are not switched on",
        {"expert_parallel": {"autoep_size": 4, "preset_model": "mixtral"}},
        "expert_parallel",
        False,
    ),
    (
        "clipping without a norm",
        {f"{_ZERO}.compute_grad_norm": False},
        "compute_grad_norm",
        True,
    ),
    ("no clipping said", {"gradient_clipping": None}, "gradient_clipping", False),
)
_FILLED: tuple[tuple[str, dict[str, Any], str, bool, str], ...] = (
    ("an auto that nobody fills", {f"{_ZERO}.allgather_bucket_size": "auto"}, "allgather", True, "transformers"),
    ("an auto of a misspelt key", {"gradient_cliping": "auto"}, "gradient_cliping", True, "transformers"),
    ("no section for the Trainer", {_ZERO: None, "train_batch_size": "auto"}, "zero_opt", True, "transformers"),
    ("an auto for DeepSpeed alone", {"train_batch_size": "auto"}, "train_batch_size", True, "bare"),
)
_TEXT = json.dumps(BASE, indent=2)
_BROKEN = (
    ("a comma too many for the Trainer", _TEXT.replace("1000\n", "1000,\n"), "J013", True, "transformers"),
    ("a comment for the Trainer", _TEXT.replace("{\n", "{\n  // tuned\n", 1), "J014", True, "transformers"),
    (
        "a key given twice",
        _TEXT.replace('"bf16"', '"gradient_clipping": 0.5,\n  "bf16"', 1),
        "gradient_clipping",
        True,
        "bare",
    ),
    ("Python's words", _TEXT.replace('"enabled": true', '"enabled": True'), "J016", True, "transformers"),
    ("a bracket that is missing", _TEXT.rstrip("}\n"), "J", True, "transformers"),
)


def mistakes() -> Iterator[Mistake]:
    """All of them."""
    for dotted, name, refused in _RENAMED:
        yield Mistake(f"{dotted} as {name}", json.dumps(renamed(dotted, name), indent=2), name, refused)
    for name, changes, at, refused in _EDITED:
        yield Mistake(name, json.dumps(edited(changes), indent=2), at, refused)
    for name, changes, at, refused, filler in _FILLED:
        yield Mistake(name, json.dumps(edited(changes), indent=2), at, refused, filler)
    for name, text, at, refused, filler in _BROKEN:
        yield Mistake(name, text, at, refused, filler)
