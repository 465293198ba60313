"""Pipeline parallelism: the stages of a model, and the schedule that takes micro-batches through them.

Executes the passes of a schedule on this rank, and trains and evaluates an engine by one schedule a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from parcompile.layout.pipeline import RECEIVES_AHEAD, Pass, Schedule
from parcompile.runtime.data import ready_inputs
from parcompile.runtime.deepspeed_patches.engine import reduce_at_end
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.liveness import records
from parcompile.runtime.loss import own_part
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.transport import Arrival, Lanes, Like

from .stage import ChunkForward, Elsewhere, Skipped, TiedEmbedding, handed, hold_stage

Batch = Mapping[str, Any]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What passes compute."""

    forward: Callable[[int, Outputs, Batch], Tensor | Outputs]
    """From a chunk, what was received for it and the micro-batch to the loss (a scalar), or to what is handed on."""
    backward: Callable[[Tensor], None]
    """Starts from a scalar."""
    handed: Callable[[Batch], Sequence[Like]]
    """What travels between stages for a micro-batch."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What a forward pass leaves for its backward pass."""

    received: Outputs
    root: Tensor
    """The scalar from which backward starts."""
    gradients: list[Tensor]
    """Of what was handed on, once they have come."""


class Step:
    """The passes of one step on one rank; they may run all at once, or some of them at a time.

    Args:
        schedule: who sends what to whom.
        rank: this one's place in the pipeline.
        work: what passes compute.
        lanes: between the stages.
        batches: this rank's micro-batches, which every stage reads itself; taken as the schedule comes to them.
    """

    def __init__(self, schedule: Schedule, rank: int, work: Work, lanes: Lanes, batches: Iterator[Batch]) -> None:
        self._schedule, self._rank, self._work, self._lanes, self._source = schedule, rank, work, lanes, batches
        self._batches: list[Batch | None] = []
        self._like: list[Sequence[Like]] = []
        self._asked: dict[Pass, Arrival] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self.losses: list[Tensor] = []
        """Of the micro-batches that ended on this rank, its parts, without their graphs."""
        self.most_held = 0
        """Chunks whose activations were alive at the same time."""

    def run(self, passes: Sequence[Pass]) -> None:
        """Runs passes in their order. Without a backward pass among those of a step, nothing is kept for one.

        A receive is posted behind the launches of the pass before, and its send. On CUDA the host may have to wait for
        everything that is under way while it launches a pass (it loads a kernel, or asks for memory): so nothing may
        be under way then that another rank sends only after this pass.
        """
        for place, one in enumerate(passes):
            self._ask(one)
            self._pass(one)
            for ahead in passes[place + 1 : place + 1 + RECEIVES_AHEAD]:
                self._ask(ahead)
        self._lanes.finish()

    def _pass(self, one: Pass) -> None:
        records.at(micro_batch=one.micro_batch)
        received: Outputs = ()
        if self._schedule.source(self._rank, one) is not None:
            received = self._asked.pop(one).wait()
        outputs = self._forward(one, received) if one.forward else self._backward(one, received)
        if (to := self._schedule.target(self._rank, one)) is not None:
            self._lanes.send(to, outputs, forward=one.forward)

    def _ask(self, one: Pass) -> None:
        """Posts the receive of what a pass begins with."""
        source = self._schedule.source(self._rank, one)
        if source is None or one in self._asked:
            return
        self._read(one.micro_batch)
        self._asked[one] = self._lanes.receive(source, self._like[one.micro_batch], forward=one.forward)

    def _read(self, micro_batch: int) -> None:
        while len(self._batches) <= micro_batch:
            batch = next(self._source)
            self._batches.append(batch)
            self._like.append(self._work.handed(batch))

    def _forward(self, one: Pass, received: Outputs) -> Outputs:
        self._read(one.micro_batch)
        batch = self._batches[one.micro_batch]
        assert batch is not None
        if one.chunk == self._schedule.virtual - 1:
            self._batches[one.micro_batch] = None  # backward needs the shapes alone
        training = torch.is_grad_enabled()
        for tensor in received:
            tensor.requires_grad_(training)
        given = self._work.forward(one.chunk, received, batch)
        outputs: Outputs = ()
        gradients: list[Tensor] = []
        if isinstance(given, Tensor):
            self.losses.append(own_part(given).detach())
        else:
            outputs = tuple(tensor.detach() for tensor in given)
        if training:
            root = given if isinstance(given, Tensor) else _Boundary.apply(gradients, *given)  # type: ignore[no-untyped-call]
            self._held[one.micro_batch, one.chunk] = _Held(received, root, gradients)
            self.most_held = max(self.most_held, len(self._held))
        return outputs

    def _backward(self, one: Pass, gradients: Outputs) -> Outputs:
        held = self._held.pop((one.micro_batch, one.chunk))
        held.gradients[:] = gradients
        if held.root.requires_grad:  # the first stage may have frozen parameters alone: nothing to compute
            self._work.backward(held.root)
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in held.received)


