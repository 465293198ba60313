"""Builds and runs what a plan describes before it is queued: real layers, any rank of any world, no cluster.

Which ranks are looked at, and everything that is compared on each of them, stands here.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import parcompile
from parcompile.cost.collectives import collectives, stage_exchanges
from parcompile.cost.estimate import GRADIENTS
from parcompile.cost.footprint import footprint
from parcompile.cost.memory import gathered_numels, static_memory
from parcompile.cost.offload import host_activations, host_memory
from parcompile.cost.workload import RankPlace, Workload
from parcompile.layout.groups import CP_LEVELS, EXPERT_DP
from parcompile.layout.pipeline import Schedule, Stage
from parcompile.layout.sequence import CpImplementation
from parcompile.plan import Plan
from parcompile.plan.holding import Holding
from parcompile.progress import tracked
from parcompile.runtime import errors
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.spec import Spec
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes

from .counting import Counts, MessageCounter, Tally, by_group
from .cuda_tracker import tracker_of
from .findings import Finding, Report, Verdict, device_findings, group_in_words
from .stand_in import device_of_plan, older_objects_left_alone, stand_in
from .step import RUN, Builder, Documents, Held, Ranges, StepMeasurement, build_sharded, joined, run_step

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
    plan: Plan, ranks: Sequence[int] | None = None, builder: Builder | None = None, documents: Documents | None = None
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
    with older_objects_left_alone(), device_of_plan(plan) as (device, why_not):
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


# Every comparison yields findings of one rank. Its two sides are independent: shapes, slices, groups and messages are
# read from the model and the process groups that were built, what is expected of them from the plan and the estimate.

ACTIVATION_TOLERANCE = 0.10
"""How far the estimate of activations may be from the bytes that were counted, relative to what was counted.

Formulas leave out what is small beside a layer (statistics of norms, buffers of the loss, single gradients in flight):
up to about 7 % on the models that are tested. An estimate that is 20 % low is found with room to spare.
"""

HOST_TOLERANCE = 0.01
"""Of activations on the host, which are few large tensors of each layer."""

WIRE_TOLERANCE = 1e-9
"""Of bytes on the wire: they are computed exactly, in floating point."""


def compare_groups(mesh: Mesh) -> Iterator[Finding]:
    """The process groups that this rank got."""
    wrong = [
        f"group {name} is {group_in_words(live)}, the plan says {group_in_words(planned)}"
        for name, live, planned in mesh.differing_groups()
    ]
    count = len(mesh.groups)
    yield _finding(mesh.rank, "process groups", f"{count}", f"{count - len(wrong)} as planned", wrong)


def compare_parameters(mesh: Mesh, held: list[Held]) -> Iterator[Finding]:
    """Shapes, slices and bytes of the parameters of this rank's stage."""
    plan, tp = mesh.plan, mesh.index("tp")
    rows, width = plan.tensors(), plan.spec.training.precision.bytes
    holding, found = Holding(plan, mesh.index("pp")), {one.name: one for one in held}
    planned = {name: row for name, row in plan.parameters.expanded() if name in holding}
    shapes, slices = [], []
    for name in planned:
        layout, one = rows[planned[name]][1], found.get(name)
        if one is None:
            shapes.append(f"{name} is missing")
            continue
        if one.shape != layout.local_shape:
            shapes.append(f"{name} is {list(one.shape)}, the plan says {list(layout.local_shape)}")
        wanted = None
        if layout.ranges is not None and layout.dim is not None:
            real = planned[name].shape[layout.dim]
            wanted = _real(layout.ranges[tp], real)
            if one.ranges is None and wanted == ((0, real),):
                continue
        if one.ranges != wanted:
            slices.append(f"{name} holds {_shown(one.ranges)} of dim {layout.dim}, the plan says {_shown(wanted)}")
        elif layout.ep > 1 and one.experts != (dealt := layout.experts(mesh.index("ep"))):
            slices.append(f"{name} holds the experts {one.experts}, the plan says {dealt}")
        elif one.source not in (name, None) or (one.source is None and wanted):
            slices.append(f"{name} was taken from {one.source or 'several parameters'}")
    shapes += [f"{name} is in the model, not in the plan" for name in found if name not in planned]
    count = len(planned)
    yield _finding(mesh.rank, "parameter shapes", f"{count} tensors", f"{count - len(shapes)} as planned", shapes)
    yield _finding(mesh.rank, "parameter slices", f"{count} tensors", f"{count - len(slices)} as planned", slices)
    stage = _stage(plan.spec, mesh)
    expected = sum(rows[planned[name]][1].local_numel for name in planned) * width
    unpadded = static_memory(workload_of(plan.spec), stage).numel * width
    unpadded += sum(rows[row][1].local_numel for row in planned.values() if not row.trained) * width
    total = sum(one.nbytes for one in found.values())
    yield _bytes(mesh.rank, "parameter bytes", unpadded, total, extra=expected != unpadded)


