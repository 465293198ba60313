"""Contract: LoRA adapters of peft train on an injected model as they do in one process.

Two AdamW steps in fp32 under the engine: losses, gradient norms and the gathered adapters within 1e-5 relative.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(plan: Plan, targets: list[str], **options: Any) -> Any:
    """The same adapters everywhere; B is drawn too, for it starts at zero."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(initial_model(plan), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def train(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    from parcompile.runtime import adapter_state, initialize, reduce_loss
    from parcompile.runtime.checkpoint import load, save

    data = samples(plan)
    engine, _, loader, _ = initialize(plan=plan, model=adapted(plan, ALL), training_data=data, self_check=True)
    batches, losses, norms = iter(loader), [], []
    for step in (1, 2):
        loss = engine(**next(batches)).loss
        engine.backward(loss)
        engine.step()
        losses.append(reduce_loss(loss, engine.mesh))
        norms.append(float(engine.get_global_grad_norm()))
        if step == 1:
            save(engine, folder, 1)
    state = adapter_state(engine.module, engine.mesh)
    # Back to the first step, and the second once more.
    assert load(engine, folder) == 1
    loader.step = 1
    loss = engine(**next(iter(loader))).loss
    return {"losses": losses, "norms": norms, "adapters": state, "again": reduce_loss(loss, engine.mesh)}


def train_plain(plan: Plan) -> dict[str, Any]:
    model, training, data = adapted(plan, ALL), plan.spec.training, samples(plan)
    settings = training.optimizer
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses, norms = [], []
    for step in range(2):
        ids = torch.stack([sample["input_ids"] for sample in data[step * 4 : step * 4 + 4]])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, training.gradient_clipping)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "adapters": peft.get_peft_model_state_dict(model)}


@pytest.mark.parametrize(
    ("world_size", "parallelism"),
    [(2, {"tp": 2}), (4, {"tp": 2, "cp": 2, "sequence_parallel": True})],
    ids=["tp2", "tp2cp2-sequence-parallel"],
)
def test_adapters_train_as_in_one_process(world_size: int, parallelism: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan(world_size, parallelism)
    expected = train_plain(plan)
    for found in run_ranks(world_size, train, plan, str(tmp_path)):
        for key in ("losses", "norms"):
            assert found[key] == pytest.approx(expected[key], rel=TOLERANCE)
        assert found["again"] == pytest.approx(expected["losses"][1], rel=TOLERANCE)
        assert found["adapters"].keys() == expected["adapters"].keys()
        for name, value in expected["adapters"].items():
            assert float((found["adapters"][name] - value).norm() / value.norm()) < TOLERANCE, name


def refusals(rank: int, plan: Plan) -> list[str]:
    from parcompile.runtime import RunError, initialize

    found = []
    for targets, options in ((["lm_head"], {}), (["q_proj"], {"use_dora": True}), (["q_proj"], {"lora_bias": True})):
        try:
            initialize(plan=plan, model=adapted(plan, targets, **options))
            found.append("")
        except RunError as error:
            found.append(str(error))
    return found


def test_what_is_not_injected_is_named() -> None:
    head, dora, bias = run_ranks(2, refusals, make_plan(2, {"tp": 2}))[0]
    assert head == "lm_head is the head: leave it out of target_modules"
    assert "model.layers.0.self_attn.q_proj uses a variant of LoRA" in dora
    assert "model.layers.0.self_attn.q_proj has lora_bias" in bias
