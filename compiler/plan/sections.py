"""The sections of a plan that follow from its layout, the file of its process groups, and the short report.

Whatever grows with the world is described by sizes and strides, so that a plan for a million ranks is as long as one
for eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from parcompile.cost.context_time import choices
from parcompile.cost.footprint import footprint
from parcompile.cost.memory import StaticMemory, static_memory
from parcompile.cost.offload import host_activations, host_memory, host_text, node_bytes
from parcompile.cost.step import timing
from parcompile.cost.table import fit_text, peak_text, verdict
from parcompile.cost.traffic import alternatives, placement, step_traffic
from parcompile.cost.workload import Workload
from parcompile.diagnostics.reporters import hanging
from parcompile.layout.groups import DENSE_AXES, FACTORS, Axis, AxisGroups, Grid, reach
from parcompile.layout.groups import Groups as PlanGroups
from parcompile.layout.pipeline import Schedule, Stage
from parcompile.layout.sequence import (
    ContextParallel,
    CpImplementation,
    KeySource,
    chunk_ids,
    source_blocks,
    token_ranges,
)
from parcompile.layout.shards import TensorLayout, even_shard, is_decayed, takes_muon
from parcompile.model import Layers, Parameter, spans
from parcompile.spec import Spec
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes, format_milliseconds

from .plan import Plan

EXPANDED_CP = 1024
"""Up to this cp the plan lists the tokens of each cp rank; beyond, they follow from `layout.sequence`."""
EXPANDED_RING = 32
"""Up to this cp the plan lists the source of each step of each cp rank; beyond, they follow from the rule that stands
beside them."""
EXPANDED_PASSES = 1024
"""Up to so many passes of a step, of all pp ranks, the plan lists them; beyond, they follow from `layout.pipeline`."""
EXPERT_GRID_AXES = (Axis.TP, Axis.EP, Axis.DP, Axis.PP)
"""The axes of the expert grid; its dp is expert-dp."""
ALTERNATIVES = 3
"""Other orders of the axes that the plan compares itself with."""


def strided(family: AxisGroups) -> dict[str, Any]:
    """A family of groups as sizes and strides, innermost first: each group is one of `starts` plus all of `members`."""
    return {
        "size": family.size,
        "count": family.count,
        "members": [list(step) for step in family.members],
        "starts": [list(step) for step in family.starts],
    }


def groups(plan: Plan) -> dict[str, Any]:
    """Every process group as sizes and strides, on its grid."""
    groups = plan.groups
    return {
        "axes": _axes(groups.grid, DENSE_AXES),
        "expert_axes": _axes(groups.expert_grid, EXPERT_GRID_AXES) if groups.ep > 1 else None,
        "created": list(groups.names),
        "groups": {name: strided(groups.family(name)) for name in groups.all_names},
    }


def _axes(grid: Grid, axes: tuple[Axis, ...]) -> dict[str, Any]:
    return {axis: {"size": grid.size((axis,)), "stride": grid.stride(axis)} for axis in grid.order if axis in axes}


def topology(plan: Plan) -> dict[str, Any]:
    """How far the groups reach on the machines, what they carry, and which orders would send less between nodes."""
    spec, groups, per_node = plan.spec, plan.groups, plan.spec.cluster.gpus_per_node
    found = {}
    for name in groups.all_names:
        far = reach(groups.family(name), per_node)
        found[name] = {
            "groups": far.count,
            "groups_leaving_node": far.leaving_node,
            "nodes_per_group": list(far.nodes),
            "rails_per_group": list(far.rails),
            "slowest_link": far.slowest_link,
        }
    traffic = step_traffic(workload_of(spec))
    here = placement(groups.grid, per_node, traffic)
    others = alternatives(groups.grid, per_node, traffic) if spec.cluster.nodes > 1 else []
    return {
        "gpus_per_node": per_node,
        "families": found,
        "bytes_per_rank_and_step": traffic.by_group(),
        "bytes_leaving_node": here.leaving_bytes,
        "other_orders": [
            {"order": "-".join(other.order), "bytes_leaving_node": other.leaving_bytes}
            for other in others[:ALTERNATIVES]
        ],
    }


def tensors(plan: Plan) -> list[dict[str, Any]]:
    """Every parameter as each tp rank holds it."""
    rows = [(parameter, _tensor_row(parameter, layout)) for parameter, layout in plan.tensors().values()]
    if plan.spec.training.optimizer.is_muon:
        for parameter, row in rows:
            row["optimizer"] = "muon" if takes_muon(parameter) else "adamw"
    if (left_out := plan.spec.training.optimizer.no_weight_decay) is not None:
        for parameter, row in rows:
            row["weight_decay"] = is_decayed(parameter, left_out)
    return [row for _, row in rows]


def _tensor_row(parameter: Parameter, layout: TensorLayout) -> dict[str, Any]:
    """One parameter as each tp rank holds it."""
    return {
        "name": parameter.name,
        "layers": None if parameter.numbers is None else _spans(parameter.numbers),
        "shape": list(parameter.shape),
        "padded_shape": list(layout.full_shape),
        "local_shape": list(layout.local_shape),
        "split_dim": layout.dim,
        "ranges": None if layout.ranges is None else [[list(piece) for piece in pieces] for pieces in layout.ranges],
        "replicas": layout.replicas,
        "expert_dim": parameter.expert_dim,
    }


def _spans(layers: Layers) -> list[Any]:
    """Layers [start, stop); a list of such stretches where there are gaps between them."""
    found = spans(layers)
    return found[0] if len(found) == 1 else found


def sequence(spec: Spec) -> dict[str, Any]:
    """What each cp rank holds, and what it computes with whose keys."""
    parallelism, length = spec.parallelism, spec.training.sequence_length
    cp, layout, context = parallelism.cp, parallelism.cp_layout, parallelism.context
    places = context.ring_ranks
    blocks = source_blocks(layout, places)
    ranks = [
        {
            "chunks": list(chunk_ids(layout, cp, rank)),
            "tokens": [[piece.start, piece.stop, piece.step] for piece in token_ranges(layout, cp, rank, length)],
            "work": float(context.work(layout, rank)),
            "ring": _ring_row(context, rank // context.head_ranks) if cp <= EXPANDED_RING else None,
        }
        for rank in range(cp if cp <= EXPANDED_CP else 0)
    ]
    return {
        "layout": layout.value,
        "chunk_length": length // (cp * layout.chunks_per_rank),
        "balance": float(context.balance(layout)),
        "implementation": {
            "name": context.implementation.value,
            "head_ranks": context.head_ranks,
            "place": f"rank // {context.head_ranks}" if context.head_ranks > 1 else "rank",
            "choices": choices(workload_of(spec)),
        },
        "ring": {
            "places": places,
            "inner_places": context.inner_ranks,
            **_ring_steps(context),
            "blocks": {kind.value: [asdict(block) for block in found] for kind, found in blocks.items()},
        },
        "ranks": ranks if cp <= EXPANDED_CP else None,
    }


def _ring_row(context: ContextParallel, place: int) -> list[list[int | str]]:
    sources = [context.source(step, place) for step in range(context.ring_ranks)]
    return [[source, KeySource.of(place, source).value] for source in sources]


def _ring_steps(context: ContextParallel) -> dict[str, Any]:
    """When keys come from whom, as formulas of the place, and how often they are passed on."""
    places, inner = context.ring_ranks, context.inner_ranks
    if context.implementation is CpImplementation.ALL_GATHER:
        everyone = "all other places, at once"
        return {"steps": 1, "exchanges": 1, "source": "all places", "send_to": everyone, "receive_from": everyone}
    found = {"steps": places, "exchanges": places - 1}
    if inner == places:
        return found | {
            "source": "(place - step) mod places",
            "send_to": "(place + 1) mod places",
            "receive_from": "(place - 1) mod places",
        }
    return found | {
        "source": "seat (seat - step) mod inner_places of node (node - step // inner_places) mod nodes, "
        "where node, seat = divmod(place, inner_places)",
        "send_to": "whoever has this source next",
        "receive_from": "whoever has the next source now",
    }


def stage_rows(spec: Spec) -> list[dict[str, Any]]:
    """Each pp rank's stages with what they compute when, and the optimizer shards of its ranks under each rule."""
    stages = enumerate(zip(spec.virtual_stages, spec.stages, strict=True))
    return [{**_stage_row(spec, *each), "schedule": _schedule_row(spec.schedule, rank)} for rank, each in stages]


