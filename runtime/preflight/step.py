"""A training step without memory: the engine that training uses, DeepSpeed included, micro-batch by micro-batch.

Micro-batches are alike, so two stand for all of a step: the first leaves its gradients, the second finds them and ends
the step with the reduction and the optimizer. Messages of a step with m micro-batches are those of the first m times,
and once what the second sends more. What a micro-batch takes is the peak of the second before the first gradients are
reduced.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.backends.deepspeed.write import ds_config
from parcompile.layout.stages import Stage
from parcompile.runtime.deepspeed_patches import (
    flat_weights,
    kept_gradients,
    master_shards,
    reduce_buckets,
    shape_tensors,
)
from parcompile.runtime.groups import Mesh
from parcompile.runtime.groups.mpu import Mpu

from .counting import Counts, Tally
from .sharded import StageModel
from .stand_in import META
from .tracker import MetaTracker

RUN = 2
"""Micro-batches that are run."""


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Bytes that the live engine holds."""

    weights: int
    master: int
    moments: int
    gradients: int
    bucket: int
    """What gradients are copied to before they are reduced."""


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """What a step sent, held and took."""

    counts: Counts
    control: int
    """Messages of a few bytes, which steer the step."""
    static: StaticBytes
    activation_bytes: int
    """The peak of a micro-batch's forward and backward, beyond what was held before it."""
    kept_bytes: int
    """What its forward leaves for its backward."""
    end_bytes: int
    """The peak of the last micro-batch with reduction and optimizer, beyond what was held before it."""
    held_bytes: int
    """What is held between micro-batches."""


def run_step(model: nn.Module, mesh: Mesh, tracker: MetaTracker, stages: tuple[Stage, ...]) -> StepMeasurement:
    """One step of this rank's stage.

    Raises:
        RunError: the model refuses to run.
    """
    staged = StageModel(model, mesh.plan, stages)
    engine, weights, master = _engine(staged, mesh, tracker)
    batch, optimizer = _batch(mesh), engine.optimizer
    _first_step(optimizer.optimizer, foreach=mesh.plan.spec.cluster.accelerator != "cpu")
    held, kept, gradients, bucket = 0, 0, 0, 0
    for micro in range(RUN):
        tracker.phase = f"micro {micro}"
        # Cycles that are collected in the middle of a micro-batch would make it look smaller.
        gc.collect()
        held = tracker.restart_peak()
        inputs = dict(batch) if staged.first else {**batch, "hidden": _received(mesh)}
        loss = engine(**inputs)
        kept = tracker.live_bytes - held
        engine.backward(loss)
        del loss, inputs
        engine.step()
        if micro == 0:
            gradients, bucket = _storage_bytes(kept_gradients(engine)), _nbytes(reduce_buckets(optimizer))
    moments = sum(
        value.nbytes
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    counts, control = _of_step(tracker, mesh.plan.spec.training.gradient_accumulation_steps)
    return StepMeasurement(
        counts=counts,
        control=control,
        static=StaticBytes(weights, master, moments, gradients, bucket),
        activation_bytes=(tracker.peak_before_reduction or tracker.peak_bytes) - held,
        kept_bytes=kept,
        end_bytes=tracker.peak_bytes - held,
        held_bytes=held,
    )


def _engine(model: nn.Module, mesh: Mesh, tracker: MetaTracker) -> tuple[Any, int, int]:
    """The engine that training uses, and the bytes of its weights and of its master weights."""
    import deepspeed

    plan = mesh.plan
    config = ds_config(plan)
    config["gradient_accumulation_steps"] = RUN
    config["train_batch_size"] = RUN * plan.spec.training.micro_batch_size * plan.spec.parallelism.dp
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        mpu=Mpu(mesh),
        config=config,
        dist_init_required=False,
    )
    # DeepSpeed keeps the shapes of parameters as meta tensors, which have memory here.
    tracker.forget(shape_tensors(optimizer))
    return engine, _nbytes(flat_weights(optimizer)), _nbytes(master_shards(optimizer))


def _first_step(adam: torch.optim.Optimizer, *, foreach: bool) -> None:
    """Creates the optimizer's moments, which later steps find; `foreach` is what torch chooses on accelerators."""
    for group in adam.param_groups:
        group["foreach"] = foreach
        for master in group["params"]:
            master.grad = torch.zeros_like(master)
    adam.step()
    adam.zero_grad(set_to_none=True)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory that tensors share or have for themselves."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


def _batch(mesh: Mesh) -> dict[str, Tensor]:
    training = mesh.plan.spec.training
    shape = training.micro_batch_size, training.sequence_length // mesh.size("cp")
    tokens = torch.empty(shape, dtype=torch.long, device=META)
    # What `PlanLoader` gives; the number of tokens comes with it.
    count = torch.empty((), device=META)
    return {
        "input_ids": tokens,
        "labels": tokens,
        "shift_labels": tokens,
        "position_ids": tokens,
        "num_items_in_batch": count,
    }


def _received(mesh: Mesh) -> Tensor:
    """Hidden states as the stage before sends them."""
    from parcompile.runtime.model.dtypes import TORCH_DTYPES

    spec = mesh.plan.spec
    length = spec.training.sequence_length // mesh.size("cp")
    length //= mesh.size("tp") if spec.parallelism.sequence_parallel else 1
    shape = spec.training.micro_batch_size, length, spec.model.shape.hidden_size
    return torch.empty(shape, dtype=TORCH_DTYPES[spec.training.precision], device=META, requires_grad=True)


def _of_step(tracker: MetaTracker, micro_batches: int) -> tuple[Counts, int]:
    micro, last = tracker.counts(["micro 0"]), tracker.counts([f"micro {RUN - 1}"])
    found: Counts = {}
    control = 0
    for key in (*micro, *(key for key in last if key not in micro)):
        every, end = micro.get(key, Tally()), last.get(key, Tally())
        once = Tally(end.messages - every.messages, end.wire_bytes - every.wire_bytes)
        total = every.times(micro_batches) + once
        if key[1] == "control":
            control += total.messages
        else:
            found[key] = total
    return found, control
