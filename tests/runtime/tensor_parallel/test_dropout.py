"""Random numbers inside and outside the tensor-parallel region."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parcompile.runtime.collectives import gather_from_group
from parcompile.runtime.tensor_parallel import ParallelDropout, rank_random

from .world import World


def everyones(x: Tensor) -> list[Tensor]:
    return list(gather_from_group(x.detach().unsqueeze(0), 0, dist.group.WORLD))


def all_equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def check_inside_and_outside() -> None:
    torch.manual_seed(0)
    inside, outside = ParallelDropout(0.5, group=dist.group.WORLD), nn.Dropout(0.5)
    x = torch.ones(64)
    before, first, second, after = outside(x), inside(x), inside(x), outside(x)
    assert all_equal(everyones(before)) and all_equal(everyones(after))
    masks = everyones(first) + everyones(second)
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    torch.manual_seed(0)
    assert torch.equal(outside(x), before) and torch.equal(inside(x), first)  # reproducible
    inside.eval()
    assert inside(x) is x


def check_checkpointing() -> None:
    inside, outside = ParallelDropout(0.5, group=dist.group.WORLD), nn.Dropout(0.5)

    def block(x: Tensor) -> Tensor:
        return outside(inside(outside(x) * 2) * 3)

    for reentrant in (False, True):
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())  # y is linear in x = 1: the masks of both passes agree


def check_errors_leave_the_state_alone() -> None:
    torch.manual_seed(0)
    with pytest.raises(KeyError), rank_random(dist.group.WORLD):
        raise KeyError
    assert all_equal(everyones(torch.rand(8)))


pytestmark = pytest.mark.ranks


def test_ranks_drop_the_same_outside_and_differently_inside(ranks: World) -> None:
    ranks.run(check_inside_and_outside)


def test_activation_checkpointing_draws_the_same_masks_again(two_ranks: World) -> None:
    two_ranks.run(check_checkpointing)


def test_the_outside_stays_in_step_after_an_error_inside(two_ranks: World) -> None:
    two_ranks.run(check_errors_leave_the_state_alone)
