"""What a step took and did, as a row of metrics: `StepMeter(engine).train_batch(batches)` in place of the engine's.

Every rank knows its own time and memory. They are put together in one small message every `GATHER_EVERY` steps, whose
result is read a step later: no step waits for it.

Ends a run at the first loss or gradient norm that is not finite, before a checkpoint takes over its weights.

A dynamic loss scale of fp16 finds its size by steps that it skips: their norms are infinite by design, and end the run
when the scale has come to its minimum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.cost.step import utilisation
from parcompile.cost.workload import Workload
from parcompile.doctor.records import STEP
from parcompile.runtime.data import Batch
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.expert_parallel import REFUSED, Capacity
from parcompile.runtime.groups import Mesh
from parcompile.runtime.liveness import records
from parcompile.runtime.liveness.monitor import say
from parcompile.runtime.loss import own_part
from parcompile.runtime.model.lora import without_peft
from parcompile.runtime.profiling.recorder import peak_bytes
from parcompile.runtime.router_losses import RouterLosses
from parcompile.runtime.transport.backend import gather_objects
from parcompile.spec import Precision
from parcompile.spec.values import workload_of

from .router_bias import KEPT, RouterBiases

GATHER_EVERY = 10
PHASES = {"in the forward pass": "forward", "in the backward pass": "backward", "in the optimizer step": "optimizer"}
_OWN, _PEAK = 0, 1


def known_work(mesh: Mesh) -> Workload | None:
    """What a step computes, where the plan's accelerator has a known peak and runs it."""
    work = workload_of(mesh.plan.spec)
    return None if mesh.device.type == "cpu" or work.accelerator == "cpu" or not work.names_machine else work


