"""The torchtitan configuration fits torchtitan 0.3.0's classes, whose fields were recorded from its wheel.

`.ci/generate/torchtitan_fields.py` records them; with a written configuration as its argument the real classes build
it. Elsewhere the recorded fields stand in for the classes, and refuse what those would refuse.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from parcompile.backends.registry import render
from parcompile.backends.torchtitan import DEFAULTS, FLAVORS, VERSION, options
from parcompile.model.presets import find_preset
from parcompile.pipeline import compile_file

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((Path(__file__).parent / "torchtitan_fields.json").read_text(encoding="utf-8"))
SUMS = {"sequence_length": 512, "gradient_accumulation_dtype": "fp32"}
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "NoneType": type(None)}


class Fields:
    """A configuration class: takes only its recorded fields, with values of their types."""

    def __init__(self, kind: str, **values: Any) -> None:
        object.__setattr__(self, "kind", kind)
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        known = RECORDED["fields"][self.kind]
        assert name in known, f"{self.kind} has no {name}"
        allowed = known[name]
        if isinstance(allowed, list):
            assert value in allowed, f"{name} = {value!r} is none of {allowed}"
        else:
            names = [part.strip().removeprefix("<class '").removesuffix("'>") for part in allowed.split("|")]
            kinds = tuple(TYPES[one] for one in names if one in TYPES)
            assert isinstance(value, kinds), f"{name} = {value!r} is no {allowed}"
        object.__setattr__(self, name, value)


def run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str = "plan") -> Any:
    """What a written configuration does to torchtitan's own one."""
    modules: dict[str, dict[str, Any]] = {
        "torchtitan.components.optimizer": {
            "default_adamw": lambda **values: values,
            "LRSchedulersContainer": types.SimpleNamespace(
                Config=lambda **values: Fields("LRSchedulersContainer.Config", **values)
            ),
        },
        "torchtitan.config": {"ParallelismConfig": lambda **values: Fields("ParallelismConfig", **values)},
        "torchtitan.distributed.activation_checkpoint": {
            name: types.SimpleNamespace(Config=lambda name=name: name) for name in ("FullAC", "SelectiveAC")
        },
    }
    for module, function_name in (place.split(".") for place in FLAVORS.values()):
        registry = modules.setdefault(f"torchtitan.models.{module}.config_registry", {})
        registry[function_name] = lambda name=function_name: types.SimpleNamespace(
            name=name, training=Fields("TrainingConfig"), debug=Fields("DebugConfig")
        )
    for name, attributes in modules.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**attributes))
    file = tmp_path / "torchtitan_config.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("torchtitan_config", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)()


def written(tmp_path: Path, **sections: Any) -> str:
    tree = {
        "version": 1,
        "model": {"preset": "qwen3-0.6b"},
        "cluster": {"nodes": 2, "gpus_per_node": 8},
        "training": {"sequence_length": 4096, "global_batch_size": 64},
        **sections,
    }
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    plan, checked = compile_file(file)
    assert plan is not None, [one.message for one in checked.diagnostics if one.is_error]
    return render(plan, ("torchtitan",))["torchtitan_config.py"]


def test_the_recorded_version_is_the_one_that_is_written_for() -> None:
    assert RECORDED["version"] == VERSION


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallelism": {"tp": 2, "cp": 2, "sequence_parallel": True}},
        {"zero": {"stage": 3}, "training": {"sequence_length": 512, "precision": "fp32", "gradient_clipping": 0}},
        {
            "training": {
                "sequence_length": 512,
                "global_batch_size": 32,
                "activation_checkpointing": "full",
                "train_steps": 50,
                "lr_scheduler": {"type": "cosine", "warmup_steps": 5, "min_lr": 0.0},
            }
        },
        {"model": {"preset": "qwen3-32b"}, "parallelism": {"tp": 2, "pp": 4}, "training": SUMS},
    ],
    ids=["defaults", "tp cp sp", "fp32 stage 3", "recompute and cosine", "pp"],
)
def test_every_value_fits_torchtitans_classes(
    sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run(written(tmp_path, **sections), tmp_path, monkeypatch)
    axes = config.parallelism
    degrees = ("data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")
    product = 1
    for axis in degrees:
        product *= getattr(axes, f"{axis}_degree")
    assert product == 16
    assert config.training.seq_len == sections.get("training", {}).get("sequence_length", 4096)
    assert set(config.optimizer) == {"lr", "betas", "eps", "weight_decay"}
    local, dp = config.training.local_batch_size, axes.data_parallel_shard_degree
    assert config.training.global_batch_size % (local * dp) == 0


def test_a_pipeline_cuts_the_batch_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {**SUMS, "global_batch_size": 32, "micro_batch_size": 2}
    text = written(tmp_path, model={"preset": "qwen3-32b"}, parallelism={"tp": 2, "pp": 4}, training=training)
    config = run(text, tmp_path, monkeypatch)
    assert config.training.local_batch_size == 16  # 32 sequences over dp 2
    assert config.parallelism.pipeline_parallel_microbatch_size == 2


@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="its own classes did NOT build the file: pip install --no-deps torchtitan==0.3.0",
)
def test_torchtitans_own_classes_build_the_file_and_have_the_defaults_of_the_importer(tmp_path: Path) -> None:
    file = tmp_path / "torchtitan_config.py"
    training = {"sequence_length": 512, "train_steps": 50, "lr_scheduler": {"type": "wsd", "warmup_steps": 5}}
    training["lr_scheduler"] |= {"min_lr": 3e-5, "decay_steps": 20, "decay_type": "sqrt", "total_steps": 80}
    training["activation_checkpointing"] = "full"
    file.write_text(written(tmp_path, parallelism={"tp": 2, "cp": 2}, training=training), encoding="utf-8")
    command = [sys.executable, str(ROOT / ".ci" / "generate" / "torchtitan_fields.py"), str(file)]
    said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout)
    plan, _ = compile_file(tmp_path / "spec.json")
    assert plan is not None
    built, (group,) = said["plan"], said["plan"]["optimizer"]["param_groups"]
    assert (group["optimizer_name"], built["activation_checkpoint"] is None) == ("AdamW", False)
    for name, value in options(plan.spec).items():
        section, _, key = name.partition(".")
        if key:
            found = group["optimizer_kwargs"][key] if section == "optimizer" else built[section][key]
            assert found == (list(value) if isinstance(value, tuple) else value), name
    for name, value in DEFAULTS.items():
        section, _, key = name.partition(".")
        if section in said["defaults"]:
            assert said["defaults"][section][key] == value, name


def test_models_that_torchtitan_has_are_the_same_models() -> None:
    for preset, place in FLAVORS.items():
        found = find_preset(preset)
        if found is not None:
            assert found.parameters == RECORDED["parameters"][place], preset
