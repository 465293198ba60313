"""ds_config.json: every DeepSpeed key that affects numerics, none left to a default, none "auto".

Why a key is written although DeepSpeed has a default for it: defaults change between versions (gradient_clipping went
from 0.0 to 1.0 in DeepSpeed#8068), and a run must not change with them. The values follow DeepSpeed 0.19.8. They stand
in `files.json`, with the nearest of DeepSpeed's schedules (`losses.json`); without one the rate stays.

The optimizer is torch's own implementation, unless the spec says another: the same arithmetic on every accelerator, and
nothing to compile when the job starts. zero_force_ds_cpu_optimizer is false so that whatever optimizer a script brings
steps on the host, and not DeepSpeed's own alone. DeepSpeed refuses an odd allgather_bucket_size. At stage 3 weights are
gathered under what is computed with others, and released behind each module (stage3_max_reuse_distance): DeepSpeed's
own 1e9 elements keep those of a whole small model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from parcompile.backends.artefacts import end_of_schedule, tree_of
from parcompile.backends.statements import Facts
from parcompile.cost.memory import bucket_numel
from parcompile.cost.reductions import LARGEST_BUCKET
from parcompile.plan import Plan
from parcompile.spec import OPTIMIZER_KEYS, Spec
from parcompile.spec.values import workload_of

_LEAST_WARMUP = 2
"""DeepSpeed makes longer what is shorter (runtime/lr_schedules.py)."""
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "muon": "Muon", "sgd": "SGD", "adagrad": "Adagrad"}


def ds_config(plan: Plan) -> dict[str, Any]:
    """The DeepSpeed configuration of a plan."""
    spec, schedule = plan.spec, plan.spec.training.lr_scheduler
    work, kind = workload_of(spec), spec.training.optimizer.type
    # DeepSpeed knows the settings of stage 3 by two names.
    given = {key.removeprefix("stage3_") for key in spec.deepspeed.get("zero_optimization", {})}
    facts: Facts = {
        "optimizer_class": lambda _spec: _OPTIMIZERS[kind],
        "optimizer_reads.": lambda _spec, key: key in OPTIMIZER_KEYS[kind],
        "is_fused": _is_fused,
        "warmup_steps": lambda _spec: max(_LEAST_WARMUP, schedule.warmup_steps if schedule else 0),
        "end_of_schedule": end_of_schedule,
        "work.": lambda _spec, key: getattr(work, key),
        "reduce_bucket": lambda _spec: bucket_numel(work),
        "gathered": lambda _spec: min(LARGEST_BUCKET, max(work.stage_numels)[0]),
        "given.": lambda _spec, key: key in given,
    }
    return _merged(tree_of("ds_config", spec, facts), spec.deepspeed)


def _is_fused(spec: Spec) -> bool:
    """Whether torch steps by one kernel, which it brings compiled, instead of eight passes through memory."""
    on_host = spec.offload_optimizer is not None and spec.training.optimizer.type != "adagrad"
    return not spec.takes_cpu_adam and (spec.fuses_adam or on_host)


def _merged(config: dict[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's keys with the spec's further ones; the rules have refused those that contradict."""
    merged = copy.deepcopy(config)
    for key, value in further.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
