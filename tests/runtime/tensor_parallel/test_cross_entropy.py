"""Vocabulary-parallel cross entropy on live ranks, against torch.nn.functional.cross_entropy on the full logits.

Tolerances are relative L2: 1e-12 in float64 and 3e-6 in float32 for another order of summation; bf16 gradients are
rounded once, to 8 bits: 1e-2.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import assert_within
from torch import Tensor

from parcompile.runtime.collectives import gather_from_group
from parcompile.runtime.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

from .world import Float32Watch, World, relative_error

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def reference(logits: Tensor, labels: Tensor, z_loss=0.0) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape) + z_loss * logits.logsumexp(-1).square() * (labels != -100)


def check_loss(dtype: torch.dtype, vocab_size: int, options: dict, keywords: dict) -> None:
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    padded = -(-vocab_size // ranks) * ranks
    padded = max(padded, 4 * ranks)
    full = (5 * torch.randn(3, 7, padded)).to(dtype)
    full[0, 0, 0] = 300.0  # the largest logit must be subtracted before the exponential
    labels = torch.randint(vocab_size, (3, 7))
    labels[0, 1:4] = -100
    labels[2] = -100
    weights = torch.rand(3, 7, dtype=torch.promote_types(dtype, torch.float32))

    expected_logits = full[..., :vocab_size].clone().requires_grad_()
    expected = reference(expected_logits, labels, **options)
    expected.backward(weights)
    leaf = full.chunk(ranks, -1)[rank].clone().requires_grad_()
    # Not the leaf itself: autograd refuses to overwrite the storage of one.
    losses = vocab_parallel_cross_entropy(leaf * 1, labels, group=group, vocab_size=vocab_size, **options, **keywords)
    losses.backward(weights)

    assert losses.dtype == expected.dtype and losses.shape == labels.shape
    assert not losses[labels == -100].any()
    exact = TOLERANCE[torch.promote_types(dtype, torch.float32)]
    assert_within(relative_error(losses, expected), exact)
    others = gather_from_group(losses.detach().unsqueeze(0), 0, group)
    assert all(torch.equal(other, losses) for other in others), "the ranks disagree on the loss"
    grad = F.pad(expected_logits.grad, (0, padded - vocab_size)).chunk(ranks, -1)[rank]
    if grad.any():
        assert_within(relative_error(leaf.grad, grad), TOLERANCE[dtype])
    assert not leaf.grad[labels == -100].any()
    assert not leaf.grad[..., max(vocab_size - rank * padded // ranks, 0) :].any()


def check_tied_head(padded: int) -> None:
    """Embedding, head and loss on one table [vocabulary 29, 8] that is padded and cut."""
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    full = torch.nn.Embedding(29, 8, dtype=torch.float64)
    tokens, labels = torch.randint(29, (2, 2, 5))
    expected = F.cross_entropy(F.linear(full(tokens).sin(), full.weight).flatten(0, 1), labels.flatten())
    expected.backward()
    table = VocabParallelEmbedding.from_embedding(full, group=group, padded_num_embeddings=padded)
    linear = torch.nn.Linear(8, 29, bias=False, dtype=torch.float64)
    head = ColumnParallelLinear.from_linear(linear, padded_out_features=padded, group=group)
    head.weight = table.weight
    loss = vocab_parallel_cross_entropy(head(table(tokens).sin()), labels, group=group, vocab_size=29).mean()
    loss.backward()
    assert_within(relative_error(loss, expected), 1e-12)
    grad = F.pad(full.weight.grad, (0, 0, 0, padded - 29)).chunk(ranks)[rank]
    assert_within(relative_error(table.weight.grad, grad), 1e-12)


def check_refusals() -> None:
    logits, group = torch.zeros(2, 4), dist.group.WORLD
    with pytest.raises(ValueError, match=r"label 7 is outside the vocabulary of 7: ids are 0\.\.6, and -100"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 7]), group=group, vocab_size=7)
    with pytest.raises(ValueError, match="vocab_size = 9, but 2 ranks hold 4 columns each: 8"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 7]), group=group, vocab_size=9)
    with pytest.raises(ValueError, match="one label per token"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0]), group=group)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("vocab_size", [32, 29, 5], ids=["even", "padded", "a rank of padding only"])
def test_loss_and_gradient_equal_those_of_the_full_logits(ranks: World, dtype: torch.dtype, vocab_size: int) -> None:
    ranks.run(check_loss, dtype, vocab_size, {}, {})


@pytest.mark.ranks
def test_the_z_loss_equals_its_definition(ranks: World) -> None:
    ranks.run(check_loss, torch.float64, 29, {"z_loss": 1e-2}, {})


@pytest.mark.ranks
def test_a_tied_and_padded_head_gets_both_gradients(ranks: World) -> None:
    ranks.run(check_tied_head, 32)


@pytest.mark.ranks
@pytest.mark.parametrize("keywords", [{"chunk_tokens": 4}, {"chunk_tokens": 1}, {"inplace_backward": True}], ids=str)
def test_chunks_and_the_inplace_backward_change_nothing(two_ranks: World, keywords: dict) -> None:
    two_ranks.run(check_loss, torch.float64, 29, {"z_loss": 1e-2}, keywords)


@pytest.mark.ranks
def test_labels_and_shapes_that_do_not_fit_are_refused(two_ranks: World) -> None:
    two_ranks.run(check_refusals)


def test_a_second_inplace_backward_raises() -> None:
    logits = torch.randn(4, 8, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits * 1, torch.arange(4), inplace_backward=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_rank_holds_a_chunk_in_float32_at_a_time() -> None:
    """The largest float32 tensor that forward and backward allocate is one chunk, not [T, V]."""
    logits = torch.randn(512, 1000, dtype=torch.bfloat16, requires_grad=True)
    with Float32Watch() as watch:
        vocab_parallel_cross_entropy(logits, torch.arange(512), chunk_tokens=16).sum().backward()
    assert watch.largest <= 16 * 1000 * 4
