"""What a rank asks and creates at its start in a large world, which its 16,383 fellows do at the same time.

    python benchmarks/start_up.py [--nodes 2048] [--rounds 3]

One process stands for one rank of the world, under torch's fake process group: what it measures is the work of the
host, and the calls that would need a message through the store are counted. "Every group" is what
`torch.distributed.new_group` asks for by default: all ranks call it for all groups of the world, in one order.

The second table counts the requests of ranks to a real `TCPStore` of torch, in which the others have left what they
leave: handshake, entry and one look at the others. The seconds are those of all requests, one after the other.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from harness import ROOT, heads, parsed, row
from torch.testing._internal.distributed.fake_pg import FakeStore

import parcompile
from parcompile.plan import Plan
from parcompile.runtime.groups import agree, create_groups
from parcompile.runtime.liveness.neighbours import Neighbours
from parcompile.runtime.liveness.watchdog import StoreChannel

sys.path.insert(0, str(ROOT / "tests" / "runtime"))
from test_neighbours import CountingStore

META = torch.device("meta")
SIZES = (64, 1024, 16384)
STATEMENT = {"plan": "sha256:0", "torch": torch.__version__}


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


def ask(size: int, rank: int) -> tuple[list[int], float]:
    """Requests of the handshake, of the entry with a first look, and of a later look; and the seconds of all."""
    store = CountingStore(dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False))
    others = [one for one in range(size) if one != rank]
    for one in others:
        store.set(f"parcompile/handshake/{one}", json.dumps(STATEMENT))
        channel = StoreChannel(store, one, size, "job")
        Neighbours(one, size, 60, f"host-{one // 8}").enter(channel)
        channel.beat(1, "starting")
    if rank:
        store.set("parcompile/handshake/verdict", "")
    counts, start = [store.requests], time.perf_counter()
    agree(store, rank, size, STATEMENT, timedelta(seconds=60))
    counts.append(store.requests)
    channel, mine = StoreChannel(store, rank, size, "job"), Neighbours(rank, size, 60, f"host-{rank // 8}")
    mine.enter(channel)
    for _ in range(2):
        channel.beat(1, "starting")
        for other, _ in mine.look():
            mine.process(other)
        counts.append(store.requests)
    return [after - before for before, after in itertools.pairwise(counts)], time.perf_counter() - start


def main() -> None:
    options = parsed(__doc__, nodes=2048, rounds=3)
    plan = plan_of(options.nodes)
    print(f"{plan.world_size:,} ranks, tp 8, cp 2, pp 16; of rank {plan.world_size // 2:,}")
    heads("creates", "calls", "seconds (least … most)")
    for name, create in (("every group of the world", every_group), ("its own groups", own_groups)):
        spent, calls = seconds(plan, create, options.rounds)
        row(name, f"{calls:,}", f"{statistics.median(spent):.3f} ({min(spent):.3f} … {max(spent):.3f})")
    print()
    heads("ranks", "rank", "handshake", "entry and first look", "each further look", "ms")
    for size in SIZES:
        for rank in (size // 2 + 1, 0):
            counts, once = ask(size, rank)
            row(f"{size:,}", f"{rank:,}", *(f"{one:,}" for one in counts), f"{1e3 * once:.0f}")


if __name__ == "__main__":
    main()
