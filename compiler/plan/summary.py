"""The short report behind a compilation: the layout and what it costs, in a few lines."""

from __future__ import annotations

from parcompile.cost.context_time import choices
from parcompile.cost.memory import static_memory
from parcompile.cost.workload import workload_of

from .plan import Plan


def summary(plan: Plan) -> str:
    """What the plan does and costs, for a terminal."""
    spec, memory = plan.spec, static_memory(plan.spec)
    axes = " × ".join(f"{axis} {getattr(spec.parallelism, axis)}" for axis in ("tp", "cp", "pp", "dp"))
    training, order = spec.training, "-".join(spec.parallelism.order)
    total = plan.parameters.numel
    rows = {
        "model": f"{spec.model.source}: {total:,} parameters, {memory.numel:,} on a rank",
        "world": f"{plan.world_size} ranks on {spec.cluster.nodes} node(s): {axes}, order {order}",
        "batch": (
            f"{training.global_batch_size} sequences of {training.sequence_length:,} tokens = micro "
            f"{training.micro_batch_size} × steps {training.gradient_accumulation_steps} × dp {spec.parallelism.dp}"
        ),
        **_context(plan),
        "memory": (
            f"{_bytes(memory.total_bytes)} static per rank: weights {_bytes(memory.weight_bytes)}, gradients "
            f"{_bytes(memory.gradient_bytes)}, master {_bytes(memory.master_bytes)}, optimizer "
            f"{_bytes(memory.optimizer_bytes)}, bucket {_bytes(memory.bucket_bytes)} (activations come on top)"
        ),
        "runtime": "executes this plan"
        if not plan.refusals
        else "; ".join(f"refuses it [{refusal.code}] {refusal.message}" for refusal in plan.refusals),
        "identity": plan.plan_hash[:19],
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in {"plan": spec.name, **rows}.items())


def _context(plan: Plan) -> dict[str, str]:
    """How attention runs over cp, and what the cost model says of the other ways; nothing for cp 1."""
    parallelism = plan.spec.parallelism
    if parallelism.cp == 1:
        return {}
    seconds: dict[str, float] = {}
    for one in choices(workload_of(plan.spec)):
        if one["seconds"] is not None:
            seconds.setdefault(one["name"], one["seconds"])
    listed = ", ".join(f"{name} {value * 1e3:.3g} ms" for name, value in seconds.items())
    return {
        "cp": (
            f"{parallelism.context.name}, {parallelism.cp_layout.value}; estimates for each layer and micro-batch "
            f"beyond even attention: {listed}"
        )
    }


def _bytes(count: int) -> str:
    """A number of bytes with a binary unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
