"""Which part of the optimizer state each rank of the dp × cp group holds under ZeRO-1.

Two rules are in use. DeepSpeed flattens a parameter group, pads it and cuts it into equal pieces; the even rule (as in
entrenar's `OptimizerShard`) gives the first ranks one element more. The runtime executes DeepSpeed's; both are
reported.
"""

from __future__ import annotations

from dataclasses import dataclass

MASTER_BYTES = 4
"""Bytes of one fp32 master weight."""
ADAM_STATE_BYTES = 8
"""Bytes of Adam's two fp32 moments of one element."""


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """Elements `[start, stop)` of the flattened parameter group; the last `padding` of them belong to no parameter."""

    start: int
    stop: int
    padding: int = 0

    @property
    def numel(self) -> int:
        """Elements of the shard, padding included."""
        return self.stop - self.start


def padded_numel(numel: int, shards: int) -> int:
    """The flattened group as DeepSpeed pads it: to a multiple of 2 · shards (NCCL wants 4-byte boundaries)."""
    multiple = 2 * shards
    return -(-numel // multiple) * multiple


def padded_shard(numel: int, shards: int, rank: int) -> OptimizerShard:
    """DeepSpeed's rule: equal shards of the padded group.

    Raises:
        ValueError: `rank` is not one of the shards.
    """
    _check(shards, rank)
    size = padded_numel(numel, shards) // shards
    start, stop = rank * size, (rank + 1) * size
    return OptimizerShard(start, stop, padding=max(0, stop - max(numel, start)))


def even_shard(numel: int, shards: int, rank: int) -> OptimizerShard:
    """The even rule: shard sizes differ by at most one, the first ones are larger.

    Raises:
        ValueError: `rank` is not one of the shards.
    """
    _check(shards, rank)
    size, larger = divmod(numel, shards)
    start = rank * size + min(rank, larger)
    return OptimizerShard(start, start + size + (rank < larger))


@dataclass(frozen=True, slots=True)
class ShardedGroups:
    """The flattened groups of a rank, and its shard of all of them.

    Experts that are dealt over ep are a group of their own, cut over the ranks that hold the same experts.
    """

    padded_numel: int
    shard_numel: int


def sharded_groups(numel: int, shards: int, experts: int = 0, expert_shards: int = 1) -> ShardedGroups:
    """By DeepSpeed's rule, of `numel` parameters of which so many are in the group of `experts`."""
    dense, dealt = padded_numel(numel - experts, shards), padded_numel(experts, expert_shards)
    return ShardedGroups(dense + dealt, dense // shards + dealt // expert_shards)


def _check(shards: int, rank: int) -> None:
    if shards < 1 or not 0 <= rank < shards:
        raise ValueError(f"rank {rank} of {shards} optimizer shards: it needs 0 ≤ rank < shards and shards ≥ 1")