def compare_static(mesh: Mesh, step: StepMeasurement) -> Iterator[Finding]:
    """What the live engine holds for the whole run, byte for byte."""
    spec = mesh.plan.spec
    memory, static = static_memory(workload_of(spec), _stage(spec, mesh), _place(mesh)), step.static
    yield _bytes(mesh.rank, "weights", memory.weight_bytes, static.weights)
    yield _bytes(mesh.rank, "master weights", memory.master_bytes, static.master)
    yield _bytes(mesh.rank, "optimizer state", memory.optimizer_bytes, static.moments)
    yield _bytes(mesh.rank, "gradients", memory.gradient_bytes, static.gradients)
    yield _bytes(mesh.rank, "reduce bucket", memory.bucket_bytes, static.bucket)
    if (host := host_memory(workload_of(spec), _stage(spec, mesh))) is not None:
        yield _bytes(mesh.rank, "states on the host", host.total_bytes, static.host)


def compare_activations(mesh: Mesh, step: StepMeasurement) -> Iterator[Finding]:
    """The peak of one micro-batch, and whether the end of the step stays under the estimated peak."""
    spec, rank = mesh.plan.spec, mesh.rank
    work, index = workload_of(spec), mesh.index("pp")
    # What is compared is the last micro-batch. Those between the first and the last, which hold more, are in the peak.
    alone = replace(work, micro_batches=1 if work.pp > 1 else min(work.micro_batches, RUN))
    one = footprint(alone, place=_place(mesh)).stages[index].components
    planned, taken = one["activations"] + one["logits"], step.taken
    # Small weights are gathered before it.
    small = gathered_numels(work, _stage(spec, mesh))[0]
    planned += one.get("gathered weights", 0.0) - work.element_bytes * small
    if (kept := host_activations(work, _stage(spec, mesh))) is not None:
        there = taken.on_host(_beginning(work.schedule).passes(index))
        yield _near(rank, "activations on the host", kept.total_bytes, there, HOST_TOLERANCE)
    of_one = taken.activations(Schedule(work.pp, 1, work.virtual_stages).passes(index))
    if spec.zero_stage == 2:
        of_one -= step.static.bucket  # allocated anew in every backward pass
        # The sums of a step's only micro-batch are planned as held, and come with its first reduction.
        planned += step.static.gradients * (work.micro_batches == 1)
    # At stage 2 a reduction may take most. With activations on the host a layer does, behind whose gradients others are
    # reduced at stages 2 and 3.
    if one["optimizer step"] == 0 and (kept is None or spec.zero_stage < 2):
        yield _near(rank, "activations of a micro-batch", planned, of_one, ACTIVATION_TOLERANCE)
    held, whole = format_bytes(taken.held), format_bytes(of_one)
    of_what = f"; held {held}, a micro-batch takes {whole}, the end of the step {format_bytes(taken.end)}"
    of_what += f", a micro-batch before the last {format_bytes(taken.between)}" if taken.between else ""
    yield _near(rank, "peak of the step", *peak_bytes(mesh, step), ACTIVATION_TOLERANCE, of_what)


def _near(rank: int, subject: str, planned: float, found: int, tolerance: float, of_what: str = "") -> Finding:
    """Bytes of the estimate beside those that were counted."""
    error = planned / found - 1 if found else float(planned > 0)
    wrong = [f"the estimate is {error:+.1%} off, {tolerance:.0%} are allowed{of_what}"]
    counted = f"{format_bytes(found)} ({error:+.1%})"
    return _finding(rank, subject, format_bytes(planned), counted, wrong if abs(error) > tolerance else [])


def peak_bytes(mesh: Mesh, step: StepMeasurement) -> tuple[float, int]:
    """The peak of a step on this rank as it is estimated, and as it was counted; without buffers of the pipeline."""
    work, index, taken = workload_of(mesh.plan.spec), mesh.index("pp"), step.taken
    whole = footprint(work, place=_place(mesh)).stages[index]
    peak = whole.total_bytes - whole.components["pipeline buffers"] - whole.components["framework"]
    return peak, taken.held + max(taken.end, taken.between, taken.activations(_beginning(work.schedule).passes(index)))


