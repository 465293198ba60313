"""Entropy and divergence of spread logits on live ranks, against their definitions on the full logits.

Tolerances are relative L2: 1e-12 in float64, 1e-6 in float32, 3e-6 for its gradients, in which logarithms of about 10
cancel. Gradients in bf16 are rounded once, to 8 bits: 1e-2.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import assert_within
from torch import Tensor

from parcompile.runtime.collectives import gather_from_group
from parcompile.runtime.tensor_parallel import vocab_parallel_entropy, vocab_parallel_kl_divergence

from .world import Float32Watch, World, relative_error

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def entropy(logits: Tensor) -> Tensor:
    """By the definition, in float64."""
    logs = logits.double().log_softmax(-1)
    return -(logs.exp() * logs.masked_fill(logs.isinf(), 0.0)).sum(-1)


def divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """By the definition, in float64."""
    logs, others = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
    return (logs.exp() * (logs - others).masked_fill(logs.isinf(), 0.0)).sum(-1)


def check(dtype: torch.dtype, vocab_size: int, chunk_tokens: int | None) -> None:
    """Values, that ranks agree on them, and the gradients of both logits; one logit is −∞ and one is large."""
    torch.manual_seed(0)
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    padded = max(-(-vocab_size // ranks) * ranks, 4 * ranks)
    full, reference = ((3 * torch.randn(3, 7, padded)).to(dtype) for _ in range(2))
    full[0, 0, 0], full[0, 1, 2] = 100.0, -torch.inf
    weights = torch.rand(3, 7, dtype=torch.promote_types(dtype, torch.float32))
    exact = 1e-12 if dtype is torch.float64 else 1e-6
    options = {"group": group, "vocab_size": vocab_size, "chunk_tokens": chunk_tokens}

    whole = [one[..., :vocab_size].clone().requires_grad_() for one in (full, reference)]
    own = [one.chunk(ranks, -1)[rank].clone().requires_grad_() for one in (full, reference)]
    pairs = (
        (vocab_parallel_entropy(own[0], **options), entropy(whole[0])),
        (vocab_parallel_kl_divergence(*own, **options), divergence(*whole)),
    )
    for found, expected in pairs:
        assert found.dtype == weights.dtype and found.shape == (3, 7)
        assert_within(relative_error(found, expected), exact)
        others = gather_from_group(found.detach().unsqueeze(0), 0, group)
        assert all(torch.equal(other, found) for other in others), "the ranks disagree"
        for one in (*whole, *own):
            one.grad = None
        (found * weights).sum().backward()
        (expected * weights).sum().backward()
        for one, theirs in zip(own, whole, strict=True):
            if theirs.grad is None:
                assert one.grad is None
                continue
            grad = F.pad(theirs.grad, (0, padded - vocab_size)).chunk(ranks, -1)[rank]
            if grad.any():
                assert_within(relative_error(one.grad, grad), TOLERANCE[dtype])
            assert not one.grad[..., max(vocab_size - rank * padded // ranks, 0) :].any()


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("vocab_size", [32, 29, 5], ids=["even", "padded", "a rank of padding only"])
def test_values_and_gradients_equal_those_of_the_full_logits(ranks: World, dtype: torch.dtype, vocab_size: int) -> None:
    ranks.run(check, dtype, vocab_size, 4 if vocab_size == 29 else None)


def test_a_reference_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reference \(2, 5\) and logits \(2, 4\) must have one shape"):
        vocab_parallel_kl_divergence(torch.zeros(2, 4), torch.zeros(2, 5))


def test_one_rank_holds_chunks_in_float32_at_a_time() -> None:
    """The largest float32 tensor that forward and backward allocate is one chunk, not [T, V]."""
    logits, reference = (torch.randn(512, 1000, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with Float32Watch() as watch:
        vocab_parallel_kl_divergence(logits, reference, chunk_tokens=16).sum().backward()
    assert watch.largest <= 16 * 1000 * 4
