"""The short report behind a compilation: the layout and what it costs, in a few lines."""

from __future__ import annotations

from parcompile.cost.context_time import choices
from parcompile.cost.footprint import footprint
from parcompile.cost.memory import static_memory
from parcompile.cost.step import timing
from parcompile.cost.table import fit_text, peak_text, verdict
from parcompile.cost.workload import Workload
from parcompile.diagnostics.reporters.dispatch import hanging
from parcompile.layout.groups import Axis
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes, format_milliseconds

from .plan import Plan


def summary(plan: Plan, width: int = 80, *, estimate: bool = True) -> str:
    """What the plan does and costs, for a terminal of `width` columns; without `estimate`, what is exact of it."""
    spec, work = plan.spec, workload_of(plan.spec)
    held = [static_memory(work, stage) for stage in work.stages]
    fullest = max(range(len(held)), key=lambda stage: held[stage].total_bytes)
    memory = held[fullest]
    axes = " × ".join(f"{axis} {spec.parallelism.size(axis)}" for axis in (Axis.TP, Axis.CP, Axis.PP, Axis.DP))
    training, order = spec.training, "-".join(spec.parallelism.order)
    total = plan.parameters.numel
    nodes = f"{spec.cluster.nodes} node{'s' if spec.cluster.nodes > 1 else ''}"
    sizes = {
        "weights": memory.weight_bytes,
        "gradients": memory.gradient_bytes,
        "master weights": memory.master_bytes,
        "optimizer state": memory.optimizer_bytes,
        "reduce bucket": memory.bucket_bytes,
    }
    parts = [f"{name} {format_bytes(size, memory.total_bytes)}" for name, size in sizes.items()]
    of_stage = f" of stage {fullest}, which holds most" if len(held) > 1 else ""
    rows = {
        "model": f"{spec.model.source}: {total:,} parameters, {memory.numel:,} on a rank{of_stage}",
        "world": f"{plan.world_size} ranks on {nodes}: {axes}, order {order}",
        "batch": (
            f"{training.global_batch_size} sequences of {training.sequence_length:,} tokens = micro "
            f"{training.micro_batch_size} × steps {training.gradient_accumulation_steps} × dp {spec.parallelism.dp}"
        ),
        **_context(plan),
        **(_peak(work) if estimate else {}),
        "static": f"{format_bytes(memory.total_bytes)} on each rank{of_stage}, without activations: {', '.join(parts)}",
        "runtime": "executes this plan"
        if not plan.refusals
        else "; ".join(f"refuses it [{refusal.code}] {refusal.message}" for refusal in plan.refusals),
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
    return {
        "cp": (
            f"{parallelism.context.name}, {parallelism.cp_layout.value}; context-parallel overhead per layer and "
            f"micro-batch: {listed}"
        )
    }
