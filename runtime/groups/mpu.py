"""The plan's groups under the names that DeepSpeed asks for (its "model parallel unit").

Read off DeepSpeed 0.19.8 (utils/groups.py, runtime/engine.py, runtime/zero/stage_1_and_2.py): data parallel is dp alone
(it decides the batch), sequence data parallel is dp × cp (it shards ZeRO and sums gradients), model parallel is tp × pp
(one copy of the model). There is deliberately no `initialize_sequence_parallel`: with it DeepSpeed counts tensor
parallelism as 1.
"""

from __future__ import annotations

import torch.distributed as dist

from .mesh import Mesh


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