def _schedule_row(schedule: Schedule, rank: int) -> dict[str, Any]:
    """The passes of a pp rank, spelled out where those of all ranks are few."""
    hidden_states, gradients = schedule.sends(rank)
    is_short = 2 * schedule.micro_batches * schedule.virtual * schedule.pp <= EXPANDED_PASSES
    return {
        "name": schedule.name,
        "micro_batches": schedule.micro_batches,
        "warm_up": schedule.warm_up(rank),
        "in_flight": schedule.in_flight(rank),
        "sends": {"hidden_states": hidden_states, "gradients": gradients},
        "passes": [one.label(schedule.virtual) for one in schedule.passes(rank)] if is_short else None,
    }


def _stage_row(spec: Spec, held: tuple[Stage, ...], stage: Stage) -> dict[str, Any]:
    shards = spec.optimizer_shards
    work = workload_of(spec)
    numel, groups = work.stage_parameters(stage), work.sharded(stage)
    padded = groups.padded_numel
    larger = even_shard(numel, shards, 0).numel
    return {
        "layers": [[one.layers.start, one.layers.stop] for one in held],
        "has_embedding": stage.has_embedding,
        "has_head": stage.has_head,
        "numel": numel,
        "optimizer": {
            "padded": {"numel": padded, "shard_numel": groups.shard_numel, "padding": padded - numel},
            "even": {"largest_shard": larger, "ranks_with_largest": numel % shards or shards},
        },
    }


