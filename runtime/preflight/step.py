"""The model of one rank, really built: our layers and injection, without memory, the layers of its stage only.

And a training step of it: the engine that training uses, DeepSpeed included, micro-batch by micro-batch.

Micro-batches are alike, so two stand for all of a step: the first leaves its gradients, the second finds them and ends
the step with the reduction and the optimizer. Messages of a step with m micro-batches are those of the first m times,
and once what the second sends more. What a micro-batch takes is the peak of the second before the first gradients are
reduced. A rank of a pipeline runs its chunks, with the messages that its schedule has.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from parcompile.backends.deepspeed.write import ds_config
from parcompile.layout.pipeline import Pass
from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.engine import before_reduction
from parcompile.runtime.deepspeed_patches.norm import is_on_host, tensors_on_host, weights_on_host
from parcompile.runtime.deepspeed_patches.optimizer_state import (
    add_in_place,
    flat_weights,
    forget_sums,
    is_of_stage_3,
    kept_gradients,
    master_shards,
    reduce_buckets,
    shape_tensors,
)
from parcompile.runtime.engine import options_for_deepspeed
from parcompile.runtime.engine.unsharded import sum_once
from parcompile.runtime.expert_parallel import take_over_norm
from parcompile.runtime.groups import Mesh, Mpu
from parcompile.runtime.inject import Slices, inject, register_gradient_sums
from parcompile.runtime.inject.regions import recompute_as_planned
from parcompile.runtime.micro_batch import DOCUMENTS, FIRST_SAMPLE
from parcompile.runtime.model.lora import without_peft
from parcompile.runtime.model.pretrained import instantiate
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.optimizers import join_shards
from parcompile.runtime.pipeline import PipelinedLoop

from .counting import Counts, Tally, nbytes
from .stand_in import MetaTracker, default_device

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as the rank holds it, and the ranges of the whole one that were copied into it (None: all of it)."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    ranges: Ranges | None
    source: str | None
    """The parameter that they came from; None when several."""
    experts: Ranges | None = None
    """Of a parameter that holds experts, those that were copied; None: all."""


Builder = Callable[[], nn.Module]
"""Builds a user module, whole."""


def build_sharded(mesh: Mesh, tracker: MetaTracker, builder: Builder | None = None) -> tuple[nn.Module, list[Held]]:
    """This rank's part of the whole model, and what it holds; a user module comes from `builder`.

    Raises:
        RunError: the model cannot be injected.
    """
    plan = mesh.plan
    dtype = TORCH_DTYPES[plan.spec.training.precision]
    with tracker.building():
        model = instantiate(plan, dtype) if builder is None else builder()
    model = tracker.place(model, dtype)
    with default_device(mesh.device):
        whole = {_storage(parameter): (name, parameter) for name, parameter in model.named_parameters()}
        tracker.keep_copies = True
        inject(model, mesh)
        tracker.keep_copies = False
    tracker.injected(model)
    if plan.spec.model.shape.user_module is None and mesh.device.type == "meta":  # elsewhere it has been done
        register_gradient_sums(model, mesh)
    slices = Slices(mesh)
    held = [_held(name, parameter, slices, whole, tracker) for name, parameter in model.named_parameters()]
    tracker.forget_copies()
    recompute_as_planned(model, plan, mesh.rank)
    return model.train(), held


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _held(
    name: str, parameter: Tensor, slices: Slices, whole: Mapping[int, tuple[str, Tensor]], tracker: MetaTracker
) -> Held:
    piece_of = slices.of(name)
    dim, dealt = piece_of.dim, piece_of.layout.ep > 1
    shape, original = tuple(parameter.shape), whole.get(_storage(parameter))
    if original is not None:
        return Held(name, shape, parameter.nbytes, None, original[0])
    ranges, sources = [], set()
    experts: list[tuple[int, int]] = []
    for _, piece in sorted(tracker.copies_into(parameter), key=lambda copy: copy[0]):
        found = whole.get(_storage(piece))
        if found is None or piece.numel() == 0:
            continue
        if dim is None and piece.shape == found[1].shape:
            return Held(name, shape, parameter.nbytes, None, found[0])
        if dealt:
            along = piece_of.layout.expert_dim
            first = piece.storage_offset() // found[1].stride(along)
            experts.append((first, first + piece.shape[along]))
        sources.add(found[0])
        if dim is None:
            continue
        start = piece.storage_offset() // found[1].stride(dim) % found[1].shape[dim]
        ranges.append((start, start + piece.shape[dim]))
    source = sources.pop() if len(sources) == 1 else None
    # Every stretch of experts is cut alike, and every range of them taken from the same stretches.
    held = None if dim is None and experts else joined(dict.fromkeys(ranges))
    return Held(name, shape, parameter.nbytes, held, source, tuple(dict.fromkeys(experts)) or None)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Neighbouring ranges as one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


Documents = list[list[int]]
RUN = 2
"""Micro-batches that are run, the first and the last of a step; one more at stages 1 (`BETWEEN`) and 3 (`TRACE`)."""
BETWEEN = "between"
"""The phase of one more between them at ZeRO stage 1, where a step has more: all gradients are there all the time.

