"""The batch of an engine's steps while it grows: `training.rampup_batch_size`.

DeepSpeed's own `set_train_batch_size` counts the ranks of cp as such with other sequences. The samples that the engine
has taken decide, so that a run goes on as it was in another layout, too.
"""

from __future__ import annotations

from typing import Any

from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.engine import set_batch
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.lora import without_peft
from parcompile.runtime.router_losses import RouterLosses


class GrowingBatch:
    """Gives each step of an engine its batch, and its learning rate by the samples that came before.

    Args:
        engine: of a plan whose batch grows; its `step` is wrapped.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._step = engine.step
        engine.step = self._step_and_follow
        self.follow()

    def _step_and_follow(self, *args: Any, **options: Any) -> Any:
        ends = self._engine.is_gradient_accumulation_boundary()
        result = self._step(*args, **options)
        if ends:
            self.follow()
        return result

    def follow(self) -> None:
        """Sets what the next step has, where it begins. Also after `global_samples` of the engine were set."""
        engine, training = self._engine, self._engine.mesh.plan.spec.training
        batch = training.batch(engine.global_samples)
        count = batch // (training.micro_batch_size * engine.mesh.size("dp"))
        set_batch(engine, batch, count)
        losses = without_peft(engine.module).loss_function
        if isinstance(losses, RouterLosses):
            losses.take_micro_batches(count)
        if hasattr(engine.lr_scheduler, "follow"):  # a user's own counts as it likes
            engine.lr_scheduler.follow(engine.global_samples)


def let_batch_grow(engine: Any) -> None:
    """Gives an engine the batches of its plan, where they grow."""
    grows = engine.mesh.plan.spec.training.rampup_batch_size is not None
    engine.parcompile_batch = GrowingBatch(engine) if grows else None


def refuse_ramp(plan: Plan, loop: str) -> None:
    """Refuses a plan whose batch grows.

    Args:
        plan: the plan.
        loop: who takes the steps.

    Raises:
        RunError: it grows.
    """
    if (ramp := plan.spec.training.rampup_batch_size) is not None:
        raise RunError(
            f"training.rampup_batch_size grows the batch from {ramp.start} to {plan.spec.training.global_batch_size}, "
            f"and {loop} takes the same number of micro-batches in every step: remove the key and compile again, or "
            "train with parcompile.runtime.initialize and engine.train_batch",
            everywhere=True,
        )
