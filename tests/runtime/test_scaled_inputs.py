"""Contract: tokens of Llama 4 visit the experts alone that they chose; blocks give what those of transformers give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from parcompile.runtime.expert_parallel import visit_chosen

EXPERTS, TOKENS = 8, 24


def blocks(*, width: int, per_token: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """A block as it is in transformers, and a copy whose tokens visit the chosen experts alone."""
    torch.manual_seed(1)
    config = Llama4TextConfig(
        hidden_size=16, intermediate_size=width, num_local_experts=EXPERTS, num_experts_per_tok=per_token
    )
    original = Llama4TextMoe(config)
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    original = original.to(dtype)
    changed = copy.deepcopy(original)
    visit_chosen(torch.nn.ModuleList([changed]))
    return original, changed


def results(block: Any, hidden: Tensor) -> list[Tensor]:
    """What it gives, and the gradients of its input and its parameters."""
    hidden = hidden.clone().requires_grad_()
    output, logits = block(hidden)
    (output.float().square().sum() + logits.float().square().sum()).backward()
    return [output, logits, hidden.grad, *(parameter.grad for parameter in block.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("width", [12, 7], ids=["grouped", "too narrow to be grouped"])
@pytest.mark.parametrize("per_token", [1, 3])
def test_values_and_gradients_are_those_of_transformers(width: int, per_token: int) -> None:
    original, changed = blocks(width=width, per_token=per_token, dtype=torch.float32)
    hidden = torch.randn(2, TOKENS // 2, 16)
    assert_close(results(changed, hidden), results(original, hidden))


def test_large_logits_with_equal_scores_keep_their_order() -> None:
    original, changed = blocks(width=8, per_token=2, dtype=torch.bfloat16)
    for block in (original, changed):
        block.router.weight.data *= 400  # scores of many are 1 then
    hidden = torch.randn(TOKENS, 16, dtype=torch.bfloat16)
    assert (original.router(hidden)[0] == 1).sum() > TOKENS
    found, expected = changed(hidden)[0].detach(), original(hidden)[0].detach()
    assert_close(found, expected, limit=0.05)


def test_no_token_visits_an_expert_that_it_did_not_choose() -> None:
    original, changed = blocks(width=8, per_token=2, dtype=torch.float32)
    hidden = torch.randn(TOKENS, 16)
    visited = (original.router(hidden)[0][:, 5] > 0).nonzero().flatten()
    for block in (original, changed):
        block.experts.down_proj.data[5] = torch.nan
    for block, touched in ((original, torch.arange(TOKENS)), (changed, visited)):
        assert block(hidden)[0].isnan().any(-1).nonzero().flatten().equal(touched)
    assert 0 < len(visited) < TOKENS
