"""Frozen parameters, parameter groups and a learning-rate schedule, through a change of layout in mid-run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from ranks import run_ranks
from test_checkpoint import assert_same_to_the_bit
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan
from parcompile.runtime import RunError, decay_groups
from parcompile.runtime.checkpoint.adapting import convert

pytestmark = pytest.mark.ranks

WEIGHT_DECAY = 0.5


def frozen_model(plan: Plan) -> torch.nn.Module:
    model = initial_model(plan)
    model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    model.model.layers[0].requires_grad_(False)
    return model


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


HELD_OUT = 3
"""Sequences of the evaluation: dp 2 has them as 2 and 1."""


def train(rank: int, plan: Plan, folder: str, until: int, resume: str | None) -> dict[str, Any]:
    from parcompile.runtime import evaluate, initialize, reduce_loss
    from parcompile.runtime.checkpoint import load, save

    data = samples(plan, masked=True)
    engine, _, loader, _ = initialize(
        plan=plan,
        model=frozen_model(plan),
        training_data=data,
        model_parameters=lambda model: decay_groups(model, WEIGHT_DECAY),
        lr_scheduler=schedule,
    )
    loader.step = load(engine, resume) if resume else 0
    batches, losses, norms = iter(loader), [], []
    for _ in range(loader.step, until):
        loss = engine(**next(batches)).loss
        engine.backward(loss)
        engine.step()
        losses.append(reduce_loss(loss, engine.mesh))
        norms.append(float(engine.get_global_grad_norm()))
    save(engine, folder, until)
    evaluation = evaluate(engine, data[until * 4 :][:HELD_OUT])
    return {"losses": losses, "norms": norms, "evaluation": evaluation, "lr": engine.get_lr()}


def train_plain(plan: Plan, steps: int) -> dict[str, Any]:
    model, training = frozen_model(plan), plan.spec.training
    settings = training.optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model, WEIGHT_DECAY), lr=settings.lr, betas=settings.betas, eps=settings.eps
    )
    scheduler, data, losses, norms = schedule(optimizer), samples(plan, masked=True), [], []

    def loss_of(batch: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        loss: torch.Tensor = model(
            **{name: torch.stack([sample[name] for sample in batch]) for name in ("input_ids", "labels")}
        ).loss
        return loss

    for step in range(steps):
        loss = loss_of(data[step * 4 : step * 4 + 4])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping)))
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return {"losses": losses, "norms": norms, "evaluation": float(loss_of(data[steps * 4 :][:HELD_OUT]))}


def test_groups_frozen_parameters_and_schedule_survive_a_change_of_layout(tmp_path: Path) -> None:
    """Cut anew while it is loaded, and converted before."""
    one, other = make_plan(2, {"tp": 2}), make_plan(4, {"cp": 2}, training={"eval_micro_batch_size": 2})
    saved, converted, unused = str(tmp_path / "saved"), str(tmp_path / "converted"), str(tmp_path / "unused")
    first = run_ranks(2, train, one, saved, 2, None)[0]
    convert(saved, other, converted)
    assert_same_to_the_bit(tmp_path / "converted", tmp_path / "saved")
    expected = train_plain(one, 4)
    for ranks, plan, resume in ((4, other, converted), (1, make_plan(1, {}), saved)):
        second = run_ranks(ranks, train, plan, unused, 4, resume)[0]
        found = {key: [*first[key], *second[key]] for key in ("losses", "norms")}
        assert_close({**found, "evaluation": second["evaluation"]}, expected)
        assert second["lr"] == [1e-3 / 5] * 2


def parameters_from_before(rank: int, plan: Plan) -> str:
    from parcompile.runtime import initialize

    model = initial_model(plan)
    try:
        initialize(plan=plan, model=model, model_parameters=list(model.parameters()))
    except RunError as error:
        return str(error)
    return ""


def test_parameters_from_before_injection_are_refused() -> None:
    (found, _) = run_ranks(2, parameters_from_before, make_plan(2, {"tp": 2}))
    assert "of the 21 model_parameters are not the injected model's" in found
