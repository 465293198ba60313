"""How long a rank takes to create its process groups in a large world, which its 16,383 fellows do at the same time.

    python benchmarks/start_up.py [--nodes 2048] [--rounds 3]

One process stands for one rank of the world, under torch's fake process group: what it measures is the work of the
host, and the calls that would need a message through the store are counted. "Every group" is what
`torch.distributed.new_group` asks for by default: all ranks call it for all groups of the world, in one order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import parcompile
from parcompile.plan import Plan
from parcompile.runtime.groups import create_groups

META = torch.device("meta")


def plan_of(nodes: int) -> Plan:
    spec = {
        "version": 1,
        "name": "start-up",
        "model": {"preset": "llama-3-70b"},
        "cluster": {"nodes": nodes, "gpus_per_node": 8, "accelerator": "h100-sxm"},
        "parallelism": {"tp": 8, "cp": 2, "pp": 16, "dp": "auto", "sequence_parallel": True},
        "training": {
            "sequence_length": 8192,
            "global_batch_size": nodes // 32 * 16,
            "micro_batch_size": 1,
            "precision": "bf16",
        },
    }
    return parcompile.compile(spec)


def every_group(plan: Plan) -> int:
    calls = 0
    for name in plan.groups.names:
        for ranks in plan.groups.all(name):
            dist.new_group(list(ranks))
            calls += 1
    return calls


def own_groups(plan: Plan) -> int:
    mesh = create_groups(plan, dist.get_rank(), META)
    return len(mesh.groups) + len(mesh.plan.spec.schedule.lanes())


def seconds(plan: Plan, create: Callable[[Plan], int], rounds: int) -> tuple[list[float], int]:
    found, calls = [], 0
    for _ in range(rounds):
        dist.init_process_group(
            "meta:fake,cpu:fake", store=FakeStore(), rank=plan.world_size // 2, world_size=plan.world_size
        )
        start = time.perf_counter()
        calls = create(plan)
        found.append(time.perf_counter() - start)
        dist.destroy_process_group()
    return found, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    plan = plan_of(arguments.nodes)
    print(f"{plan.world_size:,} ranks, tp 8, cp 2, pp 16; of rank {plan.world_size // 2:,}")
    print("| creates | calls | seconds (least … most) |")
    print("|---|---|---|")
    for name, create in (("every group of the world", every_group), ("its own groups", own_groups)):
        spent, calls = seconds(plan, create, arguments.rounds)
        print(f"| {name} | {calls:,} | {statistics.median(spent):.3f} ({min(spent):.3f} … {max(spent):.3f}) |")


if __name__ == "__main__":
    main()