class StepMeter:
    """Trains step by step and measures each. Every rank has one, or none.

    A row holds numbers by name, those of a layer, phase or parameter group behind a slash:

    - `loss`, `gradient_norm` (before clipping), `lr` (and `lr/1`, … of further groups whose rate differs), as of the
      step: the rate is that which it took, and a step that fp16's loss scale skipped has an infinite norm;
    - `tokens` of the step, its `seconds`, `tokens_per_s` of all ranks, and `mfu` where the plan's accelerator has a
      known peak and runs it;
    - `phase_seconds/forward`, `/backward` and `/optimizer` of this rank, on CPUs and where records are kept: elsewhere
      the host runs ahead of the device;
    - `skipped_steps` so far, under a dynamic loss scale of fp16, and `nonfinite_steps` of this process, whose loss or
      norm was not finite without one;
    - after a gathering, of the steps before it: `memory_peak_bytes`, the most that a rank has held since it began, and
      `memory_peak_rank`; on CPUs `slowest_rank`, `slowest_seconds` and `fastest_seconds`, the mean times of ranks in a
      step without what they wait for each other; `router_load/LAYER`, the tokens of the fullest expert over the mean
      of all, where the plan has losses or biases of routers: 1 is balanced; `refused_choices`, the share of choices
      that experts refused, where they have a capacity.

    Args:
        engine: from `initialize`.
        gather_every: steps between two gatherings; the first is after the second step.
    """

    def __init__(self, engine: Any, gather_every: int = GATHER_EVERY) -> None:
        self._engine, self._mesh, self._every = engine, engine.mesh, gather_every
        plan, training = engine.mesh.plan, engine.mesh.plan.spec.training
        self._length = training.sequence_length
        self._scales = training.precision is Precision.FP16 and training.loss_scale == 0
        self._on_cpu = self._mesh.device.type == "cpu"
        self._work = known_work(self._mesh)
        self._world_size = plan.world_size
        self._steps, self._nonfinite, self._own, self._since = 0, 0, 0.0, 0
        self._coming: tuple[Any, Tensor] | None = None
        shape, model = plan.spec.model.shape, without_peft(engine.module)
        counting = (getattr(model, "loss_function", None), getattr(engine.module, KEPT, None))
        self._routers: list[Any] = [one for one in counting if isinstance(one, RouterLosses | RouterBiases)][-1:]
        self._capacity: Capacity | None = getattr(model, REFUSED, None)
        self._layers, self._experts = shape.num_hidden_layers, 0 if shape.moe is None else shape.moe.num_choices

    def train_batch(self, batches: Iterator[Batch]) -> dict[str, float]:
        """One step of `engine.train_batch`; its row, the same on all ranks but for times and phases.

        Raises:
            StopIteration: there are no more batches.
            RunError: as the engine's.
        """
        engine = self._engine
        tokens = engine.train_batch_size() * self._length
        rates = [float(rate) for rate in engine.get_lr()]
        skipped, waited, started = engine.skipped_steps, records.waiting_seconds, time.perf_counter()
        records.begin_step()
        loss = float(engine.train_batch(batches))
        seconds = time.perf_counter() - started
        self._steps += 1
        self._since += 1
        self._own += seconds - (records.waiting_seconds - waited)
        row = {"loss": loss}
        norm, skips = engine.get_global_grad_norm(), engine.skipped_steps > skipped
        if norm is not None:
            # DeepSpeed writes -1 for a norm that is infinite or no number.
            row["gradient_norm"] = math.inf if skips or float(norm) < 0 else float(norm)
        # DeepSpeed skips such steps in every precision; only a dynamic loss scale means to.
        self._nonfinite += not (skips and self._scales) and not all(map(math.isfinite, row.values()))
        row["lr"] = rates[0]
        row |= {f"lr/{number}": rate for number, rate in enumerate(rates) if number and rate != rates[0]}
        row |= {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
        if self._work is not None:
            row["mfu"] = utilisation(self._work, row["tokens_per_s"] / self._world_size)
        if self._on_cpu and records.steps:
            phases = records.steps[-1][STEP.index("phases")]
            row |= {f"phase_seconds/{short}": phases[name] for name, short in PHASES.items() if name in phases}
        if self._scales:
            row["skipped_steps"] = engine.skipped_steps
        row["nonfinite_steps"] = self._nonfinite
        row |= self._gathered()
        if self._steps == 2 or self._steps % self._every == 0:
            self._gather()
        return row

    def _gather(self) -> None:
        """Posts the message: each rank's time and peak, and how often the experts of each layer were chosen."""
        sent = torch.zeros(2 * self._world_size + 2 + self._layers * self._experts, dtype=torch.float64)
        of_ranks, of_choices, of_layers = self._parts(sent)
        of_ranks.view(-1, 2)[self._mesh.rank] = torch.tensor(
            [self._own / self._since, float(peak_bytes(self._mesh.device))], dtype=torch.float64
        )
        for one in self._routers:
            for layer, load in zip(one.layers, one.loads, strict=True):
                of_layers.view(self._layers, -1)[layer, : len(load)] += load.cpu()
                load.zero_()
        if self._capacity is not None:
            of_choices.copy_(torch.tensor(self._capacity.told(), dtype=torch.float64))
        self._own, self._since = 0.0, 0
        sent = sent.to(self._mesh.device)
        self._coming = dist.all_reduce(sent, async_op=True), sent

    def _parts(self, message: Tensor) -> tuple[Tensor, ...]:
        """What ranks tell of themselves, choices that were refused and all, and how often experts were chosen."""
        return torch.split(message, [2 * self._world_size, 2, self._layers * self._experts])

    def _gathered(self) -> dict[str, float]:
        """What the message of the step before has brought."""
        if self._coming is None:
            return {}
        (work, brought), self._coming = self._coming, None
        if work is not None:
            work.wait()
        of_ranks, of_choices, of_layers = self._parts(brought.cpu())
        own, peaks = of_ranks.view(-1, 2).unbind(1)
        row = {"memory_peak_bytes": float(peaks.max()), "memory_peak_rank": int(peaks.argmax())}
        if self._on_cpu and self._world_size > 1:
            row["slowest_rank"] = int(own.argmax())
            row |= {"slowest_seconds": float(own.max()), "fastest_seconds": float(own.min())}
        if of_choices[1]:
            row["refused_choices"] = float(of_choices[0] / of_choices[1])
        for layer, load in enumerate(of_layers.view(self._layers, -1) if self._experts else ()):
            if load.any():
                row[f"router_load/{layer}"] = float(load.max() / load.mean())
        return row


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
            raise everywhere(
                f"step {step}: the gradient norm is not a finite number, and the dynamic loss scale of fp16 is at its "
                f"minimum: it has skipped the {self._skipped} steps before. {self._how_to_go_on(step - 1)}"
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
        # The norm is the same on all ranks, so that all come here at the same step.
        everyones = gather_objects(lost) if self._mesh.plan.world_size > 1 else [lost]
        ranks = [rank for rank, one in enumerate(everyones) if one]
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