def optimizer_shards(spec: Spec) -> dict[str, Any]:
    """How ZeRO cuts the optimizer state of a rank of the largest stage."""
    shards = spec.optimizer_shards
    memory = static_memory(workload_of(spec))
    rule = "DeepSpeed: pad to a multiple of 2 · shards, then split evenly"
    if spec.shards_weights:
        rule = "DeepSpeed: pad each parameter to a multiple of the shards, then split it evenly"
    elif spec.training.optimizer.no_weight_decay is not None:
        rule += "; what weight decay leaves out is padded and sharded by itself"
    if spec.parallelism.ep > 1:
        rule += "; experts that are dealt over ep are padded and sharded by themselves, over expert-dp"
    return {
        "rule": rule if spec.zero_stage else "none: every rank holds all of it",
        "shards": shards,
        "numel": memory.numel,
        "padded_numel": memory.padded_numel,
        "shard_numel": memory.shard_numel,
    }


def host_section(spec: Spec) -> dict[str, Any]:
    """What the host holds and what crosses to it in a step, in bytes; empty without offload."""
    work = workload_of(spec)
    held, kept, found = host_memory(work), host_activations(work), {}
    if held is not None:
        found["host_memory"] = {**held._asdict(), "total_bytes": held.total_bytes, "node_bytes": node_bytes(work)}
    if kept is not None:
        found["host_activations"] = {**kept._asdict(), "node_bytes": node_bytes(work)}
    return found


# process_groups.json: every group, for people and for launchers that build groups themselves.

EXPANDED_WORLD = 4096
"""Up to this world size every group is spelled out.

Beyond, the file has sizes and strides only, and `parcompile groups` computes the groups of any rank.
"""


def process_groups(plan: Plan) -> dict[str, Any]:
    """All groups of a plan, by name: as sizes and strides, and spelled out up to `EXPANDED_WORLD` ranks."""
    groups = plan.groups
    expanded = plan.world_size <= EXPANDED_WORLD
    return {
        "compiler_version": plan.compiler_version,
        "spec_hash": plan.spec_hash,
        "world_size": plan.world_size,
        "order": "-".join(plan.spec.parallelism.order),
        "gpus_per_node": plan.spec.cluster.gpus_per_node,
        "expanded": expanded,
        "groups": {name: [*map(list, groups.all(name))] for name in groups.all_names} if expanded else None,
        "strided": {name: strided(groups.family(name)) for name in groups.all_names},
    }


