"""The differentiable collectives, on live ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from closeness import assert_within

from parcompile.runtime import collectives
from parcompile.runtime.collectives import (
    copy_to_group,
    gather_from_group,
    gather_from_sequence,
    reduce_from_group,
    reduce_scatter_to_sequence,
    scatter_to_group,
)

from .world import World, each_transport, relative_error

pytestmark = pytest.mark.ranks

COLLECTIVES = {
    "copy_to_group": lambda x, group, dim: copy_to_group(x, group),
    "reduce_from_group": lambda x, group, dim: reduce_from_group(x, group),
    "gather_from_sequence": lambda x, group, dim: gather_from_sequence(x, dim, group),
    "reduce_scatter_to_sequence": lambda x, group, dim: reduce_scatter_to_sequence(x, dim, group),
    "scatter_to_group": lambda x, group, dim: scatter_to_group(x, dim, group),
    "gather_from_group": lambda x, group, dim: gather_from_group(x, dim, group),
}


def everyones(shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(dist.get_world_size())]


def check_on_each_transport(check, *args) -> None:
    for _ in each_transport():
        check(*args)


def check_forward(dim: int) -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs = everyones((4, 8, 4), 0)
    x, total = inputs[rank], torch.stack(inputs).sum(0)
    own = total.chunk(ranks, dim)[rank]
    gathered = torch.cat(inputs, dim)
    exact = {"rtol": 1e-14, "atol": 1e-14}
    torch.testing.assert_close(copy_to_group(x, group), x, rtol=0, atol=0)
    torch.testing.assert_close(reduce_from_group(x, group), total, **exact)
    torch.testing.assert_close(gather_from_sequence(x, dim, group), gathered, rtol=0, atol=0)
    torch.testing.assert_close(gather_from_group(x, dim, group), gathered, rtol=0, atol=0)
    torch.testing.assert_close(reduce_scatter_to_sequence(x, dim, group), own, **exact)
    torch.testing.assert_close(scatter_to_group(x, dim, group), x.chunk(ranks, dim)[rank], rtol=0, atol=0)
    torch.testing.assert_close(x, everyones((4, 8, 4), 0)[rank], rtol=0, atol=0)  # inputs are left alone


def check_transposed(name: str, dim: int) -> None:
    """⟨f(x), w⟩ = ⟨x, fᵀ(w)⟩, where both products run over all ranks.

    It defines the backward, as long as replicated tensors are counted as what they are: an output that is the same on
    all ranks gets the same gradient on all ranks, and is one tensor, so it is counted once.
    """
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    replicated_input = name in ("copy_to_group", "scatter_to_group")
    replicated_output = name in ("reduce_from_group", "gather_from_group")
    xs = everyones((4, 8, 4), 1)
    x = xs[0 if replicated_input else rank].clone().requires_grad_()
    y = COLLECTIVES[name](x, group, dim)
    weights = everyones(tuple(y.shape), 2)
    weight = weights[0 if replicated_output else rank]
    (grad,) = torch.autograd.grad(y, x, weight)
    products = torch.stack(
        [
            (y * weight).sum() / (ranks if replicated_output else 1),
            (x * grad).sum() / (ranks if replicated_input else 1),
        ]
    ).detach()
    dist.all_reduce(products)
    torch.testing.assert_close(products[0], products[1], rtol=1e-12, atol=1e-12)


def check_gradcheck(dim: int) -> None:
    """Numerical derivatives of each pair as it is used: replicated in, rank-dependent work, replicated out."""
    group, rank = dist.group.WORLD, dist.get_rank()
    ranks = dist.get_world_size()
    scale = torch.linspace(0.5, 2.0, ranks, dtype=torch.float64)[rank]
    x = everyones((2 * ranks, ranks), 3)[0].requires_grad_()

    def all_reduced(x: torch.Tensor) -> torch.Tensor:
        return reduce_from_group((copy_to_group(x, group) * scale).sin(), group)

    def sequence_parallel(x: torch.Tensor) -> torch.Tensor:
        local = scatter_to_group(x, dim, group)
        mixed = (gather_from_sequence(local, dim, group) * scale).sin()
        return gather_from_group(reduce_scatter_to_sequence(mixed, dim, group), dim, group)

    for function in (all_reduced, sequence_parallel):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


def check_subgroups() -> None:
    """Groups of ranks that are neither all nor the first, in descending order of creation."""
    rank = dist.get_rank()
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    group = odd if rank % 2 else even
    x = torch.full((1, 2), float(rank), dtype=torch.float64, requires_grad=True)
    y = gather_from_sequence(x, 0, group)
    assert y[:, 0].tolist() == [float(rank % 2), float(rank % 2 + 2)]
    (y * torch.tensor([[1.0], [10.0]])).sum().backward()
    assert x.grad.flatten().tolist() == [2.0 if rank < 2 else 20.0] * 2
    assert reduce_from_group(x, group)[0, 0] == 2.0 + 2 * (rank % 2)
    dist.destroy_process_group(odd), dist.destroy_process_group(even)


def check_half_precision() -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    inputs = [x.bfloat16() for x in everyones((4, 8), 4)]
    exact = torch.stack([x.float() for x in inputs]).sum(0).bfloat16()
    for transport in each_transport():
        own = reduce_scatter_to_sequence(inputs[rank], 0, group)
        if transport == "exchanges":  # gloo's own rounds after each of the ranks
            assert torch.equal(own, exact.chunk(ranks)[rank])
        assert_within(relative_error(own, exact.chunk(ranks)[rank]), 1e-2 * ranks)
        assert torch.equal(gather_from_group(inputs[rank], -1, group), torch.cat(inputs, -1))


def check_views_and_strides() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    inputs = [x.t() for x in everyones((4, 8), 5)]
    assert torch.equal(gather_from_sequence(inputs[rank], 1, group), torch.cat(inputs, 1))
    torch.testing.assert_close(reduce_from_group(inputs[rank], group), torch.stack(inputs).sum(0))
    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    copy_to_group(one.expand(4, 4), group).sum().backward()  # gradients that share one element
    assert one.grad == 16 * dist.get_world_size()
    assert torch.equal(gather_from_sequence(torch.empty(0, 3), 0, group), torch.empty(0, 3))


def check_indivisible() -> None:
    ranks = dist.get_world_size()
    for cut in (scatter_to_group, reduce_scatter_to_sequence):
        with pytest.raises(ValueError, match=rf"{ranks + 1} % {ranks} = 1; pad it to {2 * ranks}"):
            cut(torch.zeros(2, ranks + 1), 1, dist.group.WORLD)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_each_collective_returns_what_one_process_would(ranks: World, dim: int) -> None:
    ranks.run(check_on_each_transport, check_forward, dim)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_backward_is_the_transposed_map(ranks: World, name: str) -> None:
    ranks.run(check_on_each_transport, check_transposed, name, 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_numerical_derivatives_agree(two_ranks: World, dim: int) -> None:
    two_ranks.run(check_on_each_transport, check_gradcheck, dim)


def test_subgroups_translate_their_ranks(four_ranks: World) -> None:
    four_ranks.run(check_on_each_transport, check_subgroups)


def test_half_precision_is_reduced_and_gathered(ranks: World) -> None:
    ranks.run(check_half_precision)


def test_strided_shared_and_empty_tensors_are_taken(two_ranks: World) -> None:
    two_ranks.run(check_on_each_transport, check_views_and_strides)


def test_a_size_that_the_ranks_do_not_divide_is_refused_with_its_numbers(two_ranks: World) -> None:
    two_ranks.run(check_indivisible)


def test_without_a_group_nothing_happens() -> None:
    x = torch.randn(3, 5)
    assert collectives.group_size(None) == 1 and collectives.group_rank(None) == 0
    assert all(collective(x, None, 0) is x for collective in COLLECTIVES.values())