Behind the first they come to be, and the last one's are let go of as they are reduced.
"""
TRACE = "trace"
"""The phase of one more before them at ZeRO stage 3, in which DeepSpeed learns the order of modules."""
END = "end of the step"


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Bytes that the live engine holds."""

    weights: int
    master: int
    moments: int
    gradients: int
    bucket: int
    """What gradients are copied to before they are reduced."""
    host: int
    """Of the optimizer on the host, with gradients and copies."""


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """What a chunk takes for a micro-batch, beyond what is held before."""

    kept: int
    """What its forward leaves for its backward."""
    forward_peak: int
    backward_peak: int
    """Beyond what the forward has left."""
    on_host: int
    """What its forward leaves for its backward in the host's memory."""


@dataclass(frozen=True, slots=True)
class TakenBytes:
    """What a step takes on this rank."""

    chunks: tuple[ChunkBytes, ...]
    end: int
    """The peak of the last micro-batch with reduction and optimizer, or of these alone, beyond what is held."""
    held: int
    """What is held between micro-batches."""
    between: int = 0
    """The peak of a micro-batch between the first and the last, beyond that; 0: none was run (`BETWEEN`)."""

    def activations(self, passes: Sequence[Pass]) -> int:
        """The peak of these passes, one after the other."""
        live = peak = 0
        for one in passes:
            chunk = self.chunks[one.chunk]
            peak = max(peak, live + (chunk.forward_peak if one.forward else chunk.backward_peak))
            live += chunk.kept if one.forward else -chunk.kept
        return peak

    def on_host(self, passes: Sequence[Pass]) -> int:
        """The most that they have in the host's memory."""
        kept = (self.chunks[one.chunk].on_host * (1 if one.forward else -1) for one in passes)
        return max(accumulate(kept), default=0)


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """What a step sent, held and took."""

    counts: Counts
    static: StaticBytes
    taken: TakenBytes


