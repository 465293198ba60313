"""What a plan says of the learning rate, step by step, beside the schedules of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import spec_tree

from parcompile.backends.deepspeed.write import ds_config, losses
from parcompile.pipeline import check_read
from parcompile.plan import Plan, compile_plan
from parcompile.spec import learning_rate
from parcompile.text import parse

HIGHEST, LOWEST, WARMUP, STEPS = 1e-3, 1e-4, 4, 12
RISE = [1e-4, 3.25e-4, 5.5e-4, 7.75e-4, 1e-3]
MEGATRON = {
    "constant": [*RISE, *[1e-3] * 9],
    "linear": [*RISE, 8.875e-4, 7.75e-4, 6.625e-4, 5.5e-4, 4.375e-4, 3.25e-4, 2.125e-4, 1e-4, 1e-4],
    "cosine": [*RISE, 9.65746e-4, 8.68198e-4, 7.22208e-4, 5.5e-4, 3.77792e-4, 2.31802e-4, 1.34254e-4, 1e-4, 1e-4],
}
"""What Megatron-LM's OptimizerParamScheduler sets before step 1, 2, 3, ..., with --lr-warmup-init equal to --min-lr."""


def plan_of(kind: str | None, lowest: float, warmup: int = WARMUP, steps: int = STEPS) -> Plan:
    schedule = {} if kind is None else {"lr_scheduler": {"type": kind, "warmup_steps": warmup, "min_lr": lowest}}
    tree = spec_tree(1, 2, training={"train_steps": steps, "optimizer": {"lr": HIGHEST}, **schedule})
    checked = check_read(parse(json.dumps(tree), "spec.json", "json"), Path())
    assert checked.resolution is not None
    return compile_plan(checked.resolution.spec(), tree, list(checked.diagnostics))


@pytest.mark.parametrize("kind", sorted(MEGATRON))
def test_each_step_gets_megatrons_rate(kind: str) -> None:
    training = plan_of(kind, LOWEST).spec.training
    found = [learning_rate(training, step) for step in range(1, len(MEGATRON[kind]) + 1)]
    assert found == pytest.approx(MEGATRON[kind], rel=1e-5)  # the table has six digits


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(2, 9), st.integers(1, 20))
def test_each_step_gets_the_rate_of_transformers(kind: str, warmup: int, fall: int) -> None:
    """Its schedules of these names start and end at 0."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    steps = warmup + fall
    training = plan_of(kind, 0.0, warmup, steps).spec.training
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=HIGHEST)
    name = "constant_with_warmup" if kind == "constant" else kind
    schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    for step in range(1, steps + 3 if kind != "cosine" else steps + 2):  # behind its end their cosine rises again
        assert learning_rate(training, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("kind", sorted(MEGATRON))
def test_what_deepspeed_alone_does_otherwise_is_said(kind: str) -> None:
    """Its engine steps with the rate that the schedule has set when it was made, and calls `step` after each step."""
    schedules, torch = pytest.importorskip("deepspeed.runtime.lr_schedules"), pytest.importorskip("torch")
    plan = plan_of(kind, LOWEST)
    section = ds_config(plan)["scheduler"]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=HIGHEST)
    made, rates = getattr(schedules, section["type"])(optimizer, **section["params"]), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        made.step()
    planned = [learning_rate(plan.spec.training, step) for step in range(1, STEPS + 1)]
    assert rates[0] == (0.0 if kind == "cosine" else LOWEST)
    assert rates[1 : WARMUP + 1] == pytest.approx(planned[:WARMUP], rel=1e-12)
    early = 1 if kind == "cosine" else 0
    late = 1 - early
    assert rates[WARMUP + 1 :] == pytest.approx(planned[WARMUP + early : STEPS - late], rel=1e-12)
    (loss,) = losses(plan)
    assert ("a further step at 0," in loss.why) == (kind == "cosine") == ("begins to fall a step early" in loss.why)


def test_a_plan_without_a_schedule_loses_nothing_and_keeps_its_rate() -> None:
    plan = plan_of(None, 0.0)
    assert {learning_rate(plan.spec.training, step) for step in range(1, 50)} == {HIGHEST}
    assert losses(plan) == []
