"""Which experts and which part of the optimizer state a rank holds.

Which routed experts each rank of an ep group holds, and how many rows of hidden states it sends to the others.

Experts are dealt in equal runs, in their order, as in Megatron-Core and DeepSpeed: rank r of ep holds the experts
[r · E / ep, (r + 1) · E / ep). A row is one token on its way to one of its experts.

Which part of the optimizer state each rank of the dp × cp group holds under ZeRO-1.

Two rules are in use. DeepSpeed flattens a parameter group, pads it and cuts it into equal pieces; the even rule (as in
entrenar's `OptimizerShard`) gives the first ranks one element more. The runtime executes DeepSpeed's; both are
reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from .grid import Axis, Grid

# Which routed experts each rank of an ep group holds, and how many rows of hidden states it sends to the others.

COUNT_BYTES = 8
"""Before rows travel, ranks tell each other how many go to each expert: a number of so many bytes."""


Ranges = tuple[tuple[int, int], ...]
"""Stretches `[start, stop)` of experts, ascending."""


def owned_experts(experts: int, ep: int, rank: int, idle: int = 0) -> Ranges:
    """The experts of a rank; of further `idle` ones behind them, with which nothing is computed, a run of their own.

    Raises:
        ValueError: the experts do not divide, or there is no such rank.
    """
    if experts % ep or idle % ep or not 0 <= rank < ep:
        raise ValueError(f"{experts} experts on ep {ep}, rank {rank}: it needs experts % ep = 0 and 0 ≤ rank < ep")
    runs = [(0, experts // ep), (experts, idle // ep)]
    return tuple((first + rank * share, first + (rank + 1) * share) for first, share in runs if share)


def balanced_rows(rows: int, ep: int) -> int:
    """Rows that a rank sends to each of the others when every expert is chosen equally often; it keeps the rest."""
    return rows // ep


def shared_tokens(tokens: int, tp: int, rank: int) -> tuple[int, int]:
    """The tokens `[start, stop)` that a tensor-parallel rank sends to their experts: equal runs, the last ones shorter.

    The first rank has most: ⌈tokens / tp⌉.
    """
    share = -(-tokens // tp)
    return min(rank * share, tokens), min((rank + 1) * share, tokens)


def keeps_places(dense: Grid, expert: Grid) -> bool:
    """Whether every rank holds experts of its own stage, cut at its own place on tp.

    It has the same tp and pp coordinate in both grids then. Where fewer ranks share an expert than share a dense layer,
    those that hold the same experts have to have one place on tp: their optimizer shards are those of dp · cp.
    """
    if expert.size((Axis.TP,)) < dense.size((Axis.TP,)):
        tp, same_stage = dense.size((Axis.TP,)), dense.size((Axis.PP,)) == 1
        apart = expert.size((Axis.DP,)) > 1 and expert.stride(Axis.DP) % tp != 0
        same_stage = same_stage or dense.stride(Axis.PP) == expert.stride(Axis.PP)
        return dense.stride(Axis.TP) == 1 and same_stage and not apart
    return all(dense.size((axis,)) == 1 or dense.stride(axis) == expert.stride(axis) for axis in (Axis.TP, Axis.PP))


# Which part of the optimizer state each rank of the dp × cp group holds under ZeRO-1.

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
