"""The debug mode that finds unequal replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parcompile.runtime.tensor_parallel import (
    ColumnParallelLinear,
    ReplicasDifferError,
    RowParallelLinear,
    check_replicated,
    watch_replicas,
)

from .world import World


def check_tensors() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    same = [("a", torch.ones(3)), ("b", torch.arange(4).bfloat16()), ("c", torch.zeros(()))]
    check_replicated(same, group)
    with pytest.raises(ReplicasDifferError, match=r"^b should be the same on all ranks.*rank 0: b .4. torch\.bfloat16"):
        check_replicated([same[0], ("b", same[1][1] + rank), ("c", torch.tensor(float(rank)))], group)
    with pytest.raises(ReplicasDifferError, match=r"different numbers of tensors: \[2, 3\]"):
        check_replicated(same[: 2 + rank], group)


def check_model() -> None:
    torch.manual_seed(0)
    group, rank = dist.group.WORLD, dist.get_rank()
    model = nn.Sequential(
        nn.LayerNorm(8), ColumnParallelLinear(8, 16, group=group), RowParallelLinear(16, 8, group=group)
    )
    handles = watch_replicas(model, group)
    model(torch.ones(2, 8))
    with pytest.raises(ReplicasDifferError, match="the input of 1 should be the same"):
        model(torch.eye(2, 8) * (rank + 1) + rank * torch.arange(8.0))
    for handle in handles:
        handle.remove()
    model(torch.eye(2, 8) * (rank + 1))
    with torch.no_grad():
        model[2].bias += rank
    with pytest.raises(ReplicasDifferError, match=r"^2\.bias should be the same"):
        watch_replicas(model, group)


@pytest.mark.ranks
def test_the_first_tensor_that_differs_is_named(two_ranks: World) -> None:
    two_ranks.run(check_tensors)


@pytest.mark.ranks
def test_a_watched_model_finds_unequal_inputs_and_parameters(two_ranks: World) -> None:
    two_ranks.run(check_model)


def test_one_rank_has_nothing_to_compare() -> None:
    check_replicated([("a", torch.ones(3))], None)
