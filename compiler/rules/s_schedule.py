"""The learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from parcompile.diagnostics import Edit, Fix, Safety
from parcompile.spec.resolve import Resolution

from .places import also
from .registry import Finding, rule

_SCHEDULE = ("training", "lr_scheduler")
_MIN, _WARMUP, _TYPE = ((*_SCHEDULE, name) for name in ("min_lr", "warmup_steps", "type"))
_LR = ("training", "optimizer", "lr")
_STEPS = ("training", "train_steps")
_FURTHER = ("deepspeed", "scheduler")
_LEAST_WARMUP = 2


@rule(
    "S002",
    "the lowest learning rate is above the highest",
    """A schedule rises from min_lr to optimizer.lr and falls back to it: min_lr ≤ optimizer.lr.""",
    wrong={"training": {"lr_scheduler": {"type": "constant", "warmup_steps": 100, "min_lr": 0.1}}},
    right={"training": {"lr_scheduler": {"type": "constant", "warmup_steps": 100, "min_lr": 3e-5}}},
    sources=("Megatron-LM arguments.py",),
)
def lowest_rate_is_below(spec: Resolution) -> Iterator[Finding]:
    """Fires when min_lr > lr."""
    schedule, lr = spec.lr_scheduler, spec.lr
    if schedule is None or schedule.min_lr <= lr:
        return
    yield Finding(
        f"min_lr {schedule.min_lr:g} > optimizer.lr {lr:g}",
        _MIN,
        help=f"write a min_lr of {lr:g} or less, for example {lr / 10:g}",
        fixes=(
            Fix("remove min_lr", Safety.CHANGES_NUMERICS, (Edit(_MIN, remove=True),)),
            Fix(f"set min_lr to {lr:g}", Safety.CHANGES_NUMERICS, (Edit(_MIN, lr),)),
        ),
        related=also(spec, _LR),
    )


@rule(
    "S006",
    "the schedule does not fit into the training steps",
    """linear and cosine fall from the end of the warm-up to the last training step: train_steps is given, and
    warmup_steps < train_steps.""",
    wrong={"training": {"lr_scheduler": {"type": "cosine", "warmup_steps": 100}}},
    right={"training": {"train_steps": 1000, "lr_scheduler": {"type": "cosine", "warmup_steps": 100}}},
    sources=("Megatron-Core optimizer_param_scheduler.py", "DeepSpeed runtime/lr_schedules.py"),
)
def schedule_ends_with_training(spec: Resolution) -> Iterator[Finding]:
    """Fires when train_steps is missing for a falling rate, or the warm-up is not over before the end."""
    schedule, steps = spec.lr_scheduler, spec.get(*_STEPS)
    if schedule is None:
        return
    constant = Fix("set type to constant", Safety.CHANGES_NUMERICS, (Edit(_TYPE, "constant"),))
    if steps is None and schedule.type != "constant":
        yield Finding(
            f"lr_scheduler {schedule.type} falls until the last training step, but train_steps is not given",
            _TYPE,
            help="add train_steps under training",
            fixes=(constant,),
        )
    elif steps is not None and schedule.warmup_steps >= steps:
        shorter = max(_LEAST_WARMUP, steps // 10)
        removal = Fix("remove lr_scheduler", Safety.CHANGES_NUMERICS, (Edit(_SCHEDULE, remove=True),))
        change = Fix(f"set warmup_steps to {shorter}", Safety.CHANGES_NUMERICS, (Edit(_WARMUP, shorter),))
        yield Finding(
            f"warmup_steps {schedule.warmup_steps} ≥ train_steps {steps}: the warm-up does not end",
            _WARMUP,
            help=f"use less than {steps}",
            fixes=(change, removal) if shorter < steps else (removal,),
            related=also(spec, _STEPS),
        )


@rule(
    "S007",
    "two learning-rate schedules",
    """training.lr_scheduler is written into ds_config.json as DeepSpeed's section scheduler; a scheduler among the
    further DeepSpeed keys would be mixed with it.""",
    wrong={
        "training": {"lr_scheduler": {"type": "constant", "warmup_steps": 100}},
        "deepspeed": {"scheduler": {"type": "WarmupLR"}},
    },
    right={"training": {"lr_scheduler": {"type": "constant", "warmup_steps": 100}}},
    sources=("DeepSpeed runtime/lr_schedules.py",),
    targets=("deepspeed", "runtime"),
)
def one_schedule(spec: Resolution) -> Iterator[Finding]:
    """Fires when both are given."""
    if spec.lr_scheduler is not None and spec.given(*_FURTHER):
        yield Finding(
            "deepspeed.scheduler and training.lr_scheduler are both given: a run has one schedule",
            _FURTHER,
            help="keep one of them; training.lr_scheduler is known to every target",
            fixes=(
                Fix("remove deepspeed.scheduler", Safety.CHANGES_NUMERICS, (Edit(_FURTHER, remove=True),)),
                Fix("remove lr_scheduler", Safety.CHANGES_NUMERICS, (Edit(_SCHEDULE, remove=True),)),
            ),
            related=also(spec, _SCHEDULE),
        )
