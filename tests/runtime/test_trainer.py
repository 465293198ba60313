"""Contract: Hugging Face's Trainer around a plan trains, logs and saves what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples, train_in_one_process

from parcompile.plan import Plan

pytest.importorskip("accelerate")
pytestmark = pytest.mark.ranks

STEPS = 3


def train(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    from parcompile.runtime import RunError
    from parcompile.runtime.checkpoint import save
    from parcompile.runtime.trainer import PlanTrainer, training_arguments

    quiet = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = training_arguments(plan, folder, max_steps=STEPS, **quiet)
    trainer = PlanTrainer(plan=plan, args=args, train_dataset=samples(plan), model=initial_model(plan))
    trainer.train()
    said = []
    for refused in (
        trainer.save_model,
        trainer.evaluate,
        lambda: training_arguments(plan, folder, max_steps=1, bf16=1),
    ):
        try:
            refused()
        except RunError as error:
            said.append(str(error))
    save(trainer.model_wrapped, f"{folder}/checkpoints", STEPS)
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"losses": [one["loss"] for one in steps], "norms": [one["grad_norm"] for one in steps], "said": said}


def test_the_trainer_trains_a_plan(tmp_path: Path) -> None:
    plan = make_plan(4, {"tp": 2, "cp": 2}, training={"micro_batch_size": 1})
    expected = train_in_one_process(plan, steps=STEPS)
    for rank in run_ranks(4, train, plan, str(tmp_path)):
        for key in ("losses", "norms"):
            assert rank[key] == pytest.approx(expected[key], rel=1e-5)
        save_model, evaluate, decided = rank["said"]
        assert "PlanTrainer does not save_model" in save_model
        assert "PlanTrainer does not evaluate" in evaluate
        assert "the plan decides bf16" in decided

    from parcompile.runtime.checkpoint import verify

    assert not verify(tmp_path / "checkpoints")
