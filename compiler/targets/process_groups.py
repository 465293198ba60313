"""process_groups.json: every group spelled out, for people and for launchers that build groups themselves."""

from __future__ import annotations

from typing import Any

from parcompile.plan import Plan


def process_groups(plan: Plan) -> dict[str, Any]:
    """All groups of a plan, by name, with the node of each rank."""
    groups = plan.groups
    per_node = plan.spec.cluster.gpus_per_node
    return {
        "compiler_version": plan.compiler_version,
        "spec_hash": plan.spec_hash,
        "world_size": plan.world_size,
        "order": "-".join(plan.spec.parallelism.order),
        "gpus_per_node": per_node,
        "groups": {name: [list(ranks) for ranks in groups.all(name)] for name in groups.names},
    }


def rank_groups(plan: Plan, rank: int) -> dict[str, Any]:
    """The coordinates and groups of one rank, computed in the size of its groups.

    Raises:
        ValueError: the rank is not in the plan's world.
    """
    groups, per_node = plan.groups, plan.spec.cluster.gpus_per_node
    coordinates = {axis: index for axis, index in groups.grid.coordinates(rank).items() if axis != "ep"}
    found = {}
    for name in groups.names:
        ranks = groups.of_rank(name, rank)
        found[name] = {"ranks": list(ranks), "nodes": sorted({member // per_node for member in ranks})}
    return {"rank": rank, "coordinates": coordinates, "groups": found}
