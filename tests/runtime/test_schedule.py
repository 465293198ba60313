"""Each step of the engine trains at the rate that the plan says, after a resume too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, nudge
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan
from parcompile.spec import learning_rate, weight_decay_of

pytestmark = pytest.mark.ranks

STEPS, SAVED = 5, 3


def training_of(kind: str, style: str | None) -> dict[str, Any]:
    """`style`: weight decay rises; a schedule "none" leaves the rate as it is."""
    training: dict[str, Any] = {"train_steps": STEPS}
    if kind != "none":
        training["lr_scheduler"] = {"type": kind, "warmup_steps": 2, "min_lr": 1e-4}
    if style is not None:
        decay = {"start_weight_decay": 0.0, "weight_decay": 5.0, "weight_decay_style": style}
        training["optimizer"] = {"lr": 1e-3, "no_weight_decay": "vectors", **decay}
    return training


def plan_of(kind: str, stage: int, style: str | None = None) -> Plan:
    return make_plan(2, {}, training=training_of(kind, style), extra={"zero": {"stage": stage}})


def train(plan: Plan, folder: str, first: int, until: int) -> dict[str, Any]:
    """The rate of each step before it is made, and the weights after the last."""
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import load, save

    engine, _, loader, scheduler = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    loader.step = load(engine, folder) if first else 0
    assert loader.step == first
    batches, rates, decays = iter(loader), [], []
    for step in range(first, until):
        rates.append(engine.get_lr()[0])
        decays.append([group["weight_decay"] for group in engine.optimizer.param_groups])
        engine.backward(engine(**next(batches)).loss)
        engine.step()
        if step + 1 == SAVED and not first:
            save(engine, folder, SAVED)
    assert scheduler.get_last_lr() == engine.get_lr()
    weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    return {"rates": rates, "decays": decays, "weights": weights}


def go_on(rank: int, plan: Plan, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(plan, folder, 0, STEPS), train(plan, folder, SAVED, STEPS)


def in_one_process(plan: Plan, seed: int | None = None) -> dict[str, torch.Tensor]:
    model, settings, data = initial_model(plan), plan.spec.training.optimizer, samples(plan)
    nudge(model, seed)
    vectors = [one for one in model.parameters() if one.dim() < 2 and settings.no_weight_decay is not None]
    groups = [
        {"params": [one for one in model.parameters() if not any(one is other for other in vectors)]},
        {"params": vectors},
    ]
    optimizer = torch.optim.AdamW(groups[: 1 + bool(vectors)], lr=1.0, betas=settings.betas, eps=settings.eps)
    for step in range(1, STEPS + 1):
        for group, decays in zip(optimizer.param_groups, (True, False), strict=False):
            group["lr"] = learning_rate(plan.spec.training, step)
            group["weight_decay"] = weight_decay_of(plan.spec.training, step) * decays
        batch = data[(step - 1) * 4 : step * 4]
        model(**{name: torch.stack([one[name] for one in batch]) for name in ("input_ids", "labels")}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.spec.training.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "stage", "style"),
    [("constant", 0, None), ("linear", 2, None), ("cosine", 1, None), ("none", 0, "linear"), ("linear", 2, "cosine")],
)
def test_each_step_has_the_plans_rate_and_a_resume_goes_on(
    kind: str, stage: int, style: str | None, tmp_path: Path
) -> None:
    plan = plan_of(kind, stage, style)
    decays = [weight_decay_of(plan.spec.training, step) for step in range(1, STEPS + 1)]
    planned = [learning_rate(plan.spec.training, step) for step in range(1, STEPS + 1)]
    expected = in_one_process(plan)
    for whole, resumed in run_ranks(2, go_on, plan, str(tmp_path)):
        assert whole["rates"] == pytest.approx(planned, rel=1e-12)
        assert resumed["rates"] == pytest.approx(planned[SAVED:], rel=1e-12)
        given = [pytest.approx([decay] if style is None else [decay, 0.0], rel=1e-12) for decay in decays]
        assert whole["decays"] == given and resumed["decays"] == given[SAVED:]
        for name in expected:
            assert torch.equal(resumed["weights"][name], whole["weights"][name]), name
        found = {name: whole["weights"][name][: len(value)] for name, value in expected.items()}
        assert_close(found, expected, rerun=partial(in_one_process, plan))


def begun(rank: int, plan: Plan, folder: str) -> list[list[float]]:
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import load
    from parcompile.runtime.checkpoint.adapting import import_pretrained

    initial_model(plan).save_pretrained(f"{folder}/hf")
    import_pretrained(f"{folder}/hf", plan, f"{folder}/run")
    engine, *_ = initialize(plan=plan, model=initial_model(plan))
    assert load(engine, f"{folder}/run") == 0
    return [[group[name] for group in engine.optimizer.param_groups] for name in ("lr", "weight_decay")]


def test_a_run_that_begins_with_weights_of_a_folder_has_the_rates_of_the_first_step(tmp_path: Path) -> None:
    plan = one_rank("linear", "cosine")
    assert run_ranks(1, begun, plan, str(tmp_path)) == [[[1e-4] * 2, [0.0] * 2]]


def one_rank(kind: str, style: str) -> Plan:
    return make_plan(1, {}, training=training_of(kind, style))


def with_its_own_schedule(rank: int, plan: Plan, folder: str) -> list[str]:
    from parcompile.runtime import RunError, initialize
    from parcompile.runtime.trainer import PlanTrainer, training_arguments

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    args = training_arguments(plan, folder, max_steps=STEPS, report_to=[], disable_tqdm=True)
    trainer = PlanTrainer(plan=plan, args=args, train_dataset=samples(plan), model=initial_model(plan))
    said = []
    for start in (lambda: initialize(plan=plan, model=initial_model(plan), lr_scheduler=schedule), trainer.train):
        with pytest.raises(RunError) as raised:
            start()
        said.append(str(raised.value))
    return said


def test_another_schedule_is_refused_beside_weight_decay_that_changes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for text in run_ranks(1, with_its_own_schedule, one_rank("none", "linear"), str(tmp_path))[0]:
        assert "start_weight_decay 0: the plan's schedule changes weight decay, and an lr_scheduler of its own" in text
        assert "give the plan a training.lr_scheduler, which trainers leave to the plan" in text


def groups_of_their_own(rank: int, plan: Plan) -> list[list[float]]:
    from parcompile.runtime import initialize

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        first, *others = model.parameters()
        return [{"params": [first], "lr": 5e-4}, {"params": others}]

    engine, _, loader, _ = initialize(
        plan=plan, model=initial_model(plan), training_data=samples(plan), model_parameters=groups
    )
    batches, rates = iter(loader), []
    for _ in range(STEPS):
        rates.append(engine.get_lr())
        engine.backward(engine(**next(batches)).loss)
        engine.step()
    return rates


def with_the_trainer(rank: int, plan: Plan, folder: str) -> tuple[list[float], list[float]]:
    from transformers import TrainerCallback

    from parcompile.runtime.trainer import PlanTrainer, training_arguments

    rates: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **given: Any) -> None:
            rates.append(trainer.deepspeed.get_lr()[0])

    args = training_arguments(plan, folder, max_steps=STEPS, report_to=[], disable_tqdm=True, logging_steps=1)
    trainer = PlanTrainer(
        plan=plan, args=args, train_dataset=samples(plan), model=initial_model(plan), callbacks=[Watch()]
    )
    trainer.train()
    return rates, [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def test_a_group_with_its_own_rate_is_scaled_and_the_trainer_follows_the_plan(tmp_path: Path) -> None:
    plan = plan_of("cosine", 1)
    planned = [learning_rate(plan.spec.training, step) for step in range(1, STEPS + 1)]
    for rates in run_ranks(2, groups_of_their_own, plan):
        assert rates == [pytest.approx([rate / 2, rate], rel=1e-12) for rate in planned]
    if pytest.importorskip("accelerate"):
        for rates, logged in run_ranks(2, with_the_trainer, plan, str(tmp_path)):
            assert rates == logged == pytest.approx(planned, rel=1e-12)
