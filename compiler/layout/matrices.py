"""Which parameters Muon updates, and which rank orthogonalises each of their matrices.

Muon orthogonalises whole matrices. Those of the layers take it, as in Keller Jordan's and Moonlight's recipes
(arXiv 2502.16982) and the documentation of `torch.optim.Muon`; embeddings, heads, norms, biases, routers, convolutions
and all else take AdamW. A matrix is what the model keeps as one parameter, fused projections included; a stack of
experts, which transformers keeps as one parameter of three dims, is a matrix for each expert.

A matrix is orthogonalised once. Its elements lie in the shards of ZeRO, and where tp cuts it on several tp ranks: they
are sent to an owner and come back. Owners take turns, those with the most work first, so that a rank holds one matrix
(or one stack) at a time. What no tp rank has a part of is orthogonalised by each tp rank of the owner's place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from parcompile.model.table import Parameter

_NOT_HIDDEN = re.compile(r"(^|\.)(\w*router(_gate)?|gate|\w*expert_gate)\.|norm|embed")
"""Routers with all that lies in them, gates of shared experts, norms that have matrices, and tables."""
_EXPERTS = 3


def takes_muon(parameter: Parameter) -> bool:
    """Whether the matrices of a parameter are orthogonalised."""
    if parameter.layers is None or not parameter.trained or _NOT_HIDDEN.search(parameter.name):
        return False
    if parameter.expert_dim is not None:
        return len(parameter.shape) == _EXPERTS and parameter.expert_dim == 0
    return len(parameter.shape) == _EXPERTS - 1 and parameter.name.endswith(".weight")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who orthogonalises a matrix: a place in the group of the shards, and on tp; None: each tp rank of that place."""

    matrix: int
    shard: int
    tp: int | None


def rounds(work: Sequence[float], cut: Sequence[bool], shards: int, tp: int) -> list[list[Owner]]:
    """Turns of matrices with this much work, so that a rank orthogonalises one at a time.

    Args:
        work: of each matrix, in any unit.
        cut: whether the tp ranks have slices of it; in a turn are such ones alone, or others alone.
        shards: ranks of the group over which ZeRO shards them.
        tp: tensor-parallel ranks.
    """
    found = []
    for is_cut in (True, False):
        # The most work first; of equal ones in the model's order.
        order = sorted((one for one in range(len(work)) if cut[one] is is_cut), key=lambda one: -work[one])
        slots = shards * (tp if is_cut else 1)
        for first in range(0, len(order), slots):
            turn = enumerate(order[first : first + slots])
            found.append([Owner(one, slot % shards, slot // shards if is_cut else None) for slot, one in turn])
    return found


def newton_schulz_work(shape: Sequence[int], steps: int = 5) -> float:
    """Multiplications and additions of orthogonalising a matrix, or a stack of them: 2 · (2 m n² + n³) in a step."""
    *stack, rows, columns = shape
    long, short = max(rows, columns), min(rows, columns)
    return 2.0 * steps * (stack[0] if stack else 1) * (2 * long * short**2 + short**3)


def pieces(
    numels: Sequence[int], shards: int, *, of_each: bool, whole: bool = False, only: Sequence[int] | None = None
) -> list[list[tuple[int, int]]]:
    """Of each parameter of a group the elements `[start, stop)` in each shard, or in some.

    Args:
        numels: elements of the parameters on this rank, in the order of the group.
        shards: ranks of the group.
        of_each: each parameter is cut by itself, as at ZeRO stage 3; otherwise all of them as one.
        whole: every rank holds all, as at ZeRO stage 0.
        only: these shards; None: all of them.
    """
    found, offset, wanted = [], 0, range(shards) if only is None else only
    padded = -(-sum(numels) // (2 * shards)) * 2 * shards
    for numel in numels:
        size = -(-numel // shards) if of_each else padded // shards
        start = 0 if of_each else offset
        stretches = ((rank * size - start, (rank + 1) * size - start) for rank in wanted)
        held = [(min(max(first, 0), numel), min(max(last, 0), numel)) for first, last in stretches]
        found.append([(0, numel)] * len(wanted) if whole else held)
        offset += numel
    return found
