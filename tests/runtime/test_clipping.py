"""Contract: gradients are clipped to the plan's norm over all ranks, as one process would.

With plain SGD, whose update is proportional to the factor; with Adam a wrong factor is hardly seen. Updates differ by
rounding (1e-6); a norm of 0.5001 in place of 0.5 makes them differ by 2e-4.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_within
from ranks import run_ranks
from torch import Tensor
from training_runs import initial_model, make_plan, samples, whole_parameters

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

RATE, TOLERANCE = 10.0, 1e-5


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def step(rank: int, plan: Plan) -> dict[str, Any]:
    """One step of SGD under the engine."""
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(
        plan=plan, model=initial_model(plan), optimizer=sgd, training_data=samples(plan), measurements=False
    )
    engine.train_batch(iter(loader))
    parameters = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return {"rank": rank, "parameters": parameters}


def updates_of_one_process(plan: Plan, clipping: float) -> dict[str, Tensor]:
    """What a step of torch alone adds to each parameter."""
    model, size = initial_model(plan), plan.spec.training.global_batch_size
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids = torch.stack([sample["input_ids"] for sample in samples(plan)[:size]])
    model(input_ids=ids, labels=ids).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
    assert norm > 2 * clipping
    sgd(model.parameters()).step()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all updates together, relative."""
    wrong = sum(float((found[name] - update).square().sum()) for name, update in expected.items())
    return float((wrong / sum(float(update.square().sum()) for update in expected.values())) ** 0.5)


@pytest.mark.parametrize(
    ("world_size", "parallelism"),
    [(4, {"tp": 2, "cp": 2, "sequence_parallel": True}), (4, {"pp": 2, "dp": 2})],
    ids=["tp2cp2sp", "pp2dp2"],
)
def test_gradients_are_clipped_to_the_planned_norm_and_no_other(world_size: int, parallelism: dict[str, Any]) -> None:
    extra = {"deepspeed": {"zero_allow_untested_optimizer": True}}
    plan = make_plan(world_size, parallelism, extra=extra, training={"micro_batch_size": 1})
    ranks = run_ranks(world_size, step, plan)
    model = dict(initial_model(plan).named_parameters())
    found = {name: value - model[name].detach() for name, value in whole_parameters(plan, ranks).items()}
    assert plan.spec.training.gradient_clipping == 0.5
    assert_within(distance(found, updates_of_one_process(plan, 0.5)), TOLERANCE)
    assert distance(found, updates_of_one_process(plan, 0.5001)) > 10 * TOLERANCE
