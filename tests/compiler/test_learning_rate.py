"""What a plan says of the learning rate, step by step, beside the schedules of other tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import spec_tree

from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.registry import losses
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
FROM_0, TOP = [0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3], [1e-3] * 3
WSD = {
    "linear": [8.2e-4, 6.4e-4, 4.6e-4, 2.8e-4, 1e-4, 1e-4],
    "cosine": [9.14058e-4, 6.89058e-4, 4.10942e-4, 1.85942e-4, 1e-4, 1e-4],
    "sqrt": [5.97508e-4, 4.3079e-4, 3.02863e-4, 1.95016e-4, 1e-4, 1e-4],
    "exponential": [7.66991e-4, 5.64145e-4, 3.87557e-4, 2.33829e-4, 1e-4, 1e-4],
}
NO_RISE = [1e-3, 9.25e-4, 8.5e-4, 7.75e-4, 7e-4, 6.25e-4, 5.5e-4, 4.75e-4, 4e-4, 3.25e-4, 2.5e-4, 1.75e-4, 1e-4, 1e-4]
ROOTS = [8.94427e-4, 8.16497e-4, 7.55929e-4, 7.07107e-4, 6.66667e-4, 6.32456e-4, 6.03023e-4, 5.7735e-4]
ROOTS_AT_ONCE = [1e-3, 1e-3, 7.07107e-4, 5.7735e-4, 5e-4, 4.47214e-4, 4.08248e-4, 3.77964e-4, 3.53553e-4, 3.33333e-4]
COSINE_TO_20 = [9.91353e-4, 9.65746e-4, 9.24161e-4, 8.68198e-4, 8.00007e-4, 7.22208e-4, 6.37791e-4, 5.5e-4, 4.62209e-4]
FURTHER: dict[str, tuple[dict[str, Any], list[float]]] = {
    **{fall: ({"type": "wsd", "decay_steps": 5, "decay_type": fall}, [*FROM_0, *TOP, *WSD[fall]]) for fall in WSD},
    "cosine from 0": ({"type": "cosine"}, [*FROM_0, *MEGATRON["cosine"][5:]]),
    "linear at once": ({"type": "linear", "warmup_steps": 0}, NO_RISE),
    "inverse_sqrt": ({"type": "inverse_sqrt"}, [*FROM_0, *ROOTS]),
    "inverse_sqrt at once": ({"type": "inverse_sqrt", "warmup_steps": 0}, ROOTS_AT_ONCE),
    "linear, done before the end": ({"type": "linear", "total_steps": 9}, [*FROM_0, *WSD["linear"], *[1e-4] * 3]),
    "cosine, done before the end": ({"type": "cosine", "total_steps": 9}, [*FROM_0, *WSD["cosine"], *[1e-4] * 3]),
    "cosine, cut short": ({"type": "cosine", "total_steps": 20}, [*FROM_0, *COSINE_TO_20]),
    "wsd, done before the end": (
        {"type": "wsd", "decay_steps": 3, "decay_type": "linear", "total_steps": 9},
        [*FROM_0, 1e-3, 1e-3, 7e-4, 4e-4, *[1e-4] * 5],
    ),
}
"""The same of Megatron-LM at d98e8a6 with --lr-warmup-init 0, and where total_steps is given of Megatron-Core 0.16.1
with --lr-decay-iters: what a spec says, and the rates."""


def further(name: str) -> tuple[dict[str, Any], list[float]]:
    said, rates = FURTHER[name]
    return {"warmup_steps": WARMUP, "min_lr": LOWEST, "warmup_start_lr": 0.0, **said}, rates


def plan_of(kind: str | None, lowest: float, warmup: int = WARMUP, steps: int = STEPS) -> Plan:
    return plan_said(None if kind is None else {"type": kind, "warmup_steps": warmup, "min_lr": lowest}, steps)


def plan_said(section: dict[str, Any] | None, steps: int = STEPS) -> Plan:
    schedule = {} if section is None else {"lr_scheduler": section}
    tree = spec_tree(1, 2, training={"train_steps": steps, "optimizer": {"lr": HIGHEST}, **schedule})
    checked = check_read(parse(json.dumps(tree), "spec.json", "json"), Path())
    assert checked.resolution is not None
    return compile_plan(checked.resolution.spec(), tree, list(checked.diagnostics))


def same_rates(plan: Plan, schedule_of: Callable[[Any], Any], steps: int) -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=HIGHEST)
    schedule = schedule_of(optimizer)
    for step in range(1, steps):
        rate = optimizer.param_groups[0]["lr"]
        assert learning_rate(plan.spec.training, step) == pytest.approx(rate, rel=1e-12, abs=1e-18)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("kind", sorted(MEGATRON))
def test_each_step_gets_megatrons_rate(kind: str) -> None:
    training = plan_of(kind, LOWEST).spec.training
    found = [learning_rate(training, step) for step in range(1, len(MEGATRON[kind]) + 1)]
    assert found == pytest.approx(MEGATRON[kind], rel=1e-5)  # the table has six digits


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(2, 9), st.integers(1, 20))
def test_each_step_gets_the_rate_of_transformers(kind: str, warmup: int, fall: int) -> None:
    """Its schedules of these names start and end at 0."""
    transformers, steps = pytest.importorskip("transformers"), warmup + fall
    name = "constant_with_warmup" if kind == "constant" else kind
    same_rates(
        plan_of(kind, 0.0, warmup, steps),
        lambda one: transformers.get_scheduler(name, one, num_warmup_steps=warmup, num_training_steps=steps),
        steps + (2 if kind == "cosine" else 3),  # behind its end their cosine rises again
    )


@pytest.mark.parametrize("name", sorted(FURTHER))
def test_falls_first_rates_and_no_warm_up_are_megatrons(name: str) -> None:
    section, rates = further(name)
    plan = plan_said(section)
    found = [learning_rate(plan.spec.training, step) for step in range(1, len(rates) + 1)]
    assert found == pytest.approx(rates, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["linear", "cosine", "sqrt"]),
    *(st.integers(low, high) for low, high in ((0, 9), (0, 9), (1, 9))),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_wsd_is_that_of_transformers(shape: str, warmup: int, stable: int, fall: int, floor: float) -> None:
    """Its warm-up starts at the lowest rate."""
    transformers = pytest.importorskip("transformers")
    section = {"type": "wsd", "warmup_steps": warmup, "min_lr": floor * HIGHEST, "decay_steps": fall}
    own = {"num_stable_steps": stable, "num_decay_steps": fall, "min_lr_ratio": floor}
    own["decay_type"] = "1-sqrt" if shape == "sqrt" else shape
    same_rates(
        plan_said({**section, "decay_type": shape}, warmup + stable + fall),
        lambda optimizer: transformers.get_wsd_schedule(optimizer, warmup, **own),
        warmup + stable + fall + 3,
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20))
def test_inverse_sqrt_is_that_of_transformers(warmup: int, fall: int) -> None:
    transformers = pytest.importorskip("transformers")
    section = {"type": "inverse_sqrt", "warmup_steps": warmup}
    same_rates(
        plan_said(section, warmup + fall),
        lambda optimizer: transformers.get_scheduler("inverse_sqrt", optimizer, num_warmup_steps=warmup),
        warmup + fall + 5,
    )


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
    (loss,) = losses(plan, ["deepspeed"])["deepspeed"]
    assert ("a further step at 0," in loss.why) == (kind == "cosine") == ("begins to fall a step early" in loss.why)


def test_a_plan_without_a_schedule_loses_nothing_and_keeps_its_rate() -> None:
    plan = plan_of(None, 0.0)
    assert {learning_rate(plan.spec.training, step) for step in range(1, 50)} == {HIGHEST}
    assert losses(plan, ["deepspeed"])["deepspeed"] == []


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 0.99), st.integers(1, 400), st.booleans())
def test_a_share_of_the_steps_is_the_warm_up_of_transformers(share: float, steps: int, has_total: bool) -> None:
    transformers = pytest.importorskip("transformers")
    section: dict[str, Any] = {"type": "cosine", "warmup_ratio": share, "total_steps": steps}
    if not has_total:
        del section["total_steps"]
    expected = transformers.TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=share), steps)
    planned, findings = warm_up(section, 1000 if has_total else steps)
    assert planned == expected
    assert ("S006" in findings) == (expected >= steps)


@pytest.mark.parametrize(
    ("section", "steps"),
    [({"warmup_samples": 0}, 0), ({"warmup_samples": 9}, 3), ({"warmup_tokens": 96}, 3), ({"warmup_tokens": 97}, 4)],
)
def test_samples_and_tokens_of_a_warm_up_are_whole_steps(section: dict[str, Any], steps: int) -> None:
    """A step of the plan has 4 sequences of 8 tokens."""
    assert warm_up({"type": "linear", **section}, STEPS, global_batch_size=4, sequence_length=8) == (steps, [])


@pytest.mark.parametrize(
    ("section", "code", "message"),
    [
        ({}, "K002", "needs one of the keys"),
        ({"warmup_steps": 3, "warmup_tokens": 3}, "K008", '"warmup_steps" and "warmup_tokens" exclude each other'),
        ({"warmup_ratio": 1.0}, "K005", "too large"),
        ({"warmup_ratoi": 0.1}, "K001", "unknown key"),
        ({"warmup_samples": 100}, "S006", "warmup_samples 100: warmup_steps 25 ≥ train_steps 12"),
    ],
)
def test_a_wrong_warm_up_is_said_once(section: dict[str, Any], code: str, message: str) -> None:
    training = {"train_steps": STEPS, "global_batch_size": 4, "lr_scheduler": {"type": "constant", **section}}
    checked = check_read(parse(json.dumps(spec_tree(1, 2, training=training)), "spec.json", "json"), Path())
    errors = [one for one in checked.diagnostics if one.severity.value == "error"]
    assert [one.code for one in errors] == [code]
    assert message in errors[0].message


def test_a_share_of_steps_that_nobody_counted_is_refused() -> None:
    tree = spec_tree(1, 2, training={"lr_scheduler": {"type": "constant", "warmup_ratio": 0.1}})
    checked = check_read(parse(json.dumps(tree), "spec.json", "json"), Path())
    assert [one.code for one in checked.diagnostics if "train_steps is not given" in one.message] == ["S006"]


def warm_up(section: dict[str, Any], steps: int, **batch: int) -> tuple[int, list[str]]:
    training = {"train_steps": steps, "lr_scheduler": section, **batch}
    checked = check_read(parse(json.dumps(spec_tree(1, 2, training=training)), "spec.json", "json"), Path())
    assert checked.resolution is not None
    schedule = checked.resolution.lr_scheduler
    assert schedule is not None
    return schedule.warmup_steps, [one.code for one in checked.diagnostics if one.severity.value == "error"]
