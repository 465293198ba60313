"""process_groups.json: every group, for people and for launchers that build groups themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parcompile.layout.grid import Axis
from parcompile.layout.groups import Groups as PlanGroups

from .plan import Plan
from .sections import strided

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
        "groups": {name: [list(ranks) for ranks in groups.all(name)] for name in groups.all_names}
        if expanded
        else None,
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
    wanted = sorted(name.split("-"))
    for known in groups.all_names:
        if sorted(known.split("-")) == wanted:
            return known
    raise ValueError(f"there is no group {name!r}; there are {', '.join(groups.all_names)}")
