"""Values of other tools' files are read with their types: a wrong one is an error with its name, in every importer."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from parcompile.cli import cli
from parcompile.text.typed import Reader, WrongValueError, integer, number, shown, word

ROOT = Path(__file__).parents[2]
READERS = (
    *(ROOT / "compiler" / "backends" / name for name in ("deepspeed/read.py", "deepspeed/__init__.py")),
    *(ROOT / "compiler" / "backends" / name for name in ("gpt_neox/read.py", "gpt_neox/model.py")),
    *(ROOT / "compiler" / "backends" / name for name in ("accelerate/read.py", "megatron/read.py")),
    *sorted((ROOT / "compiler" / "backends" / "trainers").glob("*.py")),
    ROOT / "runtime" / "checkpoint" / "manifest.py",
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("file", READERS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_reader_converts_by_itself(file: Path) -> None:
    """`int(tree["key"])` is a traceback for a list; `text.typed` names the key."""
    found = [
        f"{file.name}:{node.lineno}: {node.id}"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id in ("int", "float") and isinstance(node.ctx, ast.Load)
        if not _is_annotation(file, node)
    ]
    assert found == []


def _is_annotation(file: Path, name: ast.Name) -> bool:
    """Whether a name stands in an annotation, or in a call of isinstance."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    taken: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            taken.append(node.annotation)
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            taken.append(node.returns)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            taken.append(node)
    places = {(one.lineno, one.col_offset) for part in taken for one in ast.walk(part) if isinstance(one, ast.Name)}
    return (name.lineno, name.col_offset) in places


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_a_value_has_its_type_or_is_named(value: Any) -> None:
    for read, kind in ((integer, int), (number, float), (word, str)):
        try:
            found = read(value, "a.b")
        except WrongValueError as error:
            assert error.name == "a.b"
            assert str(error).startswith("a.b is ")
            assert len(str(error)) < 200
        else:
            assert type(found) is kind
            assert not isinstance(found, float) or math.isfinite(found)
            assert not isinstance(value, bool)


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), (" 8 ", 8), ("8.0", 8), (8.0, 8), ("1e3", 1000), (2**63 - 1, 2**63 - 1)]
)
def test_what_tools_take_for_a_whole_number(text: Any, value: int) -> None:
    assert integer(text, "x") == value


@pytest.mark.parametrize("value", [None, True, "", "x", 1.5, math.nan, math.inf, 2**63, 10**400, "9" * 5000, [1], {}])
def test_what_no_tool_takes_for_one(value: Any) -> None:
    with pytest.raises(WrongValueError):
        integer(value, "x")
    assert len(shown(value)) < 80


def test_a_reader_names_the_whole_path() -> None:
    read = Reader({"plan": {"files": {"a": {"bytes": "many"}}}})
    with pytest.raises(WrongValueError, match=r"plan\.files\.a\.bytes is 'many': it has to be a whole number of 0"):
        for _, one in read.mapping("plan").mapping("files").items():
            one.integer("bytes", least=0)
    with pytest.raises(WrongValueError, match=r"plan\.missing"):
        read.mapping("plan").mapping("missing")


FILES = {
    "deepspeed": {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    },
    "accelerate": {"distributed_type": "DEEPSPEED", "num_processes": 8},
    "axolotl": {"base_model": "m", "sequence_len": 512},
    "neox": {"pipe_parallel_size": 1, "model_parallel_size": 1, "num_layers": 2, "hidden_size": 8},
    "megatron": {"tensor_model_parallel_size": 2, "num_layers": 2, "hidden_size": 64, "micro_batch_size": 1},
}
NUMBERS = {
    "deepspeed": ("gradient_clipping", "fp16.loss_scale", "train_batch_size", "zero_optimization.stage"),
    "accelerate": ("num_machines", "deepspeed_config.gradient_clipping", "deepspeed_config.zero_stage"),
    "axolotl": ("micro_batch_size", "learning_rate", "adam_beta2", "warmup_ratio", "max_steps", "tensor_parallel_size"),
    "neox": ("hidden_dropout", "warmup", "pipe_parallel_size", "num_kv_heads", "rotary_pct", "intermediate_size"),
    "megatron": ("num_layers", "lr", "clip_grad", "seq_length"),
}


