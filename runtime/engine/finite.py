"""Ends a run at the first loss or gradient norm that is not finite, before a checkpoint takes over its weights.

A dynamic loss scale of fp16 finds its size by steps that it skips: their norms are infinite by design, and end the run
when the scale has come to its minimum.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.liveness import records
from parcompile.runtime.liveness.monitor import say
from parcompile.runtime.loss import own_part
from parcompile.runtime.transport.backend import gather_objects
from parcompile.spec import Precision

STOP_AFTER = 1
"""Steps in a row."""
_SCALE_AT_MINIMUM = "loss scale already at minimum"
"""What DeepSpeed's exception says when a dynamic loss scale cannot fall further."""


class _Seen(NamedTuple):
    """What is known of an optimizer step on this rank."""

    step: int
    norm: Any
    """The same on all ranks: a number or a tensor of one; None where none was computed."""
    lost: Tensor | None
    """Whether a loss of this rank's micro-batches was no finite number; None where it has none."""
    skipped: bool


class FiniteWatch:
    """Looks at the losses and the gradient norm of every optimizer step. The engine's `step` is wrapped.

    Args:
        engine: a DeepSpeed engine.
        mesh: the live ranks; all of them watch.
        stop_after: how many steps in a row without a finite loss and norm end the run; None: none do.
    """

    def __init__(self, engine: Any, mesh: Mesh, stop_after: int | None) -> None:
        self._engine, self._mesh, self._stop_after = engine, mesh, stop_after
        training = mesh.plan.spec.training
        self._may_skip = training.precision is Precision.FP16 and training.loss_scale == 0
        self._in_a_row, self._skipped, self._first = 0, 0, 0
        self._lost: Tensor | None = None
        self._coming: tuple[_Seen, torch.cuda.Event] | None = None
        self._checkpoint: Path | None = None
        self._engine_step, self._engine_backward = engine.step, engine.backward
        engine.step, engine.backward = self._step, self._backward
        engine.register_forward_hook(self._forward)
        engine.finite_watch = self

    def _forward(self, module: Any, _inputs: Any, output: Any) -> None:
        if module.training:
            self._look_at_loss(getattr(output, "loss", None))

    def _backward(self, loss: Any, *args: Any, **options: Any) -> Any:
        """A program may make its loss of the model's outputs itself."""
        self._look_at_loss(loss)
        return self._engine_backward(loss, *args, **options)

    def _look_at_loss(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and not loss.dim():
            lost = ~torch.isfinite(own_part(loss).detach())
            self._lost = lost if self._lost is None else self._lost | lost

    def _step(self, *args: Any, **options: Any) -> Any:
        boundary = self._engine.is_gradient_accumulation_boundary()
        try:
            result = self._engine_step(*args, **options)
        except Exception as error:  # DeepSpeed raises no other
            if not self._may_skip or _SCALE_AT_MINIMUM not in str(error):
                raise
            step = int(self._engine.global_steps) + 1
            raise RunError(
                f"step {step}: the gradient norm is not a finite number, and the dynamic loss scale of fp16 is at its "
                f"minimum: it has skipped the {self._skipped} steps before. {self._how_to_go_on(step - 1)}",
                everywhere=True,
            ) from error
        if boundary:
            self._look()
        return result

    def _look(self) -> None:
        skipped = bool(getattr(self._engine.optimizer, "overflow", False))
        norm = self._engine.get_global_grad_norm()
        seen = _Seen(int(self._engine.global_steps), math.inf if skipped else norm, self._lost, skipped)
        self._lost = None
        if isinstance(seen.norm, Tensor) and seen.norm.is_cuda:
            # The host does not wait for this step: it reads what has come of the step before meanwhile.
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            lost = None if seen.lost is None else seen.lost.to("cpu", non_blocking=True)
            copied = seen._replace(norm=seen.norm.detach().to("cpu", non_blocking=True), lost=lost)
            arrived.record()
            self.settle((copied, arrived))
            return
        self.settle()
        self._judge(seen)

    def settle(self, coming: tuple[_Seen, torch.cuda.Event] | None = None) -> None:
        """Judges the step that a GPU had not finished; `coming` takes its place. Every rank calls it.

        Raises:
            RunError: the step ends the run.
        """
        before, self._coming = self._coming, coming
        if before is not None:
            seen, arrived = before
            arrived.synchronize()
            self._judge(seen)

    def _judge(self, seen: _Seen) -> None:
        lost = None if seen.lost is None else bool(seen.lost)
        # DeepSpeed writes -1 for a norm that is infinite or no number.
        if seen.norm is None or (math.isfinite(value := float(seen.norm)) and value >= 0):
            if not lost:
                self._in_a_row = self._skipped = 0
                return
            # No other rank knows of it: an infinite loss may have finite gradients.
            self._count(seen.step, f"the loss is not a finite number on rank {self._mesh.rank}", everywhere=False)
            return
        ranks = self._ranks_that_lost(lost)
        if self._may_skip and seen.skipped and not ranks:
            self._skipped += 1
            return
        where = "the losses are finite on all ranks"
        if ranks:
            where = f"the loss is not finite on rank {', '.join(map(str, ranks[:8]))}{' and more' * (len(ranks) > 8)}"
        self._count(seen.step, f"the gradient norm is not a finite number; {where}", everywhere=True)

    def _count(self, step: int, what: str, *, everywhere: bool) -> None:
        """One more step of those that end the run."""
        records.look_for_nonfinite()
        if not self._in_a_row:
            self._first = step
        self._in_a_row += 1
        if self._stop_after is None or self._in_a_row < self._stop_after:
            if self._in_a_row == 1 and (self._mesh.rank == 0 or not everywhere):
                say(f"warning: step {step}: {what}")
            return
        since = f"step {step}" + f" ({self._in_a_row} steps in a row)" * (self._in_a_row > 1)
        raise RunError(f"{since}: {what}. {self._how_to_go_on(self._first - 1)}", everywhere=everywhere)

    def _how_to_go_on(self, last_good: int) -> str:
        checkpoint = f": {self._checkpoint}" if self._checkpoint else " (this run has saved none)"
        return (
            f"Go on from a checkpoint of step {last_good} or before{checkpoint}, with a smaller learning rate or other "
            "data; initialize(stop_on_nonfinite=N) allows such steps, None any number of them"
        )

    def saved(self, folder: Path, step: int) -> None:
        """A checkpoint was written. The last one before the numbers ceased to be finite is named when the run ends."""
        if not self._in_a_row or step < self._first:
            self._checkpoint = folder

    def _ranks_that_lost(self, lost: bool | None) -> list[int]:
        """Those whose loss is not finite. The norm is the same on all ranks, so that all come here at the same step."""
        everyones = gather_objects(lost) if self._mesh.plan.world_size > 1 else [lost]
        return [rank for rank, one in enumerate(everyones) if one]
