"""Contract: LoRA adapters of peft train on an injected model as they do in one process.

Two AdamW steps in fp32 under the engine: losses, gradient norms and the gathered adapters within 1e-5 relative; the
second one also after a change of layout. What is exported computes what the run does.
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
ALL = "all-linear"


def adapted(plan: Plan, targets: list[str] | str, **options: Any) -> Any:
    """The same adapters everywhere; B is drawn too, for it starts at zero."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(initial_model(plan), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def train(rank: int, plan: Plan, folder: str, resume: bool, loaded: bool) -> dict[str, Any]:
    """Steps up to the second one, each saved; the model is whole, or `loaded` slice by slice."""
    from parcompile.runtime import adapter_state, initialize, load_pretrained
    from parcompile.runtime.checkpoint import load, save

    model = load_pretrained(f"{folder}/base", plan, f"{folder}/adapter") if loaded else adapted(plan, ALL)
    engine, _, loader, _ = initialize(
        plan=plan, model=model, training_data=samples(plan), self_check=None if loaded else True
    )
    loader.step = load(engine, f"{folder}/checkpoints") if resume else 0
    batches, losses, norms = iter(loader), [], []
    for step in range(loader.step, 2):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        if not resume:
            save(engine, f"{folder}/{'checkpoints' if step == 0 else 'end'}", step + 1)
    return {"losses": losses, "norms": norms, "adapters": adapter_state(engine.module, engine.mesh)}


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
    return {"losses": losses, "norms": norms, "adapters": peft.get_peft_model_state_dict(model), "model": model}


def stored(plan: Plan, folder: Path) -> None:
    """The model and its adapters as files."""
    model = adapted(plan, ALL)
    model.save_pretrained(folder / "adapter")
    initial_model(plan).save_pretrained(folder / "base")


def assert_same(ranks: list[dict[str, Any]], expected: dict[str, Any], steps: int) -> None:
    for found in ranks:
        for key in ("losses", "norms"):
            assert found[key] == pytest.approx(expected[key][-steps:], rel=TOLERANCE)
        assert found["adapters"].keys() == expected["adapters"].keys()
        for name, value in expected["adapters"].items():
            assert float((found["adapters"][name] - value).norm() / value.norm()) < TOLERANCE, name


@pytest.mark.parametrize("other", ["cp", "pp"])
def test_adapters_train_as_in_one_process(other: str, tmp_path: Path) -> None:
    """Also beside a weight that fuses queries, keys and values, some of whose rows both tp ranks hold."""
    model = {"model_type": "phi3", "num_key_value_heads": 1, "pad_token_id": None}
    plan = make_plan(4, {"tp": 2, other: 2, "sequence_parallel": True}, model=model)
    assert_same(run_ranks(4, train, plan, str(tmp_path), False, False), train_plain(plan), 2)


def test_adapters_on_a_model_that_was_loaded_in_slices_through_a_change_of_layout_to_the_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from parcompile.runtime import RunError
    from parcompile.runtime.checkpoint import export, export_adapter
    from parcompile.runtime.checkpoint.converting import convert

    plan, folder = make_plan(2, {"tp": 2}), str(tmp_path)
    expected = train_plain(plan)
    stored(plan, tmp_path)
    assert_same(run_ranks(2, train, plan, folder, False, True), expected, 2)
    assert_same(run_ranks(2, train, make_plan(2, {"cp": 2}), folder, True, False), expected, 1)
    assert_same(run_ranks(2, train, make_plan(2, {"pp": 2}), folder, True, True), expected, 1)
    assert_same(run_ranks(2, train, plan, folder, True, True), expected, 1)

    staged = tmp_path / "of stages"
    stored(plan, staged)
    assert_same(run_ranks(2, train, make_plan(2, {"pp": 2}), str(staged), False, True), expected, 2)
    assert_same(run_ranks(2, train, plan, str(staged), True, False), expected, 1)

    with pytest.raises(RunError, match="has adapters, which are not converted"):
        convert(tmp_path / "end", plan, tmp_path / "converted")
    ids = samples(plan)[0]["input_ids"][None]
    logits = expected["model"](ids).logits
    export(staged / "end", tmp_path / "merged")
    export_adapter(tmp_path / "end", tmp_path / "exported")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32),
        peft.PeftModel.from_pretrained(base, str(tmp_path / "exported")),
    ):
        torch.testing.assert_close(model.eval()(ids).logits, logits, rtol=1e-4, atol=1e-5)


def refusals(rank: int, plan: Plan, folder: str) -> list[str]:
    from parcompile.runtime import RunError, adapter_state, initialize, join, load_pretrained

    drawn = load_pretrained(f"{folder}/base", plan, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    state = adapter_state(drawn, join(plan))
    assert all(bool(value.any()) == ("lora_A" in name) for name, value in state.items())
    found = []
    for targets, options in ((["lm_head"], {}), (["q_proj"], {"use_dora": True}), (["q_proj"], {"lora_bias": True})):
        try:
            initialize(plan=plan, model=adapted(plan, targets, **options))
            found.append("")
        except RunError as error:
            found.append(str(error))
    return found


def test_what_is_not_injected_is_named(tmp_path: Path) -> None:
    plan = make_plan(2, {"tp": 2})
    stored(plan, tmp_path)
    head, dora, bias = run_ranks(2, refusals, plan, str(tmp_path))[0]
    assert head == "lm_head is the head: leave it out of target_modules"
    assert "model.layers.0.self_attn.q_proj uses a variant of LoRA" in dora
    assert "model.layers.0.self_attn.q_proj has lora_bias" in bias
