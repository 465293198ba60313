"""Contract: blocks take their input in together, under eager PyTorch and torch.compile; what cannot is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_close, assert_within
from ranks import run_ranks
from torch import Tensor, nn
from training_runs import initial_model, make_plan

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks


def _injected(plan: Plan) -> tuple[nn.Module, dict[str, Tensor]]:
    from parcompile.runtime.data import split_batch
    from parcompile.runtime.groups import join
    from parcompile.runtime.inject import inject

    mesh = join(plan)
    ids = torch.randint(0, 61, (2, plan.spec.training.sequence_length), generator=torch.Generator().manual_seed(3))
    return inject(initial_model(plan), mesh), split_batch({"input_ids": ids, "labels": ids}, mesh)


def _step(model: nn.Module, call: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = call(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {name: one.grad.clone() for name, one in model.named_parameters()}


def compiled_and_not(rank: int, plan: Plan) -> tuple[float, float, float]:
    model, batch = _injected(plan)
    loss, gradients = _step(model, model, batch)
    again, compiled = _step(model, torch.compile(model, backend="aot_eager"), batch)
    worst = max(float((compiled[name] - one).norm() / one.norm()) for name, one in gradients.items())
    return loss, again, worst


def test_a_compiled_model_gives_the_numbers_of_eager_pytorch() -> None:
    plan = make_plan(2, {"tp": 2, "sequence_parallel": True}, training={"sequence_length": 15})
    for loss, again, worst in run_ranks(2, compiled_and_not, plan):
        assert_close(again, loss)
        assert_within(worst, 1e-5)


def two_inputs(rank: int, plan: Plan) -> str:
    from parcompile.runtime.errors import RunError

    model, batch = _injected(plan)
    attention = model.model.layers[0].self_attn
    project = attention.k_proj.forward
    attention.k_proj.forward = lambda x, *rest: project(x * 1.0, *rest)
    try:
        model(**batch)
    except RunError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_that_feeds_a_layer_something_else_is_refused(sequence_parallel: bool) -> None:
    plan = make_plan(2, {"tp": 2, "sequence_parallel": sequence_parallel})
    for message in run_ranks(2, two_inputs, plan):
        assert "or with something else than its hidden states: ColumnParallelLinear(in_features=32" in message