def _beginning(schedule: Schedule) -> Schedule:
    """With as many micro-batches as fill the pipeline: further ones hold no more."""
    full = 2 * schedule.pp + schedule.group_size
    return replace(schedule, micro_batches=min(schedule.micro_batches, full))


def compare_messages(mesh: Mesh, step: StepMeasurement) -> Iterator[Finding]:
    """Messages and bytes of each group, in a step."""
    spec, rank = mesh.plan.spec, mesh.rank
    work = workload_of(spec)
    planned = by_group(_planned(work, mesh))
    found = {name: one for name, one in by_group(step.counts).items() if _ranks_of(mesh, name) > 1}
    if mesh.plan.spec.parallelism.cp_implementation is CpImplementation.DOUBLE_RING:
        planned = _one_level(planned)  # both rings run over the cp group
    # At ZeRO stage 3, how many weights stay gathered where forward turns to backward depends on the order of modules.
    slack = work.micro_batches * gathered_numels(work, _stage(spec, mesh))[2] * work.element_bytes
    for group in (*planned, *(name for name in found if name not in planned)):
        want, have = planned.get(group, Tally()), found.get(group, Tally())
        wrong = []
        # DeepSpeed reduces a bucket when the next parameter does not fit into it: bytes alone are compared.
        bucketed = group in GRADIENTS
        allowed = WIRE_TOLERANCE * max(want.wire_bytes, have.wire_bytes) + (slack if bucketed else 0.0)
        if abs(want.wire_bytes - have.wire_bytes) > allowed:
            wrong.append(f"{have.wire_bytes:,.0f} bytes were sent, the estimate says {want.wire_bytes:,.0f}")
        if not bucketed and want.messages != have.messages:
            wrong.append(f"{have.messages:,} messages were sent, the estimate says {want.messages:,}")
        if wrong:
            wrong.append(f"counted: {_kinds(step, group) or 'nothing'}")
        said = f"{format_bytes(want.wire_bytes)} in buckets" if bucketed and want.messages else _tally(want)
        yield _finding(rank, f"sent over {group}", said, _tally(have), wrong)


def _planned(work: Workload, mesh: Mesh) -> dict[tuple[str, str], Tally]:
    found = collectives(work, _stage(mesh.plan.spec, mesh), mesh.index("cp"), _place(mesh))
    found |= stage_exchanges(work, mesh.index("pp"))
    return {key: Tally(one.messages, one.wire_bytes) for key, one in found.items()}


def _place(mesh: Mesh) -> RankPlace:
    expert_shard = mesh.index(EXPERT_DP) if EXPERT_DP in mesh.groups else 0
    return RankPlace(mesh.index("dp-cp"), expert_shard, mesh.index("tp"))


def _ranks_of(mesh: Mesh, name: str) -> int:
    """Ranks of a group; of one that the plan does not know, the world's."""
    return mesh.size(name) if name in mesh.groups else mesh.plan.world_size


def _one_level(tallies: dict[str, Tally]) -> dict[str, Tally]:
    levels = [tallies[name] for name in ("cp", *CP_LEVELS) if name in tallies]
    return {**{name: one for name, one in tallies.items() if name not in CP_LEVELS}, "cp": sum(levels, Tally())}


def _kinds(step: StepMeasurement, group: str) -> str:
    return ", ".join(
        f"{one.messages:,} × {kind}, {one.wire_bytes:,.0f} bytes in all"
        for (name, kind), one in step.counts.items()
        if name == group
    )


def _stage(spec: Spec, mesh: Mesh) -> Stage:
    return spec.stages[mesh.index("pp")]


def _real(ranges: Ranges, size: int) -> Ranges:
    """Ranges without padding, neighbours joined."""
    inside = ((min(start, size), min(stop, size)) for start, stop in ranges)
    return joined((start, stop) for start, stop in inside if start < stop)


def _finding(rank: int, subject: str, planned: str, found: str, wrong: list[str]) -> Finding:
    detail = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    return Finding(rank, subject, planned, found, Verdict.DIFFERS if wrong else Verdict.AGREES, detail)


def _bytes(rank: int, subject: str, planned: int, found: int, *, extra: bool = False) -> Finding:
    wrong = [f"{found:,} − {planned:,} = {found - planned:+,} bytes"] if planned != found or extra else []
    return _finding(rank, subject, f"{planned:,} B", f"{found:,} B", wrong)


def _tally(tally: Tally) -> str:
    return f"{format_bytes(tally.wire_bytes)} in {tally.messages:,} message(s)"


def _shown(ranges: Ranges | None) -> str:
    return "all" if ranges is None else " + ".join(f"{first}..{end}" for first, end in ranges) or "only padding"
