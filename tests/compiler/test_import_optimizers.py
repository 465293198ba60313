"""Optimizers of other tools as a spec's and back; what a spec does not have is refused by name, with the reason."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_import_deepspeed import imported as of_deepspeed
from test_import_megatron import LLAMA, MODEL, carried

import parcompile
from parcompile.backends import deepspeed
from parcompile.backends.deepspeed.write import ds_config
from parcompile.backends.importers import importer
from parcompile.backends.megatron.write import arguments, as_list
from parcompile.backends.reading import Outcome
from parcompile.backends.registry import losses
from parcompile.importing import Imported, import_tree
from parcompile.schema.keys import refused_optimizer
from parcompile.spec import OPTIMIZER_KEYS
from parcompile.text import parse


def lost(result: Imported) -> dict[str, str]:
    return {one.option: one.detail for one in result.of(Outcome.LOST) if one.option != "optimizer.type"}


def optimizer_of(result: Imported) -> dict[str, Any]:
    """The optimizer of the plan: what it has and what it does not read."""
    assert result.plan is not None, (result.questions, [one.message for one in result.diagnostics])
    optimizer = result.plan.spec.training.optimizer
    return {key: getattr(optimizer, key) for key in ("type", "lr", "weight_decay", *OPTIMIZER_KEYS[optimizer.type])}


def plan_with(**optimizer: Any) -> parcompile.Plan:
    training = {"sequence_length": 1024, "global_batch_size": 16, "optimizer": optimizer}
    machines = {"nodes": 2, "gpus_per_node": 8}
    tree = {"version": 1, "model": {"preset": "gpt2"}, "cluster": machines, "training": training}
    return parcompile.compile(tree)


DEEPSPEED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"type": "Muon", "params": {"lr": 2e-3, "momentum": 0.9, "weight_decay": 0.1}},
        {"type": "muon", "lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-10, "momentum": 0.9}
        | {"nesterov": True, "ns_steps": 5, "ns_dtype": "bf16", "adjust_lr": "original"},
    ),
    (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "dampening": 0, "foreach": False}},
        {"type": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": True},
    ),
    ({"type": "SGD", "params": {}}, {"type": "sgd", "lr": 1e-3, "weight_decay": 0, "momentum": 0, "nesterov": False}),
    (
        {"type": "adagrad", "params": {"weight_decay": 0.5, "lr_decay": 0.0}},
        {"type": "adagrad", "lr": 1e-2, "weight_decay": 0.5, "eps": 1e-10},
    ),
]


@pytest.mark.parametrize(("section", "expected"), DEEPSPEED, ids=lambda one: one["type"])
def test_deepspeeds_optimizers_are_carried_with_deepspeeds_defaults(
    section: dict[str, Any], expected: dict[str, Any]
) -> None:
    result = of_deepspeed({"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": section})
    assert optimizer_of(result) == expected
    assert [one for name, one in lost(result).items() if name != "optimizer.params"] == []
    assert result.plan is not None
    written = ds_config(result.plan)["optimizer"]
    assert written["type"].lower() == section["type"].lower()
    kept = {key: value for key, value in section["params"].items() if key in written["params"]}
    assert kept == {key: written["params"][key] for key in kept}


def test_our_defaults_of_optimizers_are_those_of_their_classes() -> None:
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam, muon_update

    for kind, name in ((torch.optim.SGD, "sgd"), (torch.optim.Adagrad, "adagrad")):
        found = inspect.signature(kind).parameters
        known = {**deepspeed.OPTIMIZERS[name], **{key: value for key, value in deepspeed.OFF.items() if key in found}}
        assert {key: found[key].default for key in known} == known
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    groups = [
        {"params": [weight], "use_muon": True},
        {"params": [torch.nn.Parameter(torch.zeros(2))], "use_muon": False},
    ]
    of_matrices, of_others = SingleDeviceMuonWithAuxAdam(groups).param_groups
    muon = deepspeed.OPTIMIZERS["muon"]
    assert (of_matrices["momentum"], of_matrices["weight_decay"]) == (muon["momentum"], muon["weight_decay"])
    assert (list(of_others["betas"]), of_others["eps"]) == (muon["betas"], muon["eps"])
    update = inspect.signature(inspect.unwrap(muon_update)).parameters
    assert (update["nesterov"].default, update["ns_steps"].default) == (True, 5)


def test_two_rates_of_muon_are_one_in_a_spec() -> None:
    section = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4, "per_head_muon": True}}
    result = of_deepspeed({"train_batch_size": 8, "optimizer": section})
    assert optimizer_of(result)["lr"] == 0.02
    assert lost(result) == {
        "optimizer.params.adam_lr": "a spec has one lr, here that of matrices, 0.02",
        "optimizer.params.per_head_muon": "the optimizers of a spec have no such setting",
    }
    assert all(one.changes for one in result.of(Outcome.LOST))
    asked = of_deepspeed({"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"weight_decay": 0.1}}})
    assert [one.path for one in asked.questions] == [("training", "optimizer", "lr")]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Lion", "torch has no Lion"),
        ("Lamb", "the norm of each weight"),
        ("OneBitAdam", "compresses gradients"),
        ("ZeroOneAdam", "compresses gradients"),
        ("MuSGD", "widths of μP"),
        ("Adafactor", "the rows and columns of each weight"),
        ("RMSprop", "adamw, adam, muon, sgd and adagrad, and no RMSprop"),
        ("sgd", "here SGD"),
    ],
)
def test_what_a_spec_has_not_is_refused_by_name(kind: str, why: str) -> None:
    result = of_deepspeed({"train_batch_size": 8, "optimizer": {"type": kind, "params": {"lr": 1e-3}}})
    assert [one.path for one in result.questions] == [("training", "optimizer")]
    assert why in result.questions[0].why
    assert kind in result.questions[0].why


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("lion", "torch has no Lion"),
        ("adafactor", "rows and columns"),
        ("sophia", "second backward pass"),
        ("adamw_8bit", "scales of blocks"),
        ("paged_adamw_8bit", "scales of blocks"),
        ("galore_adamw", "singular vectors"),
        ("apollo_adamw", "channels"),
        ("adalomo", "in the backward pass"),
        ("schedule_free_sgd", "other weights than those that it trains"),
    ],
)
def test_a_spec_with_another_optimizer_is_refused_with_the_reason(kind: str, why: str) -> None:
    with pytest.raises(parcompile.SpecError) as error:
        plan_with(type=kind)
    assert f'"{kind}" is not allowed' in str(error.value)
    assert why in str(error.value)
    assert why in (refused_optimizer(kind) or "")


MEGATRON: list[tuple[str, dict[str, Any]]] = [
    ("--optimizer sgd --lr 0.1", {"type": "sgd", "lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "nesterov": False}),
    (
        "--optimizer muon --lr 0.01 --muon-nesterov --muon-scale-mode shape_scaling --muon-coefficient-type simple",
        {"type": "muon", "lr": 0.01, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.9}
        | {"nesterov": True, "ns_steps": 5, "ns_dtype": "bf16", "adjust_lr": "original"},
    ),
    (
        "--optimizer dist_muon --lr 0.01 --muon-momentum 0.95 --muon-num-ns-steps 8 --muon-extra-scale-factor 0.2 "
        "--muon-coefficient-type simple --muon-no-split-qkv --muon-tp-mode blockwise --muon-scalar-optimizer lion",
        {"type": "muon", "lr": 0.01, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.95}
        | {"nesterov": False, "ns_steps": 8, "ns_dtype": "bf16", "adjust_lr": "match_rms_adamw"},
    ),
]


@pytest.mark.parametrize(("words", "expected"), MEGATRON, ids=["sgd", "muon", "dist_muon"])
def test_megatrons_optimizers_are_carried_with_megatrons_defaults(words: str, expected: dict[str, Any]) -> None:
    result = carried(f"{MODEL} {LLAMA} {words}")
    assert optimizer_of(result) == expected
    named = {one.option: one.changes for one in result.of(Outcome.LOST) if one.option[:4] in ("opti", "muon", "sgd_")}
    lost_of_muon = ["optimizer"] if expected["type"] == "muon" else []
    assert named == dict.fromkeys(lost_of_muon + ["muon_tp_mode"] * ("blockwise" in words), True)
    assert result.spec["zero"]["stage"] == int("dist" in words)
    kept = {"muon_no_split_qkv": True, "muon_scalar_optimizer": "lion"} if "dist" in words else None
    assert result.spec.get("backends", {}).get("megatron") == kept


def test_what_megatrons_muon_has_by_default_and_a_spec_has_not_is_named() -> None:
    result = carried(f"{MODEL} {LLAMA} --optimizer muon --lr 0.01 --muon-fp32-matmul-prec low")
    named = {one.option: one.detail for one in result.of(Outcome.LOST)}
    assert named["muon_coefficient_type"] == 'Megatron-LM\'s default is "quintic"; the plan writes "simple"'
    assert named["muon_extra_scale_factor"] == "Megatron-LM's default is 1.0; the plan writes 0.2"
    assert named["muon_fp32_matmul_prec"] == 'the plan writes "medium"'
    assert all(one.changes for one in result.of(Outcome.LOST))


@pytest.mark.parametrize("kind", ["lion", "soap", "adaptive_muon"])
def test_megatrons_other_optimizers_are_refused(kind: str) -> None:
    (asked,) = carried(f"{MODEL} {LLAMA} --optimizer {kind} --lr 0.01").questions
    assert asked.path == ("training", "optimizer")
    assert f"no {kind}: " in asked.why


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "muon", "lr": 0.01, "eps": 1e-6, "momentum": 0.9, "nesterov": False, "adjust_lr": "original"}
        | {"no_weight_decay": "vectors"},
        {"type": "muon", "ns_steps": 7, "no_weight_decay": "vectors"},
        {"type": "sgd", "momentum": 0.9, "weight_decay": 0.0},
        {"type": "sgd", "no_weight_decay": "vectors"},
    ],
    ids=str,
)
def test_what_is_written_for_megatron_comes_back(optimizer: dict[str, Any]) -> None:
    plan = plan_with(**optimizer)
    words = arguments(plan)
    assert words["optimizer"] == optimizer["type"]
    again = carried(" ".join(as_list(words)))
    assert again.plan is not None
    assert again.plan.spec.training.optimizer == plan.spec.training.optimizer
    assert {one.option for one in again.of(Outcome.LOST)} <= {"optimizer"}


def test_every_target_names_what_becomes_of_the_optimizer() -> None:
    said = {
        kind: {
            target: [one.what for one in found if "optimizer" in one.what or "nesterov" in one.what]
            for target, found in losses(plan_with(type=kind, **extra), ("deepspeed", "megatron", "torchtitan")).items()
        }
        for kind, extra in {
            "muon": {"ns_dtype": "fp32"},
            "sgd": {"momentum": 0.9, "nesterov": True},
            "adagrad": {},
            "adamw": {},
        }.items()
    }
    assert said == {
        "muon": {"deepspeed": ["optimizer muon"], "megatron": ["optimizer muon"], "torchtitan": ["optimizer muon"]},
        "sgd": {"deepspeed": [], "megatron": ["nesterov"], "torchtitan": ["optimizer sgd"]},
        "adagrad": {"deepspeed": [], "megatron": ["optimizer adagrad"], "torchtitan": ["optimizer adagrad"]},
        "adamw": {"deepspeed": [], "megatron": [], "torchtitan": []},
    }


def of_trainer(**arguments: Any) -> Imported:
    tree = {"output_dir": "out", "per_device_train_batch_size": 4, "max_steps": 10, **arguments}
    reader = importer("trainer")
    document = parse(json.dumps(tree), "arguments.json", "json").document
    assert document is not None
    answers: dict[tuple[str, ...], Any] = {
        ("model",): {"preset": "gpt2"},
        ("cluster", "gpus_per_node"): 2,
        ("training", "sequence_length"): 64,
    }
    return import_tree(reader.tree(document), reader, answers, Path())


def test_optim_of_the_trainer_is_carried_with_its_arguments() -> None:
    sgd = of_trainer(optim="sgd", optim_args="momentum=0.9, nesterov=true, dampening=0.1", learning_rate=0.1)
    found = {"type": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": True}
    assert optimizer_of(sgd) == found
    assert "dampening=0.1" in lost(sgd)["optim_args"]
    adagrad = of_trainer(optim="adagrad", weight_decay=0.1)
    assert optimizer_of(adagrad) == {"type": "adagrad", "lr": 5e-5, "weight_decay": 0.1, "eps": 1e-10}
    assert optimizer_of(of_trainer(optim="adagrad", optim_args="eps=1e-6"))["eps"] == 1e-6
    assert optimizer_of(of_trainer(optim="paged_adamw_32bit"))["type"] == "adamw"
    from transformers import TrainingArguments
    from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS as HANDLERS

    assert {"sgd", "adagrad", "adamw_torch"} <= {one.value for one in HANDLERS}
    assert "optim_args" in inspect.signature(TrainingArguments).parameters


@pytest.mark.parametrize(("decay", "left_out"), [(0.1, "biases_and_norms"), (0.0, None)])
def test_what_the_trainer_does_not_decay_is_carried(decay: float, left_out: str | None) -> None:
    plan = of_trainer(weight_decay=decay).plan
    assert plan is not None
    assert plan.spec.training.optimizer.no_weight_decay == left_out


def test_every_target_names_what_it_decays_otherwise() -> None:
    def named(model: dict[str, Any], **optimizer: Any) -> dict[str, str]:
        given = {"sequence_length": 1024, "global_batch_size": 16, "optimizer": optimizer}
        machines = {"nodes": 2, "gpus_per_node": 8}
        plan = parcompile.compile({"version": 1, "model": model, "cluster": machines, "training": given})
        targets = losses(plan, ("deepspeed", "megatron", "torchtitan", "accelerate-deepspeed"))
        return {
            target: one.why
            for target, found in targets.items()
            for one in found
            if "no_weight_decay" in one.what or one.what == "biases and norms"
        }

    llama, gpt_oss = {"preset": "llama-3-8b"}, {"preset": "gpt-oss-20b"}
    assert set(named(llama)) == {"megatron"}
    assert set(named(llama, weight_decay=0.0)) == set()
    # On Llama both leave the same out.
    for left_out in ("vectors", "biases_and_norms"):
        assert set(named(llama, no_weight_decay=left_out)) == {"deepspeed", "torchtitan", "accelerate-deepspeed"}
    assert "megatron" not in named(gpt_oss, no_weight_decay="vectors")
    assert "sinks differ" in named(gpt_oss, no_weight_decay="biases_and_norms")["megatron"]


def test_every_optim_of_the_trainer_is_carried_or_refused_with_a_sentence() -> None:
    from transformers.training_args import OptimizerNames

    for one in OptimizerNames:
        result = of_trainer(optim=one.value)
        if result.questions:
            assert [asked.path for asked in result.questions] == [("training", "optimizer", "type")]
            assert f"and no {one.value}" in result.questions[0].why
            assert "optim" in lost(result)
        else:
            assert optimizer_of(result)["type"] in ("adamw", "sgd", "adagrad")


def test_automodels_classes_of_torch_are_carried() -> None:
    text = yaml.safe_dump(
        {
            "model": {"pretrained_model_name_or_path": "openai-community/gpt2"},
            "step_scheduler": {"global_batch_size": 8, "local_batch_size": 1},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
        }
    )
    document = parse(text, "automodel.yaml", "yaml").document
    assert document is not None
    reader = importer("automodel")
    found = import_tree(reader.tree(document), reader, {}, Path()).spec["training"]["optimizer"]
    assert found == {"type": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0}
