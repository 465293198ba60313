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

import torch
import torch.distributed as dist

from parcompile.layout.groups import KV_REPLICA
from parcompile.layout.pipeline import Lane
from parcompile.plan import Plan

# This rank's place in a plan, with its live process groups.


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


class Mpu:
    """What `deepspeed.initialize(mpu=…)` takes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_world_size(self) -> int:
        """Copies of the model that read different data."""
        return self._mesh.size("dp")

    def get_data_parallel_rank(self) -> int:
        """Which of them this rank is."""
        return self._mesh.index("dp")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The dp group."""
        return self._mesh.group("dp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The members of the dp group."""
        return dist.get_process_group_ranks(self._mesh.group("dp"))

    def get_model_parallel_world_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self._mesh.size("tp-pp")

    def get_model_parallel_rank(self) -> int:
        """This rank's place among them; it names checkpoint files."""
        return self._mesh.index("tp-pp")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The tp × pp group."""
        return self._mesh.group("tp-pp")

    def get_tensor_model_parallel_world_size(self) -> int:
        """Ranks that share each weight matrix."""
        return self._mesh.size("tp")

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's slice."""
        return self._mesh.index("tp")

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """The tp group."""
        return self._mesh.group("tp")

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Stages."""
        return self._mesh.size("pp")

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's stage."""
        return self._mesh.index("pp")

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """The pp group."""
        return self._mesh.group("pp")

    def get_sequence_parallel_world_size(self) -> int:
        """Ranks that share each sequence."""
        return self._mesh.size("cp")

    def get_sequence_parallel_rank(self) -> int:
        """Which chunks of the sequence this rank holds."""
        return self._mesh.index("cp")

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """The cp group."""
        return self._mesh.group("cp")

    def get_sequence_data_parallel_world_size(self) -> int:
        """Shards of the optimizer state."""
        return self._mesh.size("dp-cp")

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's shard."""
        return self._mesh.index("dp-cp")

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """The dp × cp group."""
        return self._mesh.group("dp-cp")
