"""Runs of models with LoRA adapters: on ranks, and with peft and torch alone; and how the two are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from training_runs import initial_model, samples

from parcompile.plan import Plan

peft = pytest.importorskip("peft")

STEPS = 2


def adapted(plan: Plan, options: Mapping[str, Any]) -> Any:
    """The plan's model with the same adapters everywhere; B is drawn too, for it starts at zero."""
    torch.manual_seed(3)
    model = peft.get_peft_model(initial_model(plan), peft.LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def stored(plan: Plan, options: Mapping[str, Any], folder: Path) -> None:
    """The model and its adapters as files."""
    adapted(plan, options).save_pretrained(folder / "adapter")
    initial_model(plan).save_pretrained(folder / "base")


def train(rank: int, plan: Plan, options: Mapping[str, Any], folder: str, resume: bool, loaded: bool) -> dict[str, Any]:
    """Steps up to the second one, each saved; the model is whole, or `loaded` slice by slice."""
    from parcompile.runtime import adapter_state, initialize, load_pretrained
    from parcompile.runtime.checkpoint import load, save

    model = load_pretrained(f"{folder}/base", plan, f"{folder}/adapter") if loaded else adapted(plan, options)
    engine, _, loader, _ = initialize(
        plan=plan, model=model, training_data=samples(plan), self_check=None if loaded else True
    )
    loader.step = load(engine, f"{folder}/checkpoints") if resume else 0
    batches, losses, norms = iter(loader), [], []
    for step in range(loader.step, STEPS):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        if not resume:
            save(engine, f"{folder}/{'checkpoints' if step == 0 else 'end'}", step + 1)
    return {"losses": losses, "norms": norms, "adapters": adapter_state(engine.module, engine.mesh)}


def train_plain(
    plan: Plan, options: Mapping[str, Any], built: Callable[[Plan, Mapping[str, Any]], Any] = adapted
) -> dict[str, Any]:
    """With peft and torch alone."""
    model, training, data = built(plan, options), plan.spec.training, samples(plan)
    settings, batch = training.optimizer, training.global_batch_size
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses, norms = [], []
    for step in range(STEPS):
        ids = torch.stack([sample["input_ids"] for sample in data[step * batch : (step + 1) * batch]])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, training.gradient_clipping)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "adapters": peft.get_peft_model_state_dict(model), "model": model}


def assert_same(ranks: list[dict[str, Any]], expected: dict[str, Any], steps: int) -> None:
    wanted = {**{key: expected[key][-steps:] for key in ("losses", "norms")}, "adapters": expected["adapters"]}
    for found in ranks:
        assert_close({key: found[key] for key in wanted}, wanted)


def assert_exported(plan: Plan, folder: Path, merged: Path, expected: dict[str, Any]) -> None:
    """Transformers reads the run in `merged` with its adapters in the weights, and that of `folder` beside its base."""
    from transformers import AutoModelForCausalLM

    from parcompile.runtime.checkpoint import export, export_adapter

    ids = samples(plan)[0]["input_ids"][None]
    logits = expected["model"](ids).logits
    export(merged / "end", folder / "merged")
    export_adapter(folder / "end", folder / "exported")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    for model in (
        AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32),
        peft.PeftModel.from_pretrained(base, str(folder / "exported")),
    ):
        assert_close(model.eval()(ids).logits, logits)
