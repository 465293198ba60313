"""This rank's place in a plan, with its live process groups, and as DeepSpeed asks for it ("mpu").

The plan's groups under the names that DeepSpeed asks for (its "model parallel unit").

Read off DeepSpeed 0.19.8 (utils/groups.py, runtime/engine.py, runtime/zero/stage_1_and_2.py): data parallel is dp alone
(it decides the batch), sequence data parallel is dp × cp (it shards ZeRO and sums gradients), model parallel is tp × pp
(one copy of the model). There is deliberately no `initialize_sequence_parallel`: with it DeepSpeed counts tensor
parallelism as 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from parcompile.layout.groups import KV_REPLICA
from parcompile.layout.pipeline import Lane
from parcompile.plan import Plan


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place in the plan: its coordinates, and its process group of every name."""

    plan: Plan
    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
    lanes: dict[Lane, dist.ProcessGroup] = field(default_factory=dict)
    """The lanes of the pipeline's schedule that end or begin at this rank, each with a group of its two ranks."""

    def group(self, name: str) -> dist.ProcessGroup:
        """This rank's group of that name; a group of one is a real group too, since DeepSpeed wants one."""
        return self.groups[name]

    def size(self, name: str) -> int:
        """Ranks in that group."""
        return dist.get_world_size(self.groups[name])

    def index(self, name: str) -> int:
        """This rank's place in that group."""
        return dist.get_rank(self.groups[name])

    def parallel_group(self, name: str) -> dist.ProcessGroup | None:
        """The group for layers that do without communication when it has one rank: None then."""
        group = self.groups.get(name)
        return group if group is not None and dist.get_world_size(group) > 1 else None

    def differing_groups(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Groups that are not the plan's: the name, the ranks that are in it, and those that the plan says."""
        for name, group in self.groups.items():
            live, planned = tuple(dist.get_process_group_ranks(group)), self.plan.groups.of_rank(name, self.rank)
            if live != planned:
                yield name, live, planned

    @property
    def kv_replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same kv heads, when there are several."""
        return self.parallel_group(KV_REPLICA)


# The plan's groups under the names that DeepSpeed asks for (its "model parallel unit").


_GROUPS = {
    "data": "dp",  # copies of the model that read different data
    "model": "tp-pp",  # one copy of the model; the rank names checkpoint files
    "tensor_model": "tp",
    "pipeline_model": "pp",
    "sequence": "cp",
    "sequence_data": "dp-cp",  # shards of the optimizer state
}


class Mpu:
    """What `deepspeed.initialize(mpu=…)` takes: `get_…_parallel_world_size`, `…_rank` and `…_group` of each group."""

    def __init__(self, mesh: Mesh) -> None:
        for name, group in _GROUPS.items():
            for asked, answer in (("world_size", mesh.size), ("rank", mesh.index), ("group", mesh.group)):
                setattr(self, f"get_{name}_parallel_{asked}", partial(answer, group))
        self.get_data_parallel_group_ranks = lambda: dist.get_process_group_ranks(mesh.group("dp"))
