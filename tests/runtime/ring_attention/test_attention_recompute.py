"""Activation checkpointing keeps attention and recomputes the rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parcompile.runtime.ring_attention import keep_attention, ring, ring_attention


def _layer(x_BSC: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    query, key, value = (x_BSC @ weight).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    for _ in range(2):
        query = torch.tanh(ring_attention(query, key, value, group=group))
    return query.transpose(1, 2).flatten(2)


def _tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(2, 12, 16, generator=generator), torch.randn(16, 48, generator=generator)
    return x.requires_grad_(), weight.requires_grad_()


def _checkpointed(x: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    return checkpoint(_layer, x, weight, group, use_reentrant=False, context_fn=keep_attention)


def _gradients(layer: Callable[..., Tensor], group: dist.ProcessGroup | None = None) -> tuple[Tensor, ...]:
    x, weight = _tensors()
    return torch.autograd.grad(layer(x, weight, group).square().sum(), (x, weight))


def test_gradients_are_the_same_with_kept_attention() -> None:
    for kept, plain in zip(_gradients(_checkpointed), _gradients(_layer), strict=True):
        assert torch.equal(kept, plain)


def test_nested_layers_and_repeated_backward_take_their_own_attention() -> None:
    x, weight = _tensors()
    both = [layer(layer(x, weight)[..., :16] + x, weight) for layer in (_layer, _checkpointed)]
    plain, kept = (torch.autograd.grad(out.square().sum(), (x, weight), retain_graph=True) for out in both)
    again = torch.autograd.grad(both[1].square().sum(), (x, weight))
    for one, two, three in zip(plain, kept, again, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def _hiding(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with a bias that is made inside, as an indexer's choice of keys is."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.rand(1, 1, 12, 12, generator=generator) > 0.7
    bias = torch.zeros(hidden.shape).masked_fill_(hidden & ~torch.eye(12, dtype=torch.bool), -torch.inf)
    _biases.append(weakref.ref(bias.untyped_storage()))
    found: Tensor = ring_attention(query, key, value, bias=bias)
    return found


_biases: list[weakref.ref[torch.UntypedStorage]] = []


def test_a_bias_is_made_again_and_not_kept() -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(2, 2, 12, 8, generator=generator, requires_grad=True) for _ in range(3)]
    _biases.clear()
    out = checkpoint(_hiding, *inputs, use_reentrant=False, context_fn=keep_attention)
    assert [one() for one in _biases] == [None], "the mask of a recomputed layer stays in memory"
    plain = torch.autograd.grad(_hiding(*inputs).square().sum(), inputs)
    for kept, expected in zip(torch.autograd.grad(out.square().sum(), inputs), plain, strict=True):
        assert torch.equal(kept, expected)
    assert len(_biases) == 3


def _count_exchanges(rank: int) -> tuple[int, int, bool]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    counted, post = [0], ring.post_exchanges

    def counting(*args: object) -> object:
        counted[0] += 1
        return post(*args)  # type: ignore[arg-type]

    ring.post_exchanges = counting  # type: ignore[assignment]
    plain = _gradients(_layer, dist.group.WORLD)
    without = counted[0]
    kept = _gradients(_checkpointed, dist.group.WORLD)
    return without, counted[0] - without, all(map(torch.equal, plain, kept))


@pytest.mark.ranks
def test_recomputation_does_not_communicate() -> None:
    for without, kept, equal in run_ranks(2, _count_exchanges, timeout=60):
        # Two attentions; forward: keys and values; backward: keys and values, and their gradients.
        assert (without, kept) == (2 * 3, 2 * 3)
        assert equal
