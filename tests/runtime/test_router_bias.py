"""Contract: routers' correction biases move as in one process, whatever the layout, and are saved with a run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from closeness import assert_close
from expert_runs import Case
from families import tiny_config
from ranks import run_ranks
from safetensors.torch import load_file
from training_runs import initial_model, plain_optimizer, samples

from parcompile.model.blocks.experts import CORRECTION_BIASES
from parcompile.model.catalogue import CORRECTED, RUNTIME_FAMILIES
from parcompile.model.families import FAMILIES
from parcompile.pipeline import check_read
from parcompile.plan import Plan
from parcompile.rules import example_spec
from parcompile.runtime.engine.router_bias import RouterBiases
from parcompile.runtime.errors import RunError
from parcompile.runtime.model.text_head import causal_model
from parcompile.text import parse

RATE, STEPS = 0.05, 3


def is_bias(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def train(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    """The biases of this rank's layers after some steps, and those of an exported checkpoint."""
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import export, load, save

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    batches = iter(loader)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    biases = {name: one.clone() for name, one in engine.module.named_buffers() if is_bias(name)}
    save(engine, folder, STEPS)
    engine.train_batch(batches)
    load(engine, folder)
    again = {name: one for name, one in engine.module.named_buffers() if is_bias(name)}
    if rank == 0:
        export(folder, Path(folder) / "hf")
    same = all(torch.equal(one, again[name]) for name, one in biases.items())
    return {"losses": losses, "biases": biases, "same": same}


def of_one_process(plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and biases with transformers and torch alone; the rule is written out expert by expert."""
    training, model = plan.spec.training, initial_model(plan)
    optimizer, data, losses = plain_optimizer(model, plan), samples(plan), []
    chosen: dict[str, list[int]] = {}

    def look(name: str) -> Any:
        return lambda _, __, output: chosen.setdefault(name, []).extend(output[-1].flatten().tolist())

    for name, module in model.named_modules():
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(look(f"{name}.e_score_correction_bias"))
    buffers = dict(model.named_buffers())
    for step in range(STEPS):
        chosen.clear()
        batch = data[step * training.global_batch_size : (step + 1) * training.global_batch_size]
        ids = torch.stack([sample["input_ids"] for sample in batch])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(float(loss.detach()))
        for name, choices in chosen.items():
            experts = len(buffers[name])
            for expert in range(experts):
                excess = choices.count(expert) - len(choices) / experts
                buffers[name][expert] -= RATE * ((excess > 0) - (excess < 0))
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: buffers[name] for name in chosen}


@pytest.mark.ranks
def test_biases_are_those_of_one_process_and_are_saved_and_exported(tmp_path: Path) -> None:
    layout = {"tp": 2, "cp": 2, "ep": 2, "sequence_parallel": True}
    training = {"router": {"bias_update_rate": RATE}, "activation_checkpointing": "full"}
    plan = Case("deepseek_v3", layout, training).plan()
    losses, expected = of_one_process(plan)
    found = run_ranks(4, train, plan, str(tmp_path))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert expected.keys() == found[0]["biases"].keys()
    for one in found:
        assert one["same"]
        assert_close(one["losses"], losses)
        for name, bias in expected.items():
            assert bias.any()
            assert_close(one["biases"][name], bias, about=name)
            assert torch.equal(exported[name], one["biases"][name]), name


def test_the_families_with_a_bias_are_known_and_stage_3_refused_where_it_is_a_parameter(tmp_path: Path) -> None:
    from transformers import AutoConfig

    found, sharded, refused = set(), set(), set()
    for name in RUNTIME_FAMILIES:
        if FAMILIES[name].experts is not None and name != "aria_text":
            values = dict(tiny_config(name))
            (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            with torch.device("meta"):
                model = causal_model(config)
            parameters = {one.rpartition(".")[2] for one, _ in model.named_parameters()}
            if parameters.union(one.rpartition(".")[2] for one, _ in model.named_buffers()) & set(CORRECTION_BIASES):
                found.add(name)
                sharded |= {name} if parameters & set(CORRECTION_BIASES) else set()
                router = {"router": {"bias_update_rate": RATE}}
                tree = example_spec({"model": {"hf_config": "config.json"}, "zero": {"stage": 3}, "training": router})
                said = check_read(parse(json.dumps(tree), "spec.json", "json"), tmp_path).diagnostics
                refused |= {name for one in said if one.code == "Z002" and "is a parameter" in one.message}
    assert found == CORRECTED
    assert refused == sharded == {"afmoe", "ernie4_5_moe", "laguna"}


@pytest.mark.parametrize(("family", "is_refused"), [("ernie4_5_moe", True), ("deepseek_v3", False)])
def test_a_bias_that_is_a_parameter_is_refused_where_weights_are_sharded(family: str, is_refused: bool) -> None:
    from transformers import AutoConfig

    values = dict(tiny_config(family))
    with torch.device("meta"):
        model = causal_model(AutoConfig.for_model(values.pop("model_type"), **values))
    for stage_3 in (False, True):
        spec = SimpleNamespace(shards_weights=stage_3)
        mesh: Any = SimpleNamespace(plan=SimpleNamespace(spec=spec), device=torch.device("meta"))
        refused = pytest.raises(RunError, match=r"at zero.stage 3: .* is a parameter, which this stage shards")
        with refused if is_refused and stage_3 else contextlib.nullcontext():
            RouterBiases(model, mesh, RATE)