@pytest.mark.parametrize("value", [["x"], {"a": 1}, "many", math.nan], ids=["list", "mapping", "text", "nan"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NUMBERS.items() for name in names])
def test_a_wrong_value_is_refused_with_its_name(kind: str, name: str, value: Any, tmp_path: Path) -> None:
    tree = json.loads(json.dumps({**FILES[kind], "num_attention_heads": 4} if kind == "neox" else FILES[kind]))
    node = tree
    *path, last = name.split(".")
    for step in path:
        node = node.setdefault(step, {})
    node[last] = value
    file = tmp_path / "file.json"
    file.write_text(json.dumps(tree))
    kinds = {"deepspeed": "ds_config", "neox": "gpt_neox"}
    done = CliRunner().invoke(cli, ["import", "-v", "--kind", kinds.get(kind, kind), str(file)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    if isinstance(value, dict):
        return  # its keys are options of their own
    said = done.output.replace("-", "_")
    assert last in said


def test_text_that_is_nested_too_deep_is_no_traceback(tmp_path: Path) -> None:
    deep = '{"a":' * 100_000
    file = tmp_path / "axolotl.json"
    file.write_text(json.dumps({**FILES["axolotl"], "deepspeed": deep}), encoding="utf-8")
    done = CliRunner().invoke(cli, ["import", str(file)])
    assert "deepspeed holds text that is not JSON: it is nested too deep" in done.output
    file.write_text(json.dumps(FILES["axolotl"]), encoding="utf-8")
    done = CliRunner().invoke(cli, ["import", str(file), "--set", f"training.seed={deep}"])
    assert isinstance(done.exception, SystemExit | None)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("cluster", "accelerator", {"a": None}),
        ("training", "micro_batch_size", 0),
        ("training", "eval_micro_batch_size", -0.0),
        ("cluster", "gpus_per_node", 1.5),
    ],
)
def test_what_does_not_fit_is_not_searched_with_values_that_are_refused(
    section: str, key: str, value: Any, tmp_path: Path
) -> None:
    spec: dict[str, Any] = {
        "version": 1,
        "model": {"preset": "llama-3-8b"},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "accelerator": "a100-40gb"},
        "training": {"sequence_length": 8192, "global_batch_size": 64},
    }
    spec[section][key] = value
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    done = CliRunner().invoke(cli, ["check", str(file)])
    assert isinstance(done.exception, SystemExit), done.exception
    assert key in done.output


@pytest.mark.parametrize(
    ("cluster", "parallelism", "said"),
    [
        ({"nodes": 1.0, "gpus_per_node": 1.0, "accelerator": "a100-40gb"}, {}, "H001"),
        (
            {"nodes": 1, "gpus_per_node": 8, "accelerator": "mine.json"},
            {"cp": 4, "cp_implementation": "usp"},
            "mine.json",
        ),
    ],
    ids=["whole numbers as 1.0", "a machine that is not there"],
)
def test_what_is_chosen_depends_on_values_as_users_write_them(
    cluster: Any, parallelism: Any, said: str, tmp_path: Path
) -> None:
    training = {"sequence_length": 8192, "global_batch_size": 64}
    spec = {"version": 1, "model": {"preset": "llama-3-8b"}, "cluster": cluster, "training": training}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({**spec, "parallelism": parallelism}))
    done = CliRunner().invoke(cli, ["check", str(file)])
    assert isinstance(done.exception, SystemExit), done.exception
    assert said in done.output
    assert "1 error" in done.output


@pytest.mark.parametrize("changes", [{"num_layers": 2**31, "num_experts": 4}, {"global_batch_size": "-0"}])
def test_arguments_without_bounds_end_in_a_message(changes: Any, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps({**FILES["megatron"], "num_attention_heads": 4, "train_samples": 8, **changes}))
    done = CliRunner().invoke(cli, ["import", "--kind", "megatron", str(file)])
    assert isinstance(done.exception, SystemExit), done.exception
    assert next(iter(changes)) in done.output.replace("-", "_")


@pytest.mark.parametrize("value", [0, "-0", -4])
def test_a_model_without_heads_is_refused(value: Any, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps({**FILES["megatron"], "num_attention_heads": value}))
    done = CliRunner().invoke(cli, ["import", "--kind", "megatron", str(file)])
    assert isinstance(done.exception, SystemExit)
    assert re.search(r"num_attention_heads is '?-?\d'?: it has to be a whole number of 1 or more", done.output)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
}
LINEAR = {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 4, "num_key_value_heads": 2}
CONFIGS = {
    "model_type a list": {"model_type": ["llama"]},
    "model_type of the text part a list": {"model_type": "llava", "text_config": {"model_type": ["llama"]}},
    "rope_scaling a text": {"rope_scaling": "linear"},
    "rope_parameters a text": {"rope_parameters": "default"},
    "all layers linear": LINEAR,
    "layer_types a number": {"model_type": "qwen3", "layer_types": 4},
    "layers without end": {"model_type": "qwen4_exp_text", "num_hidden_layers": 10**30},
    "dense layers a number": {"model_type": "qwen3_5_moe_text", "num_experts": 4, "mlp_only_layers": 1e-12},
    "layers with experts of two types": {"model_type": "llama4_text", "moe_layers": [1, "a"]},
    "widths of two types": {"model_type": "gemma3n_text", "intermediate_size": [1, "a"]},
    "kinds of indexers lists": {"model_type": "glm_moe_dsa", "indexer_types": [["x"]] * 4},
    "sliding_window_size a list": {"model_type": "mimo_v2_flash", "v_head_dim": 16, "sliding_window_size": [{}]},
    "moe_layer_freq a number": {"model_type": "minimax_m3_vl_text", "moe_layer_freq": 5},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("length", "cp"), [(512, 2), (1, 16)])
def test_a_damaged_configuration_is_no_traceback(changes: Any, length: int, cp: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    spec = {
        "version": 1,
        "model": {"hf_config": "config.json"},
        "parallelism": {"cp": cp, "tp": 1},
        "cluster": {"nodes": 2, "gpus_per_node": 8, "accelerator": "h100-sxm"},
        "training": {"sequence_length": length, "global_batch_size": 64, "precision": "bf16"},
    }
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    config = str(tmp_path / "config.json")
    for line in (
        *(["check", str(file)], ["estimate", str(file)], ["init", "--hf-config", config]),
        *(["models", "--config", config], ["compile", str(file), "-o", str(tmp_path / "out")]),
    ):
        done = CliRunner().invoke(cli, line)
        assert done.exception is None or isinstance(done.exception, SystemExit), (line, done.exception)
