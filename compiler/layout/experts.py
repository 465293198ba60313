"""Which routed experts each rank of an ep group holds, and how many rows of hidden states it sends to the others.

Experts are dealt in equal runs, in their order, as in Megatron-Core and DeepSpeed: rank r of ep holds the experts
[r · E / ep, (r + 1) · E / ep). A row is one token on its way to one of its experts.
"""

from __future__ import annotations

from .grid import Axis, Grid

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
