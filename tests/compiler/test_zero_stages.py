"""The stages at which a ZeRO key has an effect are those at which the installed DeepSpeed reads it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from parcompile.backends.deepspeed import FORBIDDEN_ZERO, GATHERED, OWN_CHECKPOINTS, VERSION, has_effect
from parcompile.backends.kinds import DEEPSPEED
from parcompile.lint.deepspeed import UsageContext
from parcompile.lint.registry import Settings, check_settings
from parcompile.pipeline import check_read
from parcompile.rules import example_spec
from parcompile.text import parse

OTHERWISE = {
    "stage": "it chooses the stage",
    "zenflow": "a rule of its own speaks of it at stage 0",
    "cpu_offload": "the old name of offload_optimizer: a rule of its own speaks of it",
    "cpu_offload_param": "the old name of offload_param: the same",
    "cpu_offload_use_pin_memory": "an old name: the same",
    "stage3_gather_fp16_weights_on_model_save": "the old name of gather_16bit_weights_on_model_save",
    "leaf_module": "modules are marked at every stage (engine.py); runtime/zero of stage 3 alone looks at the mark",
    "load_from_fp32_weights": "handed to load_state_dict of either optimizer",
    "elastic_checkpoint": "the engine itself asks for it when a checkpoint is loaded, at every stage",
    "pipeline_loading_checkpoint": "an assertion allows it at stage 3 alone",
    "gather_16bit_weights_on_model_save": "asked for in save_16bit_model, where weights are sharded",
    "zero_quantized_gradients": "makes a group that the optimizer of stage 3 alone is given",
}
"""Keys whose reading does not follow from where the engine makes its optimizer."""


@pytest.fixture(scope="module")
def runtime() -> Path:
    deepspeed = pytest.importorskip("deepspeed")
    return Path(deepspeed.__file__).parent / "runtime"


def attributes(node: ast.AST) -> Iterator[str]:
    """Names that are read of a `zero_config`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Attribute) and one.value.attr == "zero_config":
            yield one.attr


def calls(node: ast.AST) -> set[str]:
    found = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
    return {one.attr for one in found if isinstance(one, ast.Attribute)}


def read_at(runtime: Path) -> dict[str, set[int]]:
    """The stages at which the engine's making of an optimizer, or code of stage 3 alone, reads each key."""
    engine = ast.parse((runtime / "engine.py").read_text(encoding="utf-8"))
    functions = {one.name: one for one in ast.walk(engine) if isinstance(one, ast.FunctionDef)}
    make = functions.pop("_configure_zero_optimizer")
    branch = next(one for one in make.body if isinstance(one, ast.If) and "gradients" in ast.unparse(one.test))
    (of_stage_3,) = branch.orelse
    assert isinstance(of_stage_3, ast.If) and "weights" in ast.unparse(of_stage_3.test)
    called = {1: calls(ast.Module(branch.body, [])), 3: calls(ast.Module(of_stage_3.body, []))}
    before = calls(ast.Module([one for one in make.body if one is not branch], []))
    found: dict[str, set[int]] = {}
    for name, function in functions.items():
        for key in attributes(function) if len(ast.unparse(function)) < 600 else ():
            stages = ({1, 2} if name in called[1] | before else set()) | ({3} if name in called[3] | before else set())
            found.setdefault(key, set()).update(stages)
    for file in ("partition_parameters", "parameter_offload", "stage3"):
        for key in attributes(ast.parse((runtime / "zero" / f"{file}.py").read_text(encoding="utf-8"))):
            found.setdefault(key, set()).add(3)
    return found


def test_the_table_says_where_deepspeed_reads_each_key(runtime: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    found = read_at(runtime)
    wrong = {}
    for key, field in DeepSpeedZeroConfig.model_fields.items():
        stages = {stage for stage in (1, 2, 3) if has_effect(key, stage)}
        if key not in OTHERWISE and stages != found.get(key, set()):
            wrong[key] = (stages, found.get(key))
        if field.alias is not None:
            assert stages == {stage for stage in (1, 2, 3) if has_effect(field.alias, stage)}
    assert wrong == {}
    assert set(OTHERWISE) <= set(DeepSpeedZeroConfig.model_fields)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_spec_and_a_file_hear_the_same_of_every_key(stage: int) -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    for key, field in zero.DeepSpeedZeroConfig.model_fields.items():
        if key in FORBIDDEN_ZERO or key in OTHERWISE or not isinstance(field.default, (bool, int)):
            continue
        tree = example_spec({"zero": {"stage": stage}, "deepspeed": {"zero_optimization": {key: field.default}}})
        spec = check_read(parse(json.dumps(tree), "spec.json", "json"), Path())
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, key: field.default}}
        file = check_settings(Settings(config, frozenset(), UsageContext(VERSION)), DEEPSPEED)
        in_spec = any(one.code == "Z003" for one in spec.diagnostics)
        in_file = any(one.code == "F005" for one in file)
        assert in_spec == in_file == (not has_effect(key, stage)), (key, stage)


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("key", OWN_CHECKPOINTS)
def test_keys_of_checkpoints_that_the_runtime_itself_writes_are_named(key: str, value: bool) -> None:
    """Where it does something else than they ask for."""
    for stage, are_unread in (
        (2, has_effect(key, 3) and not has_effect(key, 2)),
        (3, not (value and key in GATHERED)),
    ):
        tree = example_spec({"zero": {"stage": stage}, "deepspeed": {"zero_optimization": {key: value}}})
        said = check_read(parse(json.dumps(tree), "spec.json", "json"), Path()).diagnostics
        assert [one.path[-1] for one in said if one.code == "Z003"] == [key] * are_unread, stage
