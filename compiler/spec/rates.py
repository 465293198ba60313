"""The learning rate of each step: one function, which the runtime executes and targets are compared with.

Steps count from 1. Step n trains at position n - 1 of the schedule, as in Megatron-LM
(core/optimizer_param_scheduler.py) and transformers (optimization.py): the first step at `min_lr`, step
`warmup_steps` + 1 at the optimizer's lr, and a falling rate arrives at `min_lr` when the last step is done.
"""

from __future__ import annotations

import math

from .values import Training


def learning_rate(training: Training, step: int) -> float:
    """The rate of an optimizer step, counted from 1; steps after `train_steps` keep the last rate of the schedule."""
    schedule, highest = training.lr_scheduler, training.optimizer.lr
    if schedule is None:
        return highest
    lowest, warmup, done = schedule.min_lr, schedule.warmup_steps, step - 1
    if done < warmup:
        return lowest + (highest - lowest) * done / warmup
    if schedule.type == "constant":
        return highest
    assert training.train_steps is not None, "a rule wants train_steps for a rate that falls"
    progress = min(1.0, (done - warmup) / (training.train_steps - warmup))
    left = 1 - progress if schedule.type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lowest + (highest - lowest) * left
