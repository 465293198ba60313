"""What `deepspeed.initialize` is given for a plan, and what of DeepSpeed is changed while it makes the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from parcompile.runtime.deepspeed_patches.engine import with_optimizer
from parcompile.runtime.expert_parallel import for_deepspeed
from parcompile.runtime.groups import Mesh

from .schedule import PlanSchedule


@contextmanager
def options_for_deepspeed(mesh: Mesh, model: nn.Module, **options: Any) -> Iterator[dict[str, Any]]:
    """Within it `deepspeed.initialize`, with the options that come, makes the engine of the plan.

    Args:
        mesh: the live ranks.
        model: the injected model.
        options: what `deepspeed.initialize` would be called with for one rank.
    """
    training = mesh.plan.spec.training
    if training.lr_scheduler is not None and options.get("lr_scheduler") is None:
        options["lr_scheduler"] = partial(PlanSchedule, training=training)
    with for_deepspeed(mesh, model, **options) as given:
        if mesh.plan.spec.zero_stage:
            yield given
            return
        from .unsharded import UnshardedOptimizer

        with with_optimizer(lambda engine, optimizer: UnshardedOptimizer(engine, optimizer, mesh)):
            yield given
