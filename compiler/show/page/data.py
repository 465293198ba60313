"""What the page computes with: sizes and strides, from which it tells everything about any rank.

As long for a million ranks as for eight: nothing here grows with the world.
"""

from __future__ import annotations

from typing import Any

from parcompile.cost.memory import static_memory
from parcompile.diagnostics import Diagnostic
from parcompile.layout.grid import DENSE_AXES, Axis
from parcompile.layout.groups import EMBEDDING_GROUPS
from parcompile.layout.shards import ADAM_STATE_BYTES, MASTER_BYTES, padded_numel
from parcompile.model.table import spans
from parcompile.plan import Plan, PlanError
from parcompile.plan.sections import strided
from parcompile.plan.tree import written
from parcompile.rules import MEMORY_RULES, check
from parcompile.schema import validate
from parcompile.show.pictures.colours import SHADES, colour
from parcompile.spec import Origin
from parcompile.spec.resolve import Resolution
from parcompile.spec.workload import workload_of

USES = {
    Axis.TP: "layers",
    Axis.CP: "one sequence",
    Axis.DP: "batches",
    Axis.PP: "stages",
    "dp-cp": "gradients and ZeRO",
    "tp-pp": "one copy of the model",
    "kv-replica": "gradients of shared kv heads",
    "cp-inner": "attention, neighbours",
    "cp-outer": "attention, across",
    Axis.EP: "routed experts",
    "expert-dp": "gradients of experts",
    "expert-tp": "one expert",
    "expert-tp-ep": "all experts of a layer",
    "expert-tp-ep-pp": "all experts",
}


def page_data(plan: Plan) -> dict[str, Any]:
    """The plan for the page's script."""
    spec, groups = plan.spec, plan.groups
    parallelism, training, cluster = spec.parallelism, spec.training, spec.cluster
    grid = groups.grid
    return {
        "world": plan.world_size,
        "perNode": cluster.gpus_per_node,
        "nodes": cluster.nodes,
        "axes": {
            **{axis: {"size": grid.size((axis,)), "stride": grid.stride(axis)} for axis in DENSE_AXES},
            # Experts are laid over the same ranks on a grid of their own.
            Axis.EP: {"size": groups.ep, "stride": groups.expert_grid.stride(Axis.EP) if groups.ep > 1 else 1},
        },
        "groups": [
            {
                "name": name,
                "use": USES.get(name, ""),
                "members": strided(groups.family(name))["members"],
                "ends": name in EMBEDDING_GROUPS,
            }
            for name in groups.shown_names
        ],
        "sequence": {
            "length": training.sequence_length,
            "layout": parallelism.cp_layout.value,
            "chunks": parallelism.cp_layout.chunks_per_rank,
        },
        "batch": {"micro": training.micro_batch_size, "steps": training.gradient_accumulation_steps},
        "shards": spec.optimizer_shards,
        "stateBytes": MASTER_BYTES + ADAM_STATE_BYTES,
        "stages": _stages(plan),
        "tensors": _tensors(plan),
        "tied": spec.model.shape.tie_word_embeddings,
        "colours": {scheme: _colours(dark=scheme == "dark") for scheme in ("light", "dark")},
        "shades": SHADES,
    }


def _stages(plan: Plan) -> list[dict[str, Any]]:
    spec = plan.spec
    found = []
    for held, stage in zip(spec.virtual_stages, spec.stages, strict=True):
        work = workload_of(spec)
        memory, dealt = static_memory(work, stage), work.dealt_parameters(stage)
        expert_shards = work.expert_shards if spec.zero_stage else 1
        expert_shard = padded_numel(dealt, expert_shards) // expert_shards if spec.zero_stage else dealt
        found.append(
            {
                "layers": [[one.layers.start, one.layers.stop] for one in held],
                "embedding": stage.has_embedding,
                "head": stage.has_head,
                "numel": memory.numel - dealt,
                "shard": memory.shard_numel - expert_shard,
                "experts": {"numel": dealt, "shard": expert_shard} if dealt else None,
            }
        )
    return found


def _tensors(plan: Plan) -> list[dict[str, Any]]:
    """Each parameter with the slices of every tp rank; `place` says which stages hold it."""
    before = {parameter.name for parameter in plan.parameters.before}
    found = []
    for parameter, layout in plan.tensors().values():
        layers = parameter.numbers
        place = "layers" if layers is not None else "embedding" if parameter.name in before else "head"
        found.append(
            {
                "name": parameter.name,
                "place": place,
                "layers": None if layers is None else spans(layers),
                "shape": layout.local_shape,
                "dim": layout.dim,
                "ranges": layout.ranges,
                "expertDim": parameter.expert_dim if plan.groups.ep > 1 else None,
            }
        )
    return found


def _colours(*, dark: bool) -> dict[str, Any]:
    roles = ("surface", "ink", "soft", "track", "line", *DENSE_AXES, Axis.EP)
    return {
        **{role: colour(role, dark=dark) for role in roles},
        "ramps": {
            axis: [colour(f"{axis}-{shade}", dark=dark) for shade in range(SHADES)] for axis in (*DENSE_AXES, Axis.EP)
        },
    }


# What the rules say of a plan whose spec is not at hand.


def remarks(plan: Plan) -> tuple[Diagnostic, ...]:
    """What there is to say of a plan, without places in a file: that it does not fit is its only possible error.

    Raises:
        PlanError: what the plan says of its spec is none.
    """
    tree = written(plan)
    is_file = any(one.origin is Origin.CONFIG for one in plan.spec.provenance.values())
    wrong = validate({**tree, "model": {"hf_config": "config.json"}} if is_file else tree, "spec").diagnostics
    if wrong:
        raise PlanError(f"the plan is damaged (provenance: {wrong[0].message}): compile it again")
    return tuple(one for one in check(Resolution(tree)) if not one.is_error or one.code in MEMORY_RULES)
