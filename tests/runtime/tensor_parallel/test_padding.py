"""Sequences that tp does not divide, in the sequence-parallel region: a block of every layer against one process.

Attention looks at all tokens in both directions, so that a padded token that anybody saw would change every number.
float64, 1e-12 relative; tp 4 with three tokens leaves a rank with nothing but padding.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import assert_within
from torch import Tensor, nn

from parcompile.runtime.collectives import (
    gather_from_group,
    gather_from_sequence,
    reduce_scatter_to_sequence,
    scatter_to_group,
)
from parcompile.runtime.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    sum_in_backward,
)

from .world import World, each_transport, relative_error

pytestmark = pytest.mark.ranks

HIDDEN, VOCABULARY = 8, 16
CUT = {"embedding.weight": 0, "head.weight": 0, "o.weight": 1, "q.bias": 0} | {f"{name}.weight": 0 for name in "qkv"}


class Block(nn.Module):
    """Tokens to logits: embedding, norm, attention of one head per 2 features, residual, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.first, self.last = (nn.LayerNorm(HIDDEN, dtype=torch.float64) for _ in range(2))
        # A bias on q and o; the gradient of one on k is zero but for rounding.
        self.q, self.k, self.v, self.o = (
            nn.Linear(HIDDEN, HIDDEN, bias=bias, dtype=torch.float64) for bias in (True, False, False, True)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in self.project(self.first(x)))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return self.head(self.enter(self.last(x)))


def parallel(full: Block, length: int, keep_gathered: bool) -> Block:
    group, block = dist.group.WORLD, Block()
    split = {"group": group, "sequence_parallel": True, "sequence_dim": 1}
    block.embedding = VocabParallelEmbedding.from_embedding(full.embedding, pad_sequence=True, **split)
    block.first, block.last = full.first, full.last
    for parameter in (*block.first.parameters(), *block.last.parameters()):
        sum_in_backward(parameter, group)
    for name in "qkv":
        options = {"sequence_length": length, "keep_gathered": keep_gathered, **split}
        setattr(block, name, ColumnParallelLinear.from_linear(getattr(full, name), **options))
    block.o = RowParallelLinear.from_linear(full.o, pad_sequence=True, **split)
    block.head = ColumnParallelLinear.from_linear(full.head, group=group, input_is_ready=True)
    block.enter = lambda x: gather_from_sequence(x, 1, group, length)
    return block


def check_block(length: int) -> None:
    torch.manual_seed(0)
    full, rank, ranks = Block(), dist.get_rank(), dist.get_world_size()
    tokens, upstream = torch.randint(VOCABULARY, (2, length)), torch.randn(2, length, VOCABULARY, dtype=torch.float64)
    expected = full(tokens)
    expected.backward(upstream)
    own_upstream = upstream.chunk(ranks, -1)[rank]
    for keep_gathered in (False, True):
        alone, together = (parallel(copy.deepcopy(full), length, keep_gathered) for _ in range(2))
        together.project = lambda x, block=together: column_parallel(x, (block.q, block.k, block.v))
        for model in (alone, together):
            for _ in each_transport():
                model.zero_grad()
                out = model(tokens)
                out.backward(own_upstream)
                assert_within(relative_error(out, expected.chunk(ranks, -1)[rank]), 1e-12)
                for name, parameter in model.named_parameters():
                    wanted, dim = full.get_parameter(name).grad, CUT.get(name)
                    wanted = wanted if dim is None else wanted.chunk(ranks, dim)[rank]
                    assert_within(relative_error(parameter.grad, wanted), 1e-12, name)


def check_another_length() -> None:
    """A call can have another length than the one before it."""
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    column = ColumnParallelLinear.from_linear(linear, group=group, sequence_parallel=True, sequence_dim=0)
    for length in (5, 3, 1):
        x = torch.randn(length, HIDDEN, dtype=torch.float64)
        own = scatter_to_group(x, 0, group, pad=True)
        assert_within(relative_error(column(own, length), linear(x).chunk(ranks, -1)[rank]), 1e-12)
    with pytest.raises(ValueError, match=rf"a sequence of 20 on {ranks} ranks is {20 // ranks} on each of them"):
        column(own, 20)


def check_refusals() -> None:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    row = RowParallelLinear(8, 8, group=group, sequence_parallel=True, sequence_dim=0)
    with pytest.raises(ValueError, match=f"pad it to {2 * ranks}"):
        row(torch.zeros(ranks + 1, 8 // ranks))


def check_collectives(dim: int) -> None:
    """Padded in, cut out: the way there and back is the identity, or a sum, for values and for gradients."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(5, 7, 3, dtype=torch.float64)
    size = x.shape[dim]
    there = x.clone().requires_grad_()
    back = gather_from_group(scatter_to_group(there, dim, group, pad=True), dim, group, size)
    assert torch.equal(back, x)
    (grad,) = torch.autograd.grad(back, there, x)
    assert torch.equal(grad, x)
    partial = (x * (rank + 1)).requires_grad_()
    total = ranks * (ranks + 1) / 2
    back = gather_from_sequence(reduce_scatter_to_sequence(partial, dim, group, pad=True), dim, group, size)
    assert_within(relative_error(back, x * total), 1e-14)
    (grad,) = torch.autograd.grad(back, partial, x * (rank + 1))
    assert_within(relative_error(grad, x * total), 1e-14)


@pytest.mark.parametrize("length", [3, 5, 8])
def test_a_block_on_a_sequence_of_any_length_equals_one_process(ranks: World, length: int) -> None:
    ranks.run(check_block, length)


def test_the_length_can_change_from_call_to_call(ranks: World) -> None:
    ranks.run(check_another_length)


def test_without_permission_to_pad_the_sequence_is_refused(ranks: World) -> None:
    ranks.run(check_refusals)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_padding_goes_there_and_back(ranks: World, dim: int) -> None:
    ranks.run(check_collectives, dim)
