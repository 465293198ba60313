"""Which ranks really answer in each process group, in which order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parcompile.runtime.groups import Mesh
from parcompile.runtime.preflight.findings import Finding, Verdict


def compare_live_groups(mesh: Mesh) -> list[Finding]:
    """Every group of this rank gathers its members' ranks, and they are those of the plan. All ranks call it."""
    found = []
    for name, group in mesh.groups.items():
        mine = torch.tensor([mesh.rank], device=mesh.device)
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, mine, group=group)
        live, planned = [int(one) for one in everyones], list(mesh.plan.groups.of_rank(name, mesh.rank))
        if live != planned:
            detail = f"group {name} of rank {mesh.rank} is {live}, the plan says {planned}"
            found.append(Finding(mesh.rank, "process groups", _ranks(planned), _ranks(live), Verdict.DIFFERS, detail))
    if not found:
        count = str(len(mesh.groups))
        found.append(Finding(mesh.rank, "process groups", count, f"{count} answered as planned", Verdict.AGREES))
    return found


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}, … {ranks[-1]}]" if len(ranks) > 8 else f"[{shown}]"
