"""The head's product with its loss in chunks, on live ranks, against one process with the full logits.

Tolerances as in `test_cross_entropy`; gradients in bf16 are rounded several times: 5e-2.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import assert_within

from parcompile.runtime.collectives import gather_from_group
from parcompile.runtime.tensor_parallel import linear_cross_entropy

from .world import Float32Watch, World, relative_error

LOSS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}
GRADIENT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 5e-2}
VOCABULARY, PADDED, HIDDEN = 29, 32, 8


def cap(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits / 3.0) * 3.0


def check_head(dtype: torch.dtype, length: int, options: dict) -> None:
    torch.manual_seed(0)
    options = dict(options)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    spread, capped = options.pop("sequence_parallel", False), options.pop("capped", False)
    biased, frozen = options.pop("biased", False), options.pop("frozen", False)
    weight, bias = (2 * torch.randn(VOCABULARY, HIDDEN)).to(dtype), torch.randn(VOCABULARY).to(dtype)
    hidden, labels = torch.randn(3, length, HIDDEN).to(dtype), torch.randint(VOCABULARY, (3, length))
    labels[0, 1:3] = -100
    labels[2] = -100
    scale = torch.tensor(1 / 7)

    whole = torch.promote_types(dtype, torch.float32)
    x, w, b = (one.to(whole, copy=True).requires_grad_() for one in (hidden, weight, bias))
    logits = F.linear(x, w, b if biased else None)
    logits = cap(logits) if capped else logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    losses = losses + options.get("z_loss", 0.0) * logits.logsumexp(-1).square() * (labels != -100)
    expected = losses.sum()
    (expected * scale).backward()

    own = F.pad(weight, (0, 0, 0, PADDED - VOCABULARY)).chunk(ranks)[rank].clone().requires_grad_(not frozen)
    own_bias = F.pad(bias, (0, PADDED - VOCABULARY)).chunk(ranks)[rank].clone().requires_grad_()
    share = -(-length // ranks)
    taken = F.pad(hidden, (0, 0, 0, share * ranks - length)).split(share, 1)[rank] if spread else hidden
    taken = taken.clone().requires_grad_()
    arguments = {"sequence_parallel": spread, "vocab_size": VOCABULARY, "elementwise": cap if capped else None}
    total = linear_cross_entropy(taken, own, own_bias if biased else None, labels, group=group, **arguments, **options)
    with torch.no_grad():
        again = linear_cross_entropy(
            taken, own, own_bias if biased else None, labels, group=group, **arguments, **options
        )
    assert torch.equal(total, again)
    (total * scale).backward()

    assert total.dtype == whole
    assert_within(relative_error(total, expected), LOSS[dtype])
    others = gather_from_group(total.detach().reshape(1), 0, group)
    assert all(torch.equal(other, total) for other in others), "the ranks disagree on the loss"
    gradient = F.pad(x.grad, (0, 0, 0, share * ranks - length)).split(share, 1)[rank] if spread else x.grad
    assert_within(relative_error(taken.grad, gradient), GRADIENT[dtype])
    padding = PADDED - VOCABULARY
    if frozen:
        assert own.grad is None
    else:
        assert_within(relative_error(own.grad, F.pad(w.grad, (0, 0, 0, padding)).chunk(ranks)[rank]), GRADIENT[dtype])
    if biased:
        assert_within(relative_error(own_bias.grad, F.pad(b.grad, (0, padding)).chunk(ranks)[rank]), GRADIENT[dtype])
    with pytest.raises(RuntimeError, match=r"inplace operation|backward through the graph a second time"):
        (total * scale).backward()


def check_chunks_alone() -> None:
    """No tensor has the columns of more tokens than a chunk."""
    weight, labels = torch.randn(48, 4, requires_grad=True), torch.randint(96, (1, 64))
    hidden = torch.randn(1, 64, 4, dtype=torch.bfloat16, requires_grad=True)
    with Float32Watch() as watch:
        linear_cross_entropy(
            hidden, weight.bfloat16(), None, labels, group=dist.group.WORLD, chunk_tokens=16
        ).backward()
    assert watch.largest <= 16 * 48 * 4


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", LOSS, ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("spread", [False, True], ids=["replicated", "sequence parallel"])
def test_loss_and_gradients_equal_those_of_the_full_logits(ranks: World, dtype: torch.dtype, spread: bool) -> None:
    ranks.run(check_head, dtype, 7, {"chunk_tokens": 6, "sequence_parallel": spread})


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        {"chunk_tokens": 1},
        {"chunk_tokens": 1000, "z_loss": 1e-2},
        {"chunk_tokens": 9, "capped": True, "sequence_parallel": True},
        {"chunk_tokens": 5, "capped": True, "biased": True, "z_loss": 1e-2},
        {"chunk_tokens": 6, "frozen": True, "sequence_parallel": True},
    ],
    ids=str,
)
def test_caps_biases_frozen_heads_and_any_chunk_change_nothing(two_ranks: World, options: dict) -> None:
    two_ranks.run(check_head, torch.float64, 7, options)


@pytest.mark.ranks
def test_no_rank_has_the_logits_of_more_tokens_than_a_chunk(two_ranks: World) -> None:
    two_ranks.run(check_chunks_alone)


def test_labels_and_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight = torch.zeros(1, 2, 4), torch.zeros(7, 4)
    with pytest.raises(ValueError, match=r"label 7 is outside the vocabulary of 7: ids are 0\.\.6, and -100"):
        linear_cross_entropy(hidden, weight, None, torch.tensor([[0, 7]]), chunk_tokens=4)
    with pytest.raises(ValueError, match=r"labels \(1, 3\) do not match hidden states \(1, 2, 4\)"):
        linear_cross_entropy(hidden, weight, None, torch.tensor([[0, 7, 1]]), chunk_tokens=4)
