"""Which parameters count in the gradient norm of every tensor-parallel rank.

DeepSpeed, like Megatron-LM, adds up the squared gradients of tensor-parallel rank 0 and, of the other ranks, only those
of parameters whose attribute `tensor_model_parallel` is true (`is_model_parallel_parameter` in
deepspeed/runtime/utils.py). The norm equals that of the whole model when each element counts exactly once: a shard is
marked on every rank, a replicated parameter on none, and a shard that several ranks hold (a replicated kv head) on the
first of them only.
"""

from __future__ import annotations

from torch import nn

from parcompile.runtime.collectives import Group, group_rank

__all__ = ["is_sharded", "mark_shard"]


def mark_shard(parameter: nn.Parameter | None, replica_group: Group = None) -> None:
    """Mark `parameter` as this rank's shard; ranks of `replica_group` hold the same one."""
    if parameter is not None:
        parameter.tensor_model_parallel = group_rank(replica_group) == 0  # type: ignore[attr-defined]


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether the tensor-parallel ranks hold slices of this parameter, replicas of a slice included."""
    return hasattr(parameter, "tensor_model_parallel")
