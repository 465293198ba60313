"""DeepSpeed's configuration: what DeepSpeed 0.19.8 reads is accepted, what it ignores in silence is refused."""

import importlib
import os
import typing
from typing import Any

import pytest

from parcompile import schema

GOOD: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}


def said(**keys: Any) -> list[tuple[str, str, str]]:
    found = schema.validate({**GOOD, **keys}, "ds_config").diagnostics
    return [(one.code, ".".join(map(str, one.path)), one.help or "") for one in found]


def everywhere(node: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, node)] if isinstance(node, dict) else []
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else []
    return found + [one for key, value in entries for one in everywhere(value, f"{path}/{key}")]


def test_it_is_a_schema_closed_at_every_level_with_titles_and_descriptions():
    from jsonschema import Draft202012Validator

    tree = schema.load("ds_config")
    Draft202012Validator.check_schema(tree)
    for path, node in everywhere(tree):
        if "properties" in node and path.split("/")[-1] not in ("if", "then", "properties", "params"):
            assert node.get("additionalProperties") is False, path
        for key, entry in node.get("properties", {}).items() if "additionalProperties" in node else ():
            assert entry.get("title"), (path, key)
            assert entry.get("description"), (path, key)


def test_defaults_and_examples_fit():
    from jsonschema import Draft202012Validator

    for path, node in everywhere(schema.load("ds_config")):
        if "title" in node and not path.endswith("properties"):
            values = [*node.get("examples", []), *([node["default"]] if "default" in node else [])]
            assert all(Draft202012Validator(node).is_valid(value) for value in values), path


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "offload_param": {"device": "cpu"}}},
        {"optimizer": {"type": "adamw", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "torch_adam": True}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}},
        {"fp16": {"enabled": True, "loss_scale": 0}, "bf16": {"enabled": False}},
        {"checkpoint": {"load_universal": True, "tag_validation": "Fail"}},
        {"steps_per_print": None, "tensorboard": {"enabled": True, "output_path": "x"}},
    ],
)
def test_what_deepspeed_reads_is_accepted(keys: dict[str, Any]):
    assert said(**keys) == []


@pytest.mark.parametrize(
    ("keys", "code", "path", "advice"),
    [
        ({"zero_optimisation": {"stage": 2}}, "K001", "zero_optimisation", 'did you mean "zero_optimization"?'),
        ({"zero": {"stage": 2}}, "K001", "zero", 'did you mean "zero_optimization"?'),
        ({"zero_optimization": {"stage": "auto"}}, "K004", "zero_optimization.stage", ""),
        ({"zero_optimization": {"stage": 4}}, "K004", "zero_optimization.stage", "0, 1, 2 or 3"),
        ({"gradient_cliping": 1.0}, "K001", "gradient_cliping", 'did you mean "gradient_clipping"?'),
        ({"optimizer": {"type": "AdamWW"}}, "K004", "optimizer.type", 'did you mean "AdamW"?'),
        ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}, "K001", "optimizer.params.momentum", "betas"),
        ({"optimizer": {"params": {}}}, "K002", "optimizer.type", "AdamW"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "K002", "scheduler.params.total_num_steps", ""),
        ({"bf16": {"enabled": True, "loss_scale": 0}}, "K008", "bf16.loss_scale", "only fp16"),
        ({"bf16": {"enabled": "true"}}, "K003", "bf16.enabled", "write true without quotes"),
        ({"elasticity": {}}, "K008", "elasticity", "give the batch sizes"),
        ({"curriculum_learning": {}}, "K008", "curriculum_learning", "data_efficiency"),
        ({"sparse_gradient": True}, "K001", "sparse_gradient", ""),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "K001",
            "zero_optimization.offload_param.devise",
            "device",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "gpu"}}},
            "K004",
            "zero_optimization.offload_param.device",
            "none",
        ),
        ({"train_batch_size": "auto"}, "K003", "train_batch_size", ""),
        ({"communication_data_type": "fp8"}, "K004", "communication_data_type", "fp32"),
    ],
)
def test_what_deepspeed_ignores_or_fails_on_later_is_refused(keys: dict[str, Any], code: str, path: str, advice: str):
    ((found_code, found_path, found_help),) = said(**keys)
    assert (found_code, found_path) == (code, path)
    assert advice in found_help


def test_one_of_the_batch_sizes_is_needed():
    (found,) = schema.validate({"gradient_accumulation_steps": 2}, "ds_config").diagnostics
    assert found.code == "K002"
    assert '"train_batch_size" or "train_micro_batch_size_per_gpu"' in found.message


MODELS = [
    ("runtime.zero.config:DeepSpeedZeroConfig", "zero_optimization"),
    ("runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig", "zero_optimization/offload_param"),
    ("runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig", "zero_optimization/offload_optimizer"),
    ("runtime.zenflow.zenflow_config:ZenFlowConfig", "zero_optimization/zenflow"),
    ("runtime.zero.leaf_module_config:DeepSpeedZeroLeafModuleConfig", "zero_optimization/leaf_module"),
    ("runtime.precision_config:DeepSpeedBF16Config", "bf16"),
    ("runtime.precision_config:DeepSpeedFP16Config", "fp16"),
    ("runtime.tensor_parallel.config:TPTrainingConfig", "tensor_parallel"),
    ("runtime.config:HybridEngineConfig", "hybrid_engine"),
    ("monitor.config:TensorBoardConfig", "tensorboard"),
    ("monitor.config:WandbConfig", "wandb"),
    ("monitor.config:CSVConfig", "csv_monitor"),
    ("monitor.config:CometConfig", "comet"),
    ("utils.config:DeepSpeedThroughputTimerConfig", "timers/throughput"),
    ("compile.config:CompileConfig", "compile"),
    ("comm.config:CommsLoggerConfig", "comms_logger"),
    ("inference.config:WeightQuantConfig", "weight_quantization"),
]


def at(path: str) -> dict[str, Any]:
    node: Any = schema.load("ds_config")
    for step in path.split("/"):
        node = node["properties"][step]
    assert isinstance(node, dict)
    return node


def test_every_field_of_deepspeed_is_there_with_its_default(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("deepspeed", minversion="0.19.8")
    monkeypatch.setenv("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "cpu"))
    for name, path in MODELS:
        module, model_name = name.split(":")
        model = getattr(importlib.import_module(f"deepspeed.{module}"), model_name)
        properties = {key: entry for key, entry in at(path)["properties"].items() if entry.get("not") != {}}
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        # No JSON value is a torch.dtype.
        fields = {key: field for key, field in fields.items() if "torch.dtype" not in str(field.annotation)}
        aliases = {key for key, field in model.model_fields.items() if field.alias}
        assert set(fields) <= set(properties), (name, set(fields) - set(properties))
        assert set(properties) <= set(fields) | aliases, (name, set(properties) - set(fields) - aliases)
        for key, field in fields.items():
            default = field.get_default(call_default_factory=True)
            default = getattr(default, "value", default)
            if (
                not _deprecated(field)
                and "default" in properties[key]
                and isinstance(default, (bool, int, float, str, type(None)))
            ):
                assert properties[key]["default"] == default, (name, key)


def _deprecated(field: Any) -> bool:
    extra = field.json_schema_extra
    return bool(isinstance(extra, typing.Mapping) and extra.get("deprecated"))
