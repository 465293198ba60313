"""Contract: what is written for trl, axolotl and LLaMA-Factory says the plan, and names what it cannot carry."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

import parcompile
from parcompile.backends.reading import Outcome
from parcompile.backends.registry import losses, render
from parcompile.backends.trainers.write import AXOLOTL, LLAMA_FACTORY, decided
from parcompile.importing import import_document
from parcompile.lint import recognised
from parcompile.text import read_file


def plan_of(parallelism: dict[str, Any], training: dict[str, Any] | None = None, **sections: Any) -> parcompile.Plan:
    return parcompile.compile(
        {
            "version": 1,
            "model": {"preset": "llama-3-8b"},
            "cluster": {"nodes": 2, "gpus_per_node": 8, "accelerator": "h200"},
            "parallelism": parallelism,
            "training": {"sequence_length": 4096, "global_batch_size": 16, **(training or {})},
            **sections,
        }
    )


RAMP: dict[str, Any] = {
    "global_batch_size": 32,
    "rampup_batch_size": {"start": 16, "increment": 16, "samples": 64},
}
SCHEDULE: dict[str, Any] = {"train_steps": 20, "lr_scheduler": {"type": "cosine", "warmup_steps": 2}}


def test_axolotl_s_yaml_names_the_plug_in_and_the_plan_and_says_what_the_plan_decides() -> None:
    plan = plan_of({"tp": 2, "cp": 4}, training=SCHEDULE)
    files = render(plan, ("axolotl",))
    tree = yaml.safe_load(files["axolotl.yaml"])
    assert tree["plugins"] == ["parcompile.runtime.axolotl.Plugin"]
    assert tree["parcompile"] == {"plan": "."}
    assert (tree["tensor_parallel_size"], tree["context_parallel_size"]) == (2, 4)
    assert decided(plan, AXOLOTL).items() <= tree.items()
    assert (tree["lr_scheduler"], tree["warmup_steps"], tree["max_steps"]) == ("cosine", 2, 20)
    assert "launch/torchrun.sh" in files


def test_an_unknown_key_of_the_section_is_named_as_lost(tmp_path: Path) -> None:
    text = render(plan_of({"tp": 2}), ("axolotl",))["axolotl.yaml"]
    file = tmp_path / "run.yaml"
    file.write_text(text.replace("  plan: .\n", "  plan: .\n  paln: .\n"), encoding="utf-8")
    read, recognition = recognised(read_file(file))
    assert (read.document is not None, recognition.kind) == (True, "axolotl")
    accounts = import_document("axolotl", read.document, {}, tmp_path).accounts
    found = {one.option: one.outcome for one in accounts if one.option.startswith("parcompile")}
    assert found == {"parcompile.plan": Outcome.NO_EFFECT, "parcompile.paln": Outcome.LOST}


def test_trl_s_script_has_the_line_that_trains_by_the_plan() -> None:
    text = render(plan_of({"tp": 2}, training=SCHEDULE), ("trl",))["trl_sft.py"]
    calls = [ast.unparse(one) for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call)]
    assert "parallelise(SFTTrainer, Path(__file__).resolve().parent)" in calls
    assert any(
        one.startswith("SFTConfig(given.output, max_length=4096, logging_steps=1, max_steps=20") for one in calls
    )


def test_llama_factory_gets_zero_and_the_trainer_s_own_optimizer(tmp_path: Path) -> None:
    plan = plan_of({}, training=SCHEDULE, zero={"stage": 2})
    files = render(plan, ("llamafactory",))
    tree, config = yaml.safe_load(files["llama_factory.yaml"]), yaml.safe_load(files["llama_factory_ds_config.json"])
    assert decided(plan, LLAMA_FACTORY).items() <= tree.items()
    assert config["zero_optimization"]["stage"] == 2
    assert not {"optimizer", "scheduler", "train_batch_size"} & config.keys()
    parser = pytest.importorskip("llamafactory.hparams.parser", reason="needs llamafactory: its parser reads the YAML")
    hf = pytest.importorskip("transformers")
    off = {"bf16": False, "use_cpu": True, "deepspeed": None}
    hf.HfArgumentParser(parser._TRAIN_ARGS).parse_dict({**tree, **off, "output_dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("target", "parallelism", "training", "words"),
    [
        ("trl", {"pp": 2}, {}, "trainers of trl take no pipeline stages"),
        ("axolotl", {"pp": 2}, {}, "trainers of axolotl take no pipeline stages"),
        ("trl", {}, RAMP, "trainers of trl take as many micro-batches in every step"),
        ("axolotl", {}, RAMP, "trainers of axolotl take as many micro-batches in every step"),
        ("llamafactory", {"tp": 2}, {}, "LLaMA-Factory has ZeRO alone"),
        ("llamafactory", {"cp": 2}, {}, "LLaMA-Factory has ZeRO alone"),
    ],
)
def test_a_layout_that_a_trainer_does_not_have_gets_no_file(
    target: str, parallelism: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    plan = plan_of(parallelism, training=training)
    found = losses(plan, (target,))[target]
    assert any(one.fatal and words in one.why for one in found)
    assert not [name for name in render(plan, (target,)) if name.endswith((".yaml", ".py"))]


def test_what_the_yaml_has_no_word_for_is_named() -> None:
    schedule = {"train_steps": 20, "lr_scheduler": {"type": "cosine", "warmup_steps": 2, "min_lr": 1e-5}}
    plan = plan_of({}, training={**schedule, "optimizer": {"type": "muon", "lr": 1e-3}})
    for target in ("axolotl", "llamafactory"):
        assert {"lr_scheduler", "optimizer muon"} <= {one.what for one in losses(plan, (target,))[target]}
    assert "lr_scheduler" not in yaml.safe_load(render(plan, ("axolotl",))["axolotl.yaml"])


def test_llama_factory_says_what_deepspeed_sums_in_without_zero() -> None:
    for stage in (0, 1):
        plan = plan_of({}, model={"preset": "qwen3-0.6b"}, zero={"stage": stage})
        said = [one.what for one in losses(plan, ("llamafactory",))["llamafactory"]]
        assert ("gradient_accumulation_dtype fp32" in said) == (stage == 0)


def test_llama_factory_keeps_the_optimizer_on_the_host_and_has_no_batch_that_grows() -> None:
    plan = plan_of({}, training=RAMP, zero={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    said = {one.what: one.fatal for one in losses(plan, ("llamafactory",))["llamafactory"]}
    assert said["rampup_batch_size 16 16 64"] is False
    assert "zero.offload_optimizer" not in said
    config = yaml.safe_load(render(plan, ("llamafactory",))["llama_factory_ds_config.json"])
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_targets_that_keep_weights_on_the_accelerator_say_so() -> None:
    plan = plan_of({}, zero={"stage": 3, "offload_param": {"device": "cpu"}})
    for target in ("accelerate", "torchtitan", "megatron"):
        assert "zero.offload_param" in {one.what for one in losses(plan, (target,))[target]}, target
    config = render(plan, ("llamafactory",))["llama_factory_ds_config.json"]
    assert yaml.safe_load(config)["zero_optimization"]["offload_param"]["device"] == "cpu"


SCRIPTS = ("accelerate", "accelerate-deepspeed", "transformers")


def test_what_a_script_decides_is_named_with_its_schedule_steps_and_seed() -> None:
    for target in SCRIPTS:
        plan = plan_of({}, model={"preset": "qwen3-0.6b"})
        said = " ".join(one.what for one in losses(plan, (target,))[target])
        assert "steps and seed" in said, target
        assert ("schedule" in said) == (target != "accelerate-deepspeed"), target  # ds_config.json has one
    balanced = plan_of({"ep": 16}, model={"preset": "qwen3-30b-a3b"}, training={"router": {"aux_loss": 0.01}})
    said = " ".join(one.what for one in losses(balanced, ("transformers",))["transformers"])
    assert "router aux_loss 0.01" in said


def test_a_batch_of_evaluation_that_no_file_says_is_named() -> None:
    for target in (*SCRIPTS, "torchtitan", "trl", "axolotl", "llamafactory"):
        for training in ({}, {"eval_global_batch_size": 32}):
            plan = plan_of({}, model={"preset": "qwen3-0.6b"}, training=training)
            named = any("eval_global_batch_size 32" in one.what for one in losses(plan, (target,))[target])
            assert named == bool(training), target


def test_accelerate_reduces_gradients_in_the_type_of_the_weights() -> None:
    for sums in ("fp32", "bf16"):
        plan = plan_of({}, model={"preset": "qwen3-0.6b"}, training={"gradient_accumulation_dtype": sums})
        said = {one.what for one in losses(plan, ("accelerate",))["accelerate"]}
        assert ("gradient_accumulation_dtype fp32" in said) == (sums == "fp32")
    utils = pytest.importorskip("accelerate.utils")
    plugin = utils.FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert str(plugin.mixed_precision_policy.reduce_dtype) == "torch.bfloat16"
