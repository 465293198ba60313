"""Contract: Hugging Face's Trainer around a plan trains, logs and saves what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from expert_runs import Case
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples, train_in_one_process

from parcompile.plan import Plan

pytest.importorskip("accelerate")
pytestmark = pytest.mark.ranks

STEPS = 3


def train(rank: int, plan: Plan, folder: str, resume: bool) -> dict[str, Any]:
    """Three steps, two of them saved; resumed, the third alone. The evaluation is on the next step's data."""
    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import PlanTrainer, training_arguments

    options = {
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
    }
    args = training_arguments(plan, folder, max_steps=STEPS, **options)
    data = samples(plan)
    next_batch = data[STEPS * plan.spec.training.global_batch_size :][: plan.spec.training.global_batch_size]

    trainer = PlanTrainer(plan=plan, args=args, train_dataset=data, eval_dataset=next_batch, model=initial_model(plan))
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoints/step-2" if resume else None)
    trainer.save_model(f"{folder}/saved")
    found: dict[str, Any] = {}
    try:
        training_arguments(plan, folder, max_steps=1, bf16=1)
    except RunError as error:
        found["said"] = str(error)
    for kind in ("loss", "grad_norm", "eval_loss"):
        found[kind] = [entry[kind] for entry in trainer.state.log_history if kind in entry]
    return found


def loss_of(folder: Path, plan: Plan) -> float:
    """Of what `save_model` wrote after the last step, with transformers alone, on the next step's data."""
    from transformers import AutoModelForCausalLM

    size = plan.spec.training.global_batch_size
    batch = samples(plan)[STEPS * size : (STEPS + 1) * size]
    ids, labels = (torch.stack([sample[key] for sample in batch]) for key in ("input_ids", "labels"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return float(model(input_ids=ids, labels=labels).loss)


def assert_trained(rank: dict[str, Any], plan: Plan) -> None:
    """As one process, and evaluated on what it would train on next."""

    def one_process(seed: int | None) -> dict[str, Any]:
        found = train_in_one_process(plan, steps=STEPS + 1, seed=seed)
        losses = found["losses"]
        return {"loss": losses[:STEPS], "grad_norm": found["norms"][:STEPS], "eval_loss": losses[STEPS:]}

    expected = one_process(None)
    assert_close({key: rank[key] for key in expected}, expected, rerun=one_process)


@pytest.mark.parametrize("other", ["cp", "pp"])
def test_the_trainer_trains_evaluates_saves_and_resumes_a_plan(other: str, tmp_path: Path) -> None:
    """With kv heads that both tp ranks hold in a part of a weight, and layers that are recomputed."""
    training = {
        "activation_checkpointing": "full",
        "micro_batch_size": 1,
        "eval_micro_batch_size": 2,
        "eval_global_batch_size": 2,
    }
    model = {"model_type": "phi3", "num_key_value_heads": 1, "pad_token_id": None}
    plan = make_plan(4, {"tp": 2, other: 2}, model=model, training=training)
    ranks = run_ranks(4, train, plan, str(tmp_path), False)
    for rank in ranks:
        assert_trained(rank, plan)
        assert "the plan decides bf16" in rank["said"]
    assert_close(loss_of(tmp_path / "saved", plan), train_in_one_process(plan, steps=STEPS + 1)["losses"][STEPS])
    again = run_ranks(4, train, plan, str(tmp_path), True)
    for kind in ("loss", "grad_norm", "eval_loss"):
        assert again[0][kind] == ranks[0][kind][-1:]


def test_the_trainer_trains_experts_that_are_dealt_over_ranks(tmp_path: Path) -> None:
    """At ZeRO stage 0, whose optimizer Trainer gets in DeepSpeed's place."""
    training = {"activation_checkpointing": "full", "eval_micro_batch_size": 2, "eval_global_batch_size": 4}
    plan = Case("mixtral", {"dp": 2, "ep": 2}, training, zero=0).plan()
    for rank in run_ranks(2, train, plan, str(tmp_path), False):
        assert_trained(rank, plan)
    assert_close(loss_of(tmp_path / "saved", plan), train_in_one_process(plan, steps=STEPS + 1)["losses"][STEPS])
