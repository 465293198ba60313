"""Says at once that a gradient norm is not a finite number, and ends a run that does not come back from it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.loss import own_part
from parcompile.spec import Precision

STOP_AFTER = 25
"""Steps in a row. A dynamic loss scale of fp16 that starts at 2^16 skips at most 16 until it comes to 1."""


class FiniteWatch:
    """Looks at the gradient norm of every optimizer step. The engine's `step` is wrapped, losses are read from outputs.

    Args:
        engine: a DeepSpeed engine.
        mesh: the live ranks; all of them watch.
        stop_after: how many steps in a row without a finite norm end the run; None: none do.
    """

    def __init__(self, engine: Any, mesh: Mesh, stop_after: int | None) -> None:
        self._engine, self._mesh, self._stop_after = engine, mesh, stop_after
        self._in_a_row, self._first = 0, 0
        self._loss: torch.Tensor | None = None
        self._coming: tuple[torch.Tensor, torch.cuda.Event, int] | None = None
        self._checkpoint: Path | None = None
        self._engine_step = engine.step
        engine.step = self._step
        engine.register_forward_hook(self._keep_loss)
        engine.finite_watch = self

    def _keep_loss(self, _module: Any, _inputs: Any, output: Any) -> None:
        loss = getattr(output, "loss", None)
        self._loss = own_part(loss).detach() if isinstance(loss, torch.Tensor) else None

    def _step(self, *args: Any, **options: Any) -> Any:
        boundary = self._engine.is_gradient_accumulation_boundary()
        result = self._engine_step(*args, **options)
        if boundary:
            self._look()
        return result

    def _look(self) -> None:
        norm, step = self._engine.get_global_grad_norm(), int(self._engine.global_steps)
        if isinstance(norm, torch.Tensor) and norm.is_cuda:
            # The host does not wait for this step: it reads the norm of the step before, which has come meanwhile.
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied = norm.detach().to("cpu", non_blocking=True)
            arrived.record()
            before, self._coming = self._coming, (copied, arrived, step)
            if before is None:
                return
            norm, arrived, step = before
            arrived.synchronize()
        if norm is None:
            return  # none was computed
        value = float(norm)
        # DeepSpeed writes -1 for a norm that is infinite or no number.
        if math.isfinite(value) and value >= 0:
            self._in_a_row = 0
            return
        if not self._in_a_row:
            self._first = step
            self._warn(step)
        self._in_a_row += 1
        if self._stop_after is not None and self._in_a_row >= self._stop_after:
            raise RunError(
                f"the gradient norm has not been a finite number for {self._in_a_row} steps, from step {self._first} "
                f"to step {step}. Go on from a checkpoint of step {self._first - 1} or before"
                f"{self._last_checkpoint()}, with a smaller learning rate or other data; "
                "initialize(stop_on_nonfinite=None) never stops",
                everywhere=True,
            )

    def saved(self, folder: Path, step: int) -> None:
        """A checkpoint was written. The last one before the norm ceased to be finite is named when the run ends."""
        if not self._in_a_row or step < self._first:
            self._checkpoint = folder

    def _last_checkpoint(self) -> str:
        return f": {self._checkpoint}" if self._checkpoint else " (this run has saved none)"

    def _warn(self, step: int) -> None:
        """The norm is the same on all ranks, so that all come here at the same step; the losses tell where it began."""
        # In a pipeline a rank may have no loss.
        finite = None if self._loss is None else bool(torch.isfinite(self._loss).all())
        everyones: list[Any] = [finite]
        if self._mesh.plan.world_size > 1:
            everyones = [None] * self._mesh.plan.world_size
            dist.all_gather_object(everyones, finite)
        if self._mesh.rank:
            return
        ranks = [rank for rank, one in enumerate(everyones) if one is False]
        if ranks:
            where = f"the loss is not finite on rank {', '.join(map(str, ranks[:8]))}{' and more' * (len(ranks) > 8)}"
        elif None in everyones:
            where = "no rank knows a loss that is not finite"
        else:
            where = "the losses are finite on all ranks"
        is_taken = self._mesh.plan.spec.training.precision is Precision.BF16
        what = "DeepSpeed takes such a step in bf16: the parameters may be lost" if is_taken else "the step is skipped"
        text = f"parcompile: warning: step {step}: the gradient norm is not a finite number; {where}; {what}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 -- it is for the user