class _Boundary(torch.autograd.Function):
    """From what left a stage in forward to the scalar from which its backward starts.

    An engine divides losses by accumulation steps and multiplies them with a loss scale; what the next stage sends has
    been through both, so that the scalar's own gradient is not looked at.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given


class PipelinedLoop:
    """The micro-batches of an engine's steps, through all stages.

    Every stage reads the same micro-batches: positions, documents, labels and the number of tokens never travel.

    Args:
        engine: of DeepSpeed; `forward`, `backward` and `step` are the loop's from here on.
        mesh: this rank's place.
    """

    def __init__(self, engine: Any, mesh: Mesh) -> None:
        self._engine, self._mesh = engine, mesh
        self._rank = mesh.index("pp")
        self._lanes = Lanes(self._schedule, mesh.lanes, self._rank, mesh.device)
        self._tied = TiedEmbedding(engine.module, mesh)
        self._running = False
        for name in ("forward", "backward", "step"):
            setattr(engine, name, self._guarded(name, getattr(engine, name)))
        dtype = TORCH_DTYPES[mesh.plan.spec.training.precision]
        self._work = Work(
            partial(_forward, engine), engine.backward, lambda batch: handed(engine.module, mesh, batch, dtype)
        )
        self.most_held = 0
        """Chunks whose activations were alive at the same time in the last training step."""

    @property
    def _schedule(self) -> Schedule:
        """The passes of the next step, whose batch may grow."""
        return replace(self._mesh.plan.spec.schedule, micro_batches=self._engine.gradient_accumulation_steps())

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

    def together(self) -> AbstractContextManager[Any]:
        """Within it the engine's methods may be called."""
        return mock.patch.object(self, "_running", True)

    def _ready(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Stages have to know how long a micro-batch is before the model is called with it."""
        return (ready_inputs(dict(batch), self._mesh) for batch in batches)

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that only this loop may call: no stage can go through a micro-batch by itself."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                raise everywhere(
                    f"engine.{name} with pp {self._schedule.pp}: a stage cannot go through a micro-batch by itself. "
                    "Write loss = engine.train_batch(batches), with batches = iter(loader), in place of "
                    "engine(**batch), engine.backward(loss) and engine.step(); engine.eval_batch(batches) evaluates"
                )
            return method(*args, **kwargs)

        return guarded


def _forward(model: Any, chunk: int, received: Outputs, batch: Batch) -> Tensor | Outputs:
    """What a chunk hands on, or the loss at the end of the pipeline; `model` may be an engine."""
    output = model(chunk=chunk, received=received, **batch)
    return output if isinstance(output, tuple) else output.loss


def forward_and_backward(model: nn.Module, mesh: Mesh, batch: Batch) -> list[Tensor]:
    """One micro-batch through the stages of a model without an engine; its loss, where it ends on this rank.

    Gradients are left in `grad`, those of a tied embedding summed over its stages.
    """
    schedule, rank = replace(mesh.plan.spec.schedule, micro_batches=1), mesh.index("pp")
    dtype = next(model.parameters()).dtype
    work = Work(partial(_forward, model), torch.autograd.backward, lambda one: handed(model, mesh, one, dtype))
    lanes, batches = Lanes(schedule, mesh.lanes, rank, mesh.device), iter([ready_inputs(dict(batch), mesh)])
    step = Step(schedule, rank, work, lanes, batches)
    step.run(schedule.passes(rank))
    TiedEmbedding(model, mesh).sum_gradient(None)
    return step.losses
