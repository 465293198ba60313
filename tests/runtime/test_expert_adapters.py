"""Contract: LoRA on experts trains on ranks as peft does in one process, and is saved, resumed and exported whole.

Two AdamW steps in fp32 with clipping: losses, gradient norms and every adapter agree within 1e-5 relative.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_runs import Case
from ranks import run_ranks
from training_runs import initial_model, samples

from parcompile.plan import Plan

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(plan: Plan, stacks: list[str] = STACKS) -> Any:
    """The same adapters everywhere, of experts and of attention; B is drawn too, for it starts at zero."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "o_proj"], target_parameters=stacks)
    model = peft.get_peft_model(initial_model(plan), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def train(rank: int, plan: Plan, folder: str, resume: bool, loaded: bool) -> dict[str, Any]:
    """Steps up to the second one, each saved; the model is whole, or `loaded` slice by slice."""
    from parcompile.runtime import adapter_state, initialize, load_pretrained
    from parcompile.runtime.checkpoint import load, save

    model = load_pretrained(f"{folder}/base", plan, f"{folder}/adapter") if loaded else adapted(plan)
    engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples(plan))
    loader.step = load(engine, f"{folder}/checkpoints") if resume else 0
    batches, losses, norms = iter(loader), [], []
    for step in range(loader.step, 2):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        if not resume:
            save(engine, f"{folder}/{'checkpoints' if step == 0 else 'end'}", step + 1)
    return {"losses": losses, "norms": norms, "adapters": adapter_state(engine.module, engine.mesh)}


def train_plain(plan: Plan) -> dict[str, Any]:
    """With peft and torch alone."""
    model, training, data = adapted(plan), plan.spec.training, samples(plan)
    settings, batch = training.optimizer, training.global_batch_size
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses, norms = [], []
    for step in range(2):
        ids = torch.stack([sample["input_ids"] for sample in data[step * batch : (step + 1) * batch]])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, training.gradient_clipping)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "adapters": peft.get_peft_model_state_dict(model), "model": model}


def assert_same(ranks: list[dict[str, Any]], expected: dict[str, Any], steps: int) -> None:
    for found in ranks:
        for key in ("losses", "norms"):
            assert found[key] == pytest.approx(expected[key][-steps:], rel=TOLERANCE)
        assert found["adapters"].keys() == expected["adapters"].keys()
        for name, value in expected["adapters"].items():
            assert found["adapters"][name].shape == value.shape, name
            assert float((found["adapters"][name] - value).norm() / value.norm()) < TOLERANCE, name


def test_adapters_of_experts_train_in_one_layout_go_on_in_another_and_are_exported(tmp_path: Path) -> None:
    """Each expert cut over tp beside ep; then whole experts, on a model that is loaded slice by slice."""
    from transformers import AutoModelForCausalLM

    from parcompile.runtime.checkpoint import export, export_adapter

    layout, folder = {"tp": 2, "dp": 2, "ep": 2}, str(tmp_path)
    plan = Case("mixtral", {**layout, "sequence_parallel": True}).plan()
    expected = train_plain(plan)
    adapted(plan).save_pretrained(tmp_path / "adapter")
    initial_model(plan).save_pretrained(tmp_path / "base")
    assert_same(run_ranks(4, train, plan, folder, False, False), expected, 2)
    dealt = Case("mixtral", {"dp": 2, "ep": 2}).plan()
    assert_same(run_ranks(2, train, dealt, folder, True, True), expected, 1)

    ids = samples(plan)[0]["input_ids"][None]
    logits = expected["model"](ids).logits
    export(tmp_path / "end", tmp_path / "merged")
    export_adapter(tmp_path / "end", tmp_path / "exported")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32),
        peft.PeftModel.from_pretrained(base, str(tmp_path / "exported")),
    ):
        torch.testing.assert_close(model.eval()(ids).logits, logits, rtol=1e-4, atol=1e-5)


def test_adapters_of_whole_experts_beside_tp_train_as_in_one_process(tmp_path: Path) -> None:
    plan = Case("deepseek_v3", {"tp": 2, "dp": 1, "cp": 1, "ep": 2, "expert_tp": 1}).plan()
    assert_same(run_ranks(2, train, plan, str(tmp_path), False, False), train_plain(plan), 2)


def refusals(rank: int, plan: Plan, stacks: list[str]) -> str:
    from parcompile.runtime import RunError, initialize

    try:
        initialize(plan=plan, model=adapted(plan, stacks))
    except RunError as error:
        return str(error)
    return ""


def test_adapters_of_what_is_no_stack_of_experts_are_refused_by_name() -> None:
    router = run_ranks(1, refusals, Case("mixtral", {}).plan(), ["mlp.gate.weight"])[0]
    assert router == (
        "model.layers.0.mlp.gate has LoRA on weight: of target_parameters only stacks of experts are injected"
    )
    transposed = run_ranks(1, refusals, Case("gpt_oss", {}).plan(), STACKS)[0]
    assert "stores down_proj as [experts, in, out]: LoRA on such experts is not injected" in transposed
