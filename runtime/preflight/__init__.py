"""Builds and runs what a plan describes before it is queued: real layers, any rank of any world, no cluster.

Which ranks are looked at, and everything that is compared on each of them, stands here.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import parcompile
from parcompile.plan import Plan
from parcompile.progress import tracked
from parcompile.runtime import errors
from parcompile.runtime.errors import RunError
from parcompile.spec.values import workload_of

from .compare import compare_activations, compare_groups, compare_messages, compare_parameters, compare_static
from .counting import Counts, MessageCounter, Tally
from .cuda_tracker import tracker_of
from .findings import Finding, Report, Verdict, device_findings
from .sharded import Builder, build_sharded
from .stand_in import device_of_plan, stand_in
from .step import RUN, Documents, run_step

BUILDER = "--model FILE.py:FUNCTION"


def chosen_ranks(plan: Plan) -> tuple[int, ...]:
    """The ranks that differ: first, last, one of every stage and every corner of the grid."""
    grid = plan.groups.grid
    sizes = {axis: grid.size((axis,)) for axis in grid.order}
    ends = [sorted({0, size - 1}) for size in sizes.values()]
    corners = (grid.rank(dict(zip(sizes, corner, strict=True))) for corner in itertools.product(*ends))
    stages = (grid.rank({"pp": stage}) for stage in range(sizes.get("pp", 1)))
    return tuple(sorted({0, plan.world_size - 1, *corners, *stages}))


def distinct_ranks(plan: Plan) -> tuple[int, ...]:
    """The ranks whose step differs: the first, the last, and the first of every stage that is like none before it."""
    grid, spec, work = plan.groups.grid, plan.spec, workload_of(plan.spec)
    kinds: dict[tuple[object, ...], int] = {}
    for index, stage in enumerate(spec.stages):
        shape = spec.model.shape
        key = (
            len(stage.layers),
            shape.dense(stage.layers),
            shape.routed(stage.layers),
            spec.model.shape.attending(stage.layers),
            stage.has_embedding,
            stage.has_head,
            work.of_stage(stage).recompute,
        )
        kinds.setdefault(key, grid.rank({"pp": index}))
    return tuple(sorted({0, plan.world_size - 1, *kinds.values()}))


def preflight(
    plan: Plan,
    ranks: Sequence[int] | None = None,
    builder: Builder | None = None,
    documents: Documents | None = None,
) -> Report:
    """Builds each of `ranks` without memory, runs a step, and compares with the plan.

    By default `chosen_ranks` are built and `distinct_ranks` run: what the others would run has the same shapes. A plan
    for a user module needs its `builder`. `documents`: where those that are packed into each sequence of a micro-batch
    begin, and its end.

    Raises:
        RunError: this process is part of a real world, or a rank is not in the plan's.
    """
    looked_at = tuple(sorted(set(ranks))) if ranks is not None else chosen_ranks(plan)
    for rank in looked_at:
        if not 0 <= rank < plan.world_size:
            raise RunError(f"rank {rank} is not in a world of {plan.world_size}: ranks are 0 … {plan.world_size - 1}")
    stepping = looked_at if ranks is not None else distinct_ranks(plan)
    sent: dict[int, Counts] = {}
    with _older_objects_left_alone(), device_of_plan(plan) as (device, why_not):
        findings = [
            finding
            for rank in tracked(looked_at, "building and running ranks")
            for finding in _rank(plan, rank, sent, builder, documents, device, steps=rank in stepping)
        ]
    count = plan.spec.training.gradient_accumulation_steps
    notes = [
        f"built: every layer of a rank's stage; run: {RUN} micro-batches, which stand for the step's {count}, "
        f"on rank {', '.join(map(str, stepping))}"
    ]
    notes.insert(0, _stands_for(plan, device, why_not))
    if plan.spec.parallelism.pp > 1:
        notes.append("pp: each stage is run alone; its messages are counted, what comes in has shapes and no values")
    return Report(plan.spec.name, plan.world_size, looked_at, tuple(findings), tuple(notes), sent)


@contextlib.contextmanager
def _older_objects_left_alone() -> Iterator[None]:
    """Steps collect garbage several times. Going through all that torch and DeepSpeed hold took half of a preflight."""
    import deepspeed

    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _rank(
    plan: Plan,
    rank: int,
    sent: dict[int, Counts],
    builder: Builder | None,
    documents: Documents | None,
    device: torch.device,
    *,
    steps: bool,
) -> Iterator[Finding]:
    codes = {refusal.code: refusal.message for refusal in plan.refusals}
    for code, message in codes.items():
        yield Finding(rank, f"[{code}]", "", "", Verdict.NOT_RUN, message)
    with stand_in(plan, rank, device) as mesh:
        yield from compare_groups(mesh)
        if plan.spec.model.shape.user_module is not None and builder is None:
            yield Finding(
                rank, "model", "", "", Verdict.NOT_RUN, f"a module of your own: say with {BUILDER} who builds it"
            )
            return
        if codes:
            return
        tracker = tracker_of(mesh)
        try:
            with tracker:
                model, held = build_sharded(mesh, tracker, builder)
                yield from compare_parameters(mesh, held)
                if not steps:
                    return
                step = run_step(model, mesh, tracker, documents)
        except RunError as error:
            yield Finding(rank, "building and running", "possible", "refused", Verdict.DIFFERS, str(error))
            return
        except Exception as error:  # the model's own code may raise anything
            yield Finding(rank, "building and running", "possible", "failed", Verdict.DIFFERS, _failure(error))
            return
        sent[rank] = step.counts
        yield from compare_static(mesh, step)
        yield from compare_activations(mesh, step)
        yield from compare_messages(mesh, step)
        yield from device_findings(rank, tracker)


def _stands_for(plan: Plan, device: torch.device, why_not: str) -> str:
    if device.type == "cuda":
        return f"device: cuda without a GPU, which answers as {plan.spec.cluster.accelerator}"
    return f"device: meta, not cuda: {why_not}" if why_not else "device: meta"


def _failure(error: Exception) -> str:
    ours = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, parcompile.__file__, errors.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    where = next((one for one in reversed(frames) if not one.filename.startswith(ours)), frames[-1])
    reason = str(error).strip().partition("\n")[0]
    return (
        f"{type(error).__name__} at {where.filename}:{where.lineno}: {reason} (there are no values here: what asks for "
        "one can only be run on real ranks, with --live)"
    )