def rank_groups(plan: Plan, rank: int, names: Sequence[str] = ()) -> dict[str, Any]:
    """The coordinates and groups of one rank, computed in the size of its groups.

    `names` are the groups to show; without any, those of the runtime, and those of the experts when the plan has them.

    Raises:
        ValueError: the rank is not in the plan's world, or there is no group of that name.
    """
    groups, per_node = plan.groups, plan.spec.cluster.gpus_per_node
    coordinates = {axis: index for axis, index in groups.grid.coordinates(rank).items() if axis != Axis.EP}
    if groups.ep > 1:
        expert = groups.expert_grid.coordinates(rank)
        coordinates |= {Axis.EP: expert[Axis.EP], "expert-dp": expert[Axis.DP]}
    found = {}
    for name in [known_name(groups, name) for name in names] or groups.shown_names:
        ranks = groups.of_rank(name, rank)
        found[name] = {"ranks": list(ranks), "nodes": sorted({member // per_node for member in ranks})}
    return {"rank": rank, "coordinates": coordinates, "groups": found}


def known_name(groups: PlanGroups, name: str) -> str:
    """The name under which a group is known: axes may be joined in any order (`cp-dp` is `dp-cp`).

    Raises:
        ValueError: there is no group of that name.
    """
    if name in groups.all_names:
        return name
    alike = (known for known in groups.all_names if sorted(known.split("-")) == sorted(name.split("-")))
    if (found := next(alike, None)) is None:
        raise ValueError(f"there is no group {name!r}; there are {', '.join(groups.all_names)}")
    return found


def static_parts(memory: StaticMemory) -> dict[str, int]:
    """What a rank holds for the whole run, in bytes, by what it is."""
    return {
        "weights": memory.weight_bytes,
        "gradients": memory.gradient_bytes,
        "master weights": memory.master_bytes,
        "optimizer state": memory.optimizer_bytes,
        "reduce bucket": memory.bucket_bytes,
    }


def summary(plan: Plan, width: int = 80, *, estimate: bool = True) -> str:
    """What the plan does and costs, for a terminal of `width` columns; without `estimate`, what is exact of it."""
    spec, work = plan.spec, workload_of(plan.spec)
    held = [static_memory(work, stage) for stage in work.stages]
    fullest = max(range(len(held)), key=lambda stage: held[stage].total_bytes)
    memory = held[fullest]
    axes = " × ".join(f"{axis} {spec.parallelism.size(axis)}" for axis in FACTORS)
    training, order = spec.training, "-".join(spec.parallelism.order)
    total = plan.parameters.numel
    nodes = f"{spec.cluster.nodes} node{'s' if spec.cluster.nodes > 1 else ''}"
    ramp = training.rampup_batch_size
    grown = "" if ramp is None else f", from {ramp.start} by {ramp.increment} each over {ramp.samples:,} samples"
    parts = [f"{name} {format_bytes(size, memory.total_bytes)}" for name, size in static_parts(memory).items()]
    of_stage = f" of stage {fullest}, which holds most" if len(held) > 1 else ""
    rows = {
        "model": f"{spec.model.source}: {total:,} parameters, {memory.numel:,} on a rank{of_stage}",
        "world": f"{plan.world_size} ranks on {nodes}: {axes}, order {order}",
        "batch": (
            f"{training.global_batch_size} sequences of {training.sequence_length:,} tokens = micro "
            f"{training.micro_batch_size} × steps {training.gradient_accumulation_steps} × dp {spec.parallelism.dp}"
            + grown
        ),
        **_context(plan),
        **(_peak(work) if estimate else {}),
        "static": f"{format_bytes(memory.total_bytes)} on each rank{of_stage}, without activations: {', '.join(parts)}",
        **({} if (host := host_text(work)) is None else {"host": host}),
        "runtime": "; ".join(f"refuses it [{one.code}] {one.message}" for one in plan.refusals) or "executes this plan",
        "identity": plan.plan_hash[:19],
    }
    column = max(map(len, rows))
    first = f"{verdict(work, footprint(work), timing(work))}\n" if estimate else ""
    return first + "\n".join(
        hanging(f"{name:<{column}}  ", text, width) for name, text in {"plan": spec.name, **rows}.items()
    )


def _peak(work: Workload) -> dict[str, str]:
    """The estimated peak, and whether it fits."""
    found = footprint(work)
    verdict = fit_text(work, found)
    return {"memory": f"{peak_text(found)}{'; ' if verdict else ''}{verdict}"}


def _context(plan: Plan) -> dict[str, str]:
    """How attention runs over cp, and what the cost model says of the other ways; nothing for cp 1."""
    parallelism = plan.spec.parallelism
    if parallelism.cp == 1:
        return {}
    if not plan.spec.model.shape.attends:
        return {"cp": f"{parallelism.cp_layout.value}, states from piece to piece; no layer attends"}
    seconds: dict[str, float] = {}
    for one in choices(workload_of(plan.spec)):
        if one["seconds"] is not None:
            seconds.setdefault(one["name"], one["seconds"])
    listed = ", ".join(f"{name} {format_milliseconds(value)}" for name, value in seconds.items())
    chosen = f"{parallelism.context.name}, {parallelism.cp_layout.value}"
    return {"cp": f"{chosen}; context-parallel overhead per layer and micro-batch: {listed}"}
