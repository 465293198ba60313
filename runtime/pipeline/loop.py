"""Trains and evaluates an engine whose model is in pipeline stages: one schedule for all micro-batches of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.runtime.data.inputs import ready_inputs
from parcompile.runtime.deepspeed_patches.engine import reduce_at_end
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.model_class import TORCH_DTYPES
from parcompile.runtime.transport import Lanes

from .chunk import handed
from .execution import Batch, Outputs, Step, Work
from .stage import TiedEmbedding


class PipelinedLoop:
    """The micro-batches of an engine's steps, through all stages.

    Every stage reads the same micro-batches: positions, documents, labels and the number of tokens never travel.

    Args:
        engine: of DeepSpeed; `forward`, `backward` and `step` are the loop's from here on.
        mesh: this rank's place.
    """

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        self._engine, self._mesh = engine, mesh
        self._schedule, self._rank = mesh.plan.spec.schedule, mesh.index("pp")
        self._lanes = Lanes(self._schedule, mesh.lanes, self._rank, mesh.device)
        self._tied = TiedEmbedding(engine.module, mesh)
        self._running = False
        for name in ("forward", "backward", "step"):
            setattr(engine, name, self._guarded(name, getattr(engine, name)))
        dtype = TORCH_DTYPES[mesh.plan.spec.training.precision]
        self._work = Work(self._forward, engine.backward, lambda batch: handed(engine.module, mesh, batch, dtype))
        self.most_held = 0
        """Chunks whose activations were alive at the same time in the last training step."""

    def train(self, batches: Iterator[Batch]) -> list[Tensor]:
        """One optimizer step; the losses of the micro-batches that ended on this rank."""
        with self.step(batches) as step:
            step.run(self._schedule.passes(self._rank))
        self.most_held = step.most_held
        return step.losses

    @contextlib.contextmanager
    def step(self, batches: Iterator[Batch]) -> Iterator[Step]:
        """Within it the passes of a step may run; at its end gradients are reduced and the optimizer steps."""
        with reduce_at_end(self._engine):
            step = Step(self._schedule, self._rank, self._work, self._lanes, self._ready(batches))
            yield step
            self._tied.sum_gradient(self._engine.optimizer)
        self._engine.step()

    def evaluate(self, batches: Iterator[Batch], count: int) -> list[Tensor]:
        """Forward passes of so many micro-batches; the losses of those that ended on this rank."""
        schedule = replace(self._schedule, micro_batches=count)
        step = Step(schedule, self._rank, self._work, self._lanes, self._ready(batches))
        with torch.no_grad():
            step.run(schedule.forward_passes())
        return step.losses

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within it the engine's methods may be called."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _ready(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Stages have to know how long a micro-batch is before the model is called with it."""
        return (ready_inputs(dict(batch), self._mesh) for batch in batches)

    def _forward(self, chunk: int, received: Outputs, batch: Batch) -> Tensor | Outputs:
        output = self._engine(chunk=chunk, received=received, **batch)
        return output if isinstance(output, tuple) else output.loss

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that only this loop may call: no stage can go through a micro-batch by itself."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                raise RunError(
                    f"engine.{name} with pp {self._schedule.pp}: a stage cannot go through a micro-batch by itself. "
                    "Write loss = engine.train_batch(batches), with batches = iter(loader), in place of "
                    "engine(**batch), engine.backward(loss) and engine.step(); engine.eval_batch(batches) evaluates",
                    everywhere=True,
                )
            return method(*args, **kwargs)

        return guarded


def forward_and_backward(model: nn.Module, mesh: Mesh, batch: Batch) -> list[Tensor]:
    """One micro-batch through the stages of a model without an engine; its loss, where it ends on this rank.

    Gradients are left in `grad`, those of a tied embedding summed over its stages.
    """
    schedule, rank = replace(mesh.plan.spec.schedule, micro_batches=1), mesh.index("pp")

    def forward(chunk: int, received: Outputs, one: Batch) -> Tensor | Outputs:
        output = model(chunk=chunk, received=received, **one)
        return output if isinstance(output, tuple) else output.loss

    dtype = next(model.parameters()).dtype
    work = Work(forward, torch.autograd.backward, lambda one: handed(model, mesh, one, dtype))
    lanes, batches = Lanes(schedule, mesh.lanes, rank, mesh.device), iter([ready_inputs(dict(batch), mesh)])
    step = Step(schedule, rank, work, lanes, batches)
    step.run(schedule.passes(rank))
    TiedEmbedding(model, mesh).sum_gradient(None)
    return step.losses
