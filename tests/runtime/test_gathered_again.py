"""Contract: with `training.gather_inputs_again` blocks gather their inputs again, as counted, and train as without."""

from __future__ import annotations

from typing import Any

import pytest
from closeness import judge
from families import tiny_config
from ranks import run_ranks
from training_runs import compared, make_plan, train_in_one_process, train_with_engine

from parcompile.cost.footprint import footprint
from parcompile.plan import Plan
from parcompile.runtime.preflight import preflight
from parcompile.spec.values import workload_of

SP = {"tp": 2, "sequence_parallel": True}


def plan_of(world: int, parallelism: dict[str, Any], family: str = "llama", stage: int = 1, **training: Any) -> Plan:
    return make_plan(
        world,
        parallelism,
        model=tiny_config(family, initializer_range=0.1),
        whole_model=True,
        training={"micro_batch_size": 1, "gather_inputs_again": True, **training},
        extra={"zero": {"stage": stage}},
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan",
    [
        plan_of(2, SP, "gpt2"),
        plan_of(4, {**SP, "cp": 2}, stage=2, activation_checkpointing="full"),
        plan_of(2, SP, "qwen2", activation_checkpointing="mlp"),
        plan_of(4, {**SP, "ep": 2}, "mixtral"),
        plan_of(4, {**SP, "pp": 2}, activation_checkpointing=["full", "none"]),
    ],
    ids=["gpt2", "recomputed, tp2 cp2", "beside a part", "experts", "stages"],
)
def test_it_trains_as_one_process(plan: Plan) -> None:
    ranks = run_ranks(plan.world_size, train_with_engine, plan, True, 3)
    judge(compared(plan, ranks, lambda seed: train_in_one_process(plan, masked=True, steps=3, seed=seed)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "olmo2", "opt", "mixtral", "cohere"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_messages_and_bytes_are_counted(family: str, recompute: str) -> None:
    training = {"sequence_length": 512, "activation_checkpointing": recompute, "precision": "bf16"}
    again, kept = (plan_of(2, SP, family, **training, gather_inputs_again=one) for one in (True, False))
    report = preflight(again, ranks=[1])
    sent = [one for one in report.findings if one.subject == "sent over tp"]
    assert sent
    assert all(one.verdict.value == "agrees" for one in sent), report.text()
    if recompute == "none":
        first, second = (footprint(workload_of(one.spec)).peak.components["activations"] for one in (again, kept))
        assert first < second
