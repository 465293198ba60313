"""What a rank holds at a time: linear in its own tokens, and less than the keys and values of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

from parcompile.layout import sequence as token_sequence
from parcompile.runtime.ring_attention import ring_attention

RANKS, HEADS, HEAD_DIM = 4, 8, 64


def _most_allocated(function: Callable[[], object]) -> int:
    """Bytes beyond those before, at the most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _beyond_results(rank: int, lengths: list[int], dtype: torch.dtype) -> list[int]:
    """For each number of local tokens, what forward and backward take beside the output and the gradients."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    found = []
    for length in lengths:
        leaves = [torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype).requires_grad_() for _ in range(3)]
        grad = torch.randn_like(leaves[0])
        tensor_bytes = grad.numel() * grad.element_size()
        # One head at a time: messages of all heads are too short to be cut at these sizes.
        token_sequence.SMALLEST_MESSAGE_BYTES = 2 * tensor_bytes // HEADS

        def step(leaves: list[torch.Tensor] = leaves, grad: torch.Tensor = grad) -> object:
            return torch.autograd.grad(ring_attention(*leaves, group=dist.group.WORLD), leaves, grad)

        found.append(_most_allocated(step) - 4 * tensor_bytes)
    return found


@pytest.mark.ranks
def test_a_rank_holds_a_part_of_its_own_tokens_and_never_all_keys() -> None:
    short, long = 384, 768
    for less, more in run_ranks(RANKS, _beyond_results, [short, long], torch.bfloat16):
        whole_keys_and_values = RANKS * 2 * HEADS * long * HEAD_DIM * 2
        assert more < whole_keys_and_values
        # Twice the tokens: scores would take four times as much. The kernel's work space grows in steps.
        assert more < 3 * less