def run_step(model: nn.Module, mesh: Mesh, tracker: MetaTracker, documents: Documents | None = None) -> StepMeasurement:
    """One step of this rank, with all its virtual stages; `documents`: where those of each sequence begin, and its end.

    Raises:
        RunError: the model refuses to run.
    """
    tracker.name_layers(model)
    engine, weights, master = _engine(model, mesh, tracker)
    optimizer, losses = engine.optimizer, cast(Any, without_peft(engine.module)).loss_function
    if getattr(losses, "looks_ahead", False):
        with losses.ahead():  # the passes before a step are not measured
            pass
    on_host = is_on_host(optimizer)
    on_gpu = mesh.plan.spec.cluster.accelerator != "cpu"
    _first_step(optimizer, foreach=not on_host and on_gpu, fused=mesh.plan.spec.fuses_adam)
    gradients, bucket = 0, 0

    def look() -> None:
        """Behind the first micro-batch."""
        nonlocal gradients
        gradients = _storage_bytes(one for one in kept_gradients(engine) if tracker.is_on_device(one))
        if mesh.plan.spec.zero_stage == 2 and mesh.plan.spec.training.gradient_accumulation_steps == 1:
            forget_sums(optimizer)  # the next micro-batch stands for the only one of a step

    def look_into_bucket(_: Tensor) -> None:
        """Behind a gradient: at ZeRO stage 2 the bucket is there only then."""
        nonlocal bucket
        bucket = max(bucket, nbytes(reduce_buckets(optimizer)))

    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(look_into_bucket)
    run = _run_stages if mesh.size("pp") > 1 else _run_whole
    taken = run(engine, _batch(mesh, documents), tracker, look)
    moments = sum(
        value.nbytes
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    counts = _of_step(tracker, mesh.plan.spec.training.gradient_accumulation_steps)
    host = moments * on_host + _storage_bytes(tensors_on_host(optimizer))
    master, moments = (0, 0) if on_host else (master, moments)
    return StepMeasurement(counts, StaticBytes(weights, master, moments, gradients, bucket, host), taken)


def _run_whole(engine: Any, batch: dict[str, Any], tracker: MetaTracker, look: Callable[[], None]) -> TakenBytes:
    """Micro-batch by micro-batch; the last reduces the gradients and steps."""
    between = 0
    for phase in _phases(tracker.mesh.plan):
        held = _begin(tracker, phase)
        with default_device(tracker.device):  # for modules that make their positions there
            loss = engine(**batch).loss
        kept, ahead, there = tracker.live_bytes - held, tracker.peak_bytes - held, tracker.host_bytes
        before = tracker.restart_peak()
        engine.backward(loss)
        del loss
        engine.step()
        if phase == TRACE and (small := engine.optimizer.persistent_parameters):
            # They stay gathered, and every step gathers them at its end; the order of modules is known by now.
            small[0].all_gather(small)
        if phase == "micro 0":
            look()
        if phase == BETWEEN:
            between = max(ahead, tracker.peak_bytes - held)
    back = (tracker.peak_before_reduction or tracker.peak_bytes) - before
    return TakenBytes((ChunkBytes(kept, ahead, back, there),), max(ahead, tracker.peak_bytes - held), held, between)


def _phases(plan: Plan) -> list[str]:
    """Micro-batches of one stage, in their order."""
    spec = plan.spec
    several = spec.zero_stage == 1 and spec.parallelism.pp == 1 and spec.training.gradient_accumulation_steps > RUN
    first, *others = (f"micro {micro}" for micro in range(RUN))
    return [*[TRACE] * spec.shards_weights, first, *[BETWEEN] * several, *others]


def _run_stages(engine: Any, batch: dict[str, Any], tracker: MetaTracker, look: Callable[[], None]) -> TakenBytes:
    """This rank's chunks for one micro-batch after the other, and then what ends the step.

    The messages are those of the schedule; what comes in has shapes and no values.
    """
    loop, chunks = PipelinedLoop(engine, tracker.mesh), range(tracker.mesh.plan.spec.schedule.virtual)
    with loop.together(), loop.step(iter([dict(batch) for _ in range(RUN)])) as step:
        for micro in range(RUN):
            held = _begin(tracker, f"micro {micro}")
            ahead, kept, back, there = ([0] * len(chunks) for _ in range(4))
            for chunk in chunks:
                before, there[chunk] = tracker.restart_peak(), -tracker.host_bytes
                with default_device(tracker.device):
                    step.run([Pass(True, micro, chunk)])
                kept[chunk], ahead[chunk] = tracker.live_bytes - before, tracker.peak_bytes - before
                there[chunk] += tracker.host_bytes
            for chunk in reversed(chunks):
                before = tracker.restart_peak()
                step.run([Pass(False, micro, chunk)])
                back[chunk] = tracker.peak_bytes - before
            if micro == 0:
                look()
        held = _begin(tracker, END)
    return TakenBytes(tuple(map(ChunkBytes, kept, ahead, back, there)), tracker.peak_bytes - held, held)


def _begin(tracker: MetaTracker, phase: str) -> int:
    """A phase of the step; returns what is held before it."""
    tracker.phase = phase
    # Cycles that are collected in the middle of a micro-batch would make it look smaller.
    gc.collect()
    return tracker.restart_peak()


def _engine(model: nn.Module, mesh: Mesh, tracker: MetaTracker) -> tuple[Any, int, int]:
    """The engine that training uses, and the bytes of its weights and of its master weights."""
    import deepspeed

    plan = mesh.plan
    config = ds_config(plan)
    config["optimizer"]["params"].pop("fused", None)  # of which stand-ins of tensors know nothing
    if plan.spec.takes_cpu_adam:
        config["optimizer"]["params"]["torch_adam"] = True  # which keeps as much
    micro_batches = RUN if plan.spec.parallelism.pp > 1 else len(_phases(plan))
    config["gradient_accumulation_steps"] = micro_batches
    config["train_batch_size"] = micro_batches * plan.spec.training.micro_batch_size * plan.spec.parallelism.dp
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with tracker.offloading(), options_for_deepspeed(mesh, model, model_parameters=trained) as options:
        engine, optimizer, _, _ = deepspeed.initialize(
            **options, mpu=Mpu(mesh), config=config, dist_init_required=False
        )
    take_over_norm(engine, mesh)
    join_shards(engine, mesh)
    add_in_place(engine.optimizer)
    sum_once(engine, mesh)
    tracker.move_to_host(one for one in tensors_on_host(optimizer) if tracker.is_here(one))
    before_reduction(engine, tracker.begin_reduction)
    # DeepSpeed keeps the shapes of parameters as meta tensors, which have memory here.
    tracker.forget(shape_tensors(optimizer))
    weights = [] if weights_on_host(optimizer) else flat_weights(optimizer)
    # Weights in fp32 are their own master weights at ZeRO stage 0.
    held = {one.untyped_storage()._cdata for one in weights}
    masters = [one for one in master_shards(optimizer) if one.untyped_storage()._cdata not in held]
    return engine, nbytes(weights), nbytes(masters)


def _first_step(optimizer: Any, *, foreach: bool, fused: bool) -> None:
    """Creates the optimizer's moments, which later steps find.

    `foreach` is what torch chooses on accelerators. A `fused` kernel takes no memory, and does not know stand-ins of
    tensors: it is left out.
    """
    adam: torch.optim.Optimizer = optimizer.optimizer
    if is_of_stage_3(optimizer):  # its groups have their shards in its own step alone
        for number, shard in enumerate(master_shards(optimizer)):
            adam.param_groups[optimizer.sub_group_to_group_id[number]]["params"].append(shard)
    kept = [(master, master.grad) for group in adam.param_groups for master in group["params"]]
    for master, gradient in kept:
        master.grad = torch.zeros_like(master) if gradient is None else gradient
    for group in adam.param_groups:
        group["foreach"], group["fused"] = foreach, False
        if fused:
            cast(Any, adam)._init_group(group, *([] for _ in range(6)))
    if fused:
        cast(Any, adam).step = lambda *_, **__: None
    adam.step()
    for master, gradient in kept:
        master.grad = gradient  # on the host it stays
    for group in adam.param_groups if is_of_stage_3(optimizer) else ():
        group["params"] = []


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory that tensors share or have for themselves."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def _batch(mesh: Mesh, documents: Documents | None = None) -> dict[str, Any]:
    training = mesh.plan.spec.training
    shape = training.micro_batch_size, training.sequence_length // mesh.size("cp")
    tokens = torch.empty(shape, dtype=torch.long, device=mesh.device)
    # What `PlanLoader` gives; the number of tokens comes with it.
    count = torch.empty((), device=mesh.device)
    return {
        "input_ids": tokens,
        "labels": tokens,
        "shift_labels": tokens,
        "position_ids": tokens,
        "num_items_in_batch": count,
        FIRST_SAMPLE: 0,
        DOCUMENTS: documents,
    }


def _of_step(tracker: MetaTracker, micro_batches: int) -> Counts:
    """Without messages of a few bytes, which steer a step."""
    micro, last = tracker.counts(["micro 0"]), tracker.counts([f"micro {RUN - 1}", END])
    found: Counts = {}
    for key in (*micro, *(key for key in last if key not in micro)):
        every, end = micro.get(key, Tally()), last.get(key, Tally())
        once = Tally(end.messages - every.messages, end.wire_bytes - every.wire_bytes)
        if key[1] != "control":
            found[key] = every.times(micro_batches) + once
    return found
