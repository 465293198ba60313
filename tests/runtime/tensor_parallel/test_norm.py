"""Norms of a split sequence, against the norm of the whole one; 1e-12 relative in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from closeness import assert_within
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parcompile.runtime.tensor_parallel import (
    SequenceParallelLayerNorm,
    SequenceParallelRMSNorm,
    is_sharded,
    sum_gradients,
    sum_partial_gradients,
)

from .world import World, relative_error


def check_norms() -> None:
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, upstream = torch.randn(2, 2, 8, 16, dtype=torch.float64)
    for full, kind in (
        (nn.RMSNorm(16, 1e-5, dtype=torch.float64), SequenceParallelRMSNorm),
        (nn.LayerNorm(16, dtype=torch.float64), SequenceParallelLayerNorm),
        (nn.LayerNorm(16, bias=False, dtype=torch.float64), SequenceParallelLayerNorm),
    ):
        nn.init.normal_(full.weight)
        x_full = x.clone().requires_grad_()
        y_full = full(x_full)
        y_full.backward(upstream)
        expected = {name: parameter.grad for name, parameter in full.named_parameters()}
        full.zero_grad()
        norm = kind.from_norm(full, group)
        x_own = x.chunk(ranks, 1)[rank].clone().requires_grad_()
        y = norm(x_own)
        y.backward(upstream.chunk(ranks, 1)[rank])
        assert_within(relative_error(y, y_full.chunk(ranks, 1)[rank]), 1e-12)
        assert_within(relative_error(x_own.grad, x_full.grad.chunk(ranks, 1)[rank]), 1e-12)
        for name, parameter in norm.named_parameters():
            assert_within(relative_error(parameter.grad, expected[name]), 1e-12)
            assert not is_sharded(parameter)


def check_later_and_routers() -> None:
    """Gradients that are summed together after two backwards, and those of a module that is not ours."""
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, upstream = torch.randn(2, 2, 8, 16, dtype=torch.float64)
    whole = nn.Sequential(
        nn.LayerNorm(16, dtype=torch.float64), nn.RMSNorm(16, dtype=torch.float64), nn.Linear(16, 4).double()
    )
    upstream = upstream[..., :4]
    for _ in range(2):
        whole(x).backward(upstream)
    for router_later in (False, True):
        router = copy.deepcopy(whole[2])
        layer_norm, rms_norm = copy.deepcopy(whole[0]), copy.deepcopy(whole[1])
        split = nn.Sequential(
            SequenceParallelLayerNorm.from_norm(layer_norm, group, sum_later=True),
            SequenceParallelRMSNorm.from_norm(rms_norm, group, sum_later=True),
            router,
        )
        split.zero_grad()
        sum_gradients(router, group, later=router_later)
        with CountAllReduces() as calls:
            for _ in range(2):
                split(x.chunk(ranks, 1)[rank]).backward(upstream.chunk(ranks, 1)[rank])
            assert calls.count == (0 if router_later else 4)
            sum_partial_gradients(split.parameters(), group)
            assert calls.count == (1 if router_later else 5)
        for name, parameter in split.named_parameters():
            assert_within(relative_error(parameter.grad, whole.get_parameter(name).grad), 1e-12, name)
            assert not is_sharded(parameter)


class CountAllReduces(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in ("c10d::allreduce_", "c10d::alltoall_base_")
        return function(*args, **(kwargs or {}))


@pytest.mark.ranks
def test_partial_gradients_can_be_summed_together_and_for_any_module(ranks: World) -> None:
    ranks.run(check_later_and_routers)


@pytest.mark.ranks
def test_the_weight_gradient_of_a_split_sequence_is_that_of_the_whole(ranks: World) -> None:
    ranks.run(check_norms)


def test_one_rank_is_a_plain_norm() -> None:
    norm, x = nn.RMSNorm(8), torch.randn(2, 8)
    assert torch.equal(SequenceParallelRMSNorm.from_norm(norm, None)(x), norm(x))
    assert torch.equal(SequenceParallelLayerNorm(8)(x), nn.LayerNorm(8)(x))
    later = SequenceParallelLayerNorm(8, sum_later=True)
    assert not hasattr(later.weight, "sequence_parallel")
    sum_partial_gradients(later.parameters(), None)
