"""ds_config.json: every DeepSpeed key that affects numerics, none left to a default, none "auto".

Why a key is written although DeepSpeed has a default for it: defaults change between versions (gradient_clipping went
from 0.0 to 1.0 in DeepSpeed#8068), and a run must not change with them. The values follow DeepSpeed 0.19.8.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from parcompile.cost.memory import bucket_numel
from parcompile.cost.partitions import LARGEST_BUCKET
from parcompile.plan import Plan
from parcompile.spec import OPTIMIZER_KEYS, Precision, Spec
from parcompile.spec.values import Offload, workload_of

_LEAST_WARMUP = 2
"""DeepSpeed makes longer what is shorter (runtime/lr_schedules.py)."""
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "muon": "Muon", "sgd": "SGD", "adagrad": "Adagrad"}


def ds_config(plan: Plan) -> dict[str, Any]:
    """The DeepSpeed configuration of a plan."""
    spec, training = plan.spec, plan.spec.training
    sums = training.gradient_accumulation_dtype
    config = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "optimizer": _optimizer(spec),
        **_scheduler(spec),
        "gradient_clipping": training.gradient_clipping,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "bf16": {"enabled": training.precision is Precision.BF16},
        "fp16": _fp16(spec),
        "data_types": {"grad_accum_dtype": (sums if spec.zero_stage else training.precision).value},
        "communication_data_type": sums.value,
        "seq_parallel_communication_data_type": "fp32",
        "zero_optimization": _zero(spec),
        "zero_allow_untested_optimizer": training.optimizer.type in ("muon", "sgd", "adagrad"),
        # False: whatever optimizer a script brings steps on the host, and not DeepSpeed's own alone.
        **({} if spec.offload_optimizer is None else {"zero_force_ds_cpu_optimizer": spec.takes_cpu_adam}),
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
        "dump_state": False,
    }
    return _merged(config, spec.deepspeed)


def _optimizer(spec: Spec) -> dict[str, Any]:
    optimizer = spec.training.optimizer
    # torch's own implementation, unless the spec says another: the same arithmetic on every accelerator, and nothing to
    # compile when the job starts.
    settings: dict[str, Any] = {"lr": optimizer.lr}
    if "betas" in OPTIMIZER_KEYS[optimizer.type]:
        settings["betas"] = list(optimizer.betas)
    if "eps" in OPTIMIZER_KEYS[optimizer.type]:
        settings["eps"] = optimizer.eps
    settings["weight_decay"] = optimizer.weight_decay
    if optimizer.type == "sgd":
        settings |= {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
    elif optimizer.is_muon:
        settings |= {"momentum": optimizer.momentum, "ns_method": "standard"}
    if "betas" in settings:
        settings["torch_adam"] = not spec.takes_cpu_adam
    if spec.takes_cpu_adam:
        settings["fp32_optimizer_states"] = True
    elif spec.fuses_adam or (spec.offload_optimizer is not None and optimizer.type != "adagrad"):
        # One kernel, which torch brings compiled, instead of eight passes through memory.
        settings["fused"] = True
    if "betas" in settings:
        settings["adam_w_mode"] = optimizer.type != "adam"
    return {"type": _OPTIMIZERS[optimizer.type], "params": settings}


def _scheduler(spec: Spec) -> dict[str, Any]:
    """The nearest of DeepSpeed's schedules, see `losses.json`; without one the rate stays, and it gets no section."""
    schedule, lr = spec.training.lr_scheduler, spec.training.optimizer.lr
    if schedule is None:
        return {}
    warmup: dict[str, Any] = {"warmup_num_steps": max(_LEAST_WARMUP, schedule.warmup_steps), "warmup_type": "linear"}
    if schedule.type == "cosine":
        # The floors of this one are fractions of the optimizer's rate.
        settings = {"warmup_min_ratio": schedule.warmup_start_lr / lr, "cos_min_ratio": schedule.min_lr / lr, **warmup}
        kind = "WarmupCosineLR"
    else:
        falls = schedule.type == "linear"
        lowest = schedule.min_lr if falls else schedule.warmup_start_lr
        settings = {"warmup_min_lr": lowest, "warmup_max_lr": lr, **warmup}
        kind = "WarmupDecayLR" if falls else "WarmupLR"
    if schedule.type in ("linear", "cosine"):
        settings["total_num_steps"] = schedule.end(spec.training.train_steps)
    return {"scheduler": {"type": kind, "params": settings}}


def _fp16(spec: Spec) -> dict[str, Any]:
    if spec.training.precision is not Precision.FP16:
        return {"enabled": False}
    return {
        "enabled": True,
        "loss_scale": spec.training.loss_scale,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }


def _zero(spec: Spec) -> dict[str, Any]:
    work = workload_of(spec)
    bucket, gathered = bucket_numel(work), min(LARGEST_BUCKET, max(work.stage_numels)[0])
    found = {
        "stage": spec.zero_stage,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        # DeepSpeed refuses an odd one.
        **({} if spec.shards_weights else {"allgather_bucket_size": gathered + gathered % 2}),
        # At stage 3 weights are gathered under what is computed with others.
        "overlap_comm": spec.shards_weights or work.overlaps_gradients,
        "contiguous_gradients": True,
        **({} if spec.offload_optimizer is None else {"offload_optimizer": _offload(spec.offload_optimizer)}),
        **({} if spec.offload_param is None else {"offload_param": _offload(spec.offload_param)}),
    }
    if not spec.shards_weights:
        return {**found, "round_robin_gradients": False}
    gathering = {
        "stage3_param_persistence_threshold": work.small_numel,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_max_live_parameters": work.live_numel,
        # Weights are released behind each module: DeepSpeed's own 1e9 elements keep those of a whole small model.
        "stage3_max_reuse_distance": 0,
        "sub_group_size": 1_000_000_000,
    }
    # DeepSpeed knows each of them by two names.
    given = {key.removeprefix("stage3_") for key in spec.deepspeed.get("zero_optimization", {})}
    return found | {key: value for key, value in gathering.items() if key.removeprefix("stage3_") not in given}


def _offload(offload: Offload) -> dict[str, Any]:
    return {"device": offload.device, "pin_memory": offload.pin_memory}


def _merged(config: dict[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's keys with the spec's further ones; the rules have refused those that contradict."""
    merged = copy.deepcopy(config)
    for key, value in further.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
