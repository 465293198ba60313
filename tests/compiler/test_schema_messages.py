"""A violated schema in words: what is wrong, what was found, what to write instead; each mistake once."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parcompile import schema
from parcompile.diagnostics import Diagnostic, Safety
from parcompile.text import parse

GOOD: dict[str, Any] = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"nodes": 4, "gpus_per_node": 8, "accelerator": "h100-sxm"},
    "parallelism": {"cp": 4},
    "training": {
        "sequence_length": 8192,
        "global_batch_size": 64,
        "micro_batch_size": 1,
        "optimizer": {"type": "adamw", "betas": [0.9, 0.95]},
    },
    "zero": {"stage": 1},
}
GONE = object()


def changed(path: str, value: object) -> dict[str, Any]:
    tree = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    node = tree
    for step in parents:
        node = node.setdefault(step, {})
    if value is GONE:
        del node[last]
    else:
        node[last] = value
    return tree


def check(tree: object) -> tuple[Diagnostic, ...]:
    result = parse(json.dumps(tree, indent=1), "spec.json")
    assert result.document is not None
    return schema.validate(result.document, "spec").diagnostics


def only(tree: object) -> Diagnostic:
    (found,) = check(tree)
    return found


def test_a_good_spec_has_nothing_to_be_said():
    assert schema.validate(GOOD, "spec") == schema.Validation((), frozenset())


INLINE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
LLAMA, YARN = {**INLINE, "model_type": "llama"}, {"rope_type": "yarn", "factor": 4.0}
# path, value, code, a part of the message, a part of the help
MISTAKES: list[tuple[str, object, str, str, str | None]] = [
    ("parallelism.tp", "8", "K003", 'whole number of at least 1 or "auto", found text "8"', "write 8 without quotes"),
    ("parallelism.tp", "aut", "K004", '"aut" is not allowed', 'did you mean "auto"?'),
    ("parallelism.tp", 0, "K005", "0 is too small", "at least 1"),
    ("parallelism.tp", 2.5, "K003", "found the number 2.5", "write 2 or 3"),
    ("parallelism.tp", None, "K003", "found null", None),
    ("parallelism.tp", [2], "K003", "found the list [2]", "write 2 without the brackets"),
    ("parallelism.tp", True, "K003", "found true", None),
    ("parallelism.sequence_parallel", "yes", "K003", 'true or false, found text "yes"', "write true"),
    ("parallelism.sequence_parallel", 0, "K003", "found the number 0", "write false"),
    ("parallelism.order", "tp-xp", "K006", "not of the expected form", "tp-cp-dp-pp"),
    ("cluster.accelerator", "h100", "K004", '"h100" is not allowed', 'did you mean "h100-sxm"?'),
    ("cluster.accelerator", "H100_SXM", "K004", "not allowed", 'did you mean "h100-sxm"?'),
    ("cluster.gpus_per_node", GONE, "K002", 'the key "gpus_per_node" is missing in cluster', '"gpus_per_node": 8'),
    ("training.sequence_length", "8192", "K003", "found text", "write 8192 without quotes"),
    ("training.precision", "bfloat16", "K004", "not allowed", 'did you mean "bf16"? (or "fp32" or "fp16")'),
    ("training.optimizer.type", "adamww", "K004", "not allowed", 'did you mean "adamw"?'),
    ("training.optimizer.type", 3, "K004", '"sgd" or "adagrad", found the number 3', None),
    ("training.optimizer.lr", 0, "K005", "must be above 0", "more than 0"),
    ("training.optimizer.betas", [0.9], "K007", "1 entry, but exactly 2 are needed", "[0.9, 0.95]"),
    ("training.optimizer.betas", [0.9, 1.5], "K005", "betas[1]: 1.5 is too large: it must be below 1", None),
    ("training.optimizer.betas", 0.9, "K003", "expected a list of 2", "[0.9, 0.95]"),
    ("zero.stage", "auto", "K003", 'expected 0, 1, 2 or 3, found text "auto"', None),
    ("zero.stage", "1", "K003", 'found text "1"', "write 1 without quotes"),
    ("zero.stage", 4, "K004", "4 is not allowed", "0, 1, 2 or 3"),
    ("model", {**INLINE, "model_type": "olmo2"}, "K004", '"olmo2" is not allowed', 'write "hf_config": PATH'),
    ("model", {**INLINE, "model_type": "lama"}, "K004", "not allowed", 'did you mean "llama"? (or "hf_config": PATH'),
    ("version", 2, "K004", "2 is not allowed", "write 1"),
    ("version", GONE, "K002", 'the key "version" is missing', '"version": 1'),
    ("name", "", "K007", "0 characters, but at least 1 is needed", None),
    ("model", "llama-3-8b", "K003", 'found text "llama-3-8b"', 'write {"preset": "llama-3-8b"}'),
    ("model", {}, "K002", 'needs one of the keys "preset", "hf_config"', None),
    ("model", {"hf_config": 3}, "K003", "model.hf_config: expected text", None),
    ("model", {"presett": "llama-3-8b"}, "K001", 'unknown key "presett" in model', 'did you mean "preset"?'),
    ("model", {"preset": "x", "hidden_size": 3}, "K008", '"preset" and "hidden_size" exclude each other', "keep"),
    (
        "model",
        {"preset": "x", "num_labels": 1},
        "K008",
        '"preset" and "num_labels" exclude each other',
        "add num_labels to its config.json",
    ),
    ("parallelism.tensor", 2, "K001", 'unknown key "tensor" in parallelism', 'did you mean "tp"?'),
    ("parallelism.tensr", 2, "K001", "unknown key", 'did you mean "tp"?'),
    ("parallelism.TP", 2, "K001", "unknown key", 'did you mean "tp"?'),
    ("parallelism.tensor_model_parallel_size", 2, "K001", "unknown key", 'did you mean "tp"?'),
    ("parallelism.mp_size", 2, "K001", "unknown key", 'did you mean "tp"?'),
    ("parallelism.context_parallel_size", 2, "K001", "unknown key", "parallelism.cp, which is given already"),
    ("parallelism.pipeline_model_parallel_size", 2, "K001", "unknown key", 'did you mean "pp"?'),
    ("cluster.blub", 2, "K001", "unknown key", 'known keys are "nodes", "gpus_per_node"'),
    ("training.grad_clip", 2, "K001", "unknown key", 'did you mean "gradient_clipping"?'),
    ("zero_optimization", {"stage": 1}, "K001", "unknown key", "zero, which is given already"),
    ("train_batch_size", 64, "K001", "unknown key", "training.global_batch_size, which is given already"),
    ("learning_rate", 1e-4, "K001", "unknown key", 'under "training.optimizer" as "lr"'),
    ("tp", 2, "K001", 'unknown key "tp"', 'under "parallelism" as "tp"'),
    ("training.dataset", "x.jsonl", "K001", 'unknown key "dataset" in training', "initialize(training_data=...)"),
    ("training.num-train-epochs", 3, "K001", "unknown key", "a spec counts steps: write train_steps"),
    ("training.checkpoint", "out", "K001", "unknown key", "parcompile.runtime.checkpoint has save and load"),
    ("parallelism.data", 4, "K001", 'unknown key "data" in parallelism', 'did you mean "dp"?'),
    # older files of transformers name rope_type so; "dtype" is a name of another section
    ("model", {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "K001", '"type"', 'you mean "rope_type"?'),
    ("training.optimizer.typ", "adamw", "K001", 'unknown key "typ"', "optimizer.type, which is given already"),
    ("model", {**LLAMA, "rope_scaling": {**YARN, "dtypes": ""}}, "K001", 'unknown key "dtypes"', "remove it"),
    ("zero.zero", 1, "K001", 'unknown key "zero" in zero', "known keys are"),
]


@pytest.mark.parametrize(("path", "value", "code", "message", "advice"), MISTAKES)
def test_one_mistake_is_one_diagnostic(path: str, value: object, code: str, message: str, advice: str | None):
    found = only(changed(path, value))
    assert found.code == code
    assert message in found.message
    if advice is not None:
        assert found.help is not None
        assert advice in found.help


def test_no_message_speaks_like_a_validator():
    for path, value, *_ in MISTAKES:
        for found in check(changed(path, value)):
            said = f"{found.message} {found.help}"
            assert "schema" not in said
            assert "None" not in found.message
            assert "is not valid" not in said


def test_a_misspelt_required_key_is_not_also_missing():
    tree = changed("training.sequence_length", GONE)
    tree["training"]["seqence_length"] = 8192
    found = only(tree)
    assert (found.code, found.path) == ("K001", ("training", "seqence_length"))


def test_every_mistake_is_found_in_one_pass():
    tree = changed("parallelism.tp", "8")
    tree["trainning"] = {}
    tree["zero"]["stage"] = 7
    del tree["cluster"]["gpus_per_node"]
    assert [found.code for found in check(tree)] == ["K002", "K003", "K004", "K001"]


def test_unknown_keys_stand_at_the_key_and_wrong_values_at_the_value():
    text = '{"version": 1,\n "parallelism": {"tensor":\n "x",\n "cp": "y"}}'
    document = parse(text, "spec.json").document
    assert document is not None
    places = {
        found.path: (found.position.line, found.position.column)
        for found in schema.validate(document, "spec").diagnostics
        if found.position
    }
    assert places["parallelism", "tensor"] == (2, 18)
    assert places["parallelism", "cp"] == (4, 8)
    assert places["training",] == (1, 1)


def test_a_missing_key_stands_at_the_key_of_its_object():
    document = parse('{"version": 1,\n "cluster": {}}', "spec.json").document
    assert document is not None
    found = {one.path: one for one in schema.validate(document, "spec").diagnostics}["cluster", "gpus_per_node"]
    assert found.position is not None
    assert (found.position.line, found.position.column) == (2, 2)


def test_paths_that_must_not_be_used_are_named():
    tree = changed("parallelism.tensr", 2)
    tree["training"]["micro_batch_size"] = "x"
    del tree["cluster"]["gpus_per_node"]
    invalid = schema.validate(tree, "spec").invalid_paths
    assert {("parallelism", "tp"), ("training", "micro_batch_size"), ("cluster", "gpus_per_node")} <= invalid
    assert ("cluster", "nodes") not in invalid


def test_values_that_could_not_be_read_are_not_judged_again():
    document = parse('{"version": NaN, "name": 1e999, "zero": {"stage": 1, "stage": 0}}', "spec.json").document
    assert document is not None
    validation = schema.validate(document, "spec")
    assert {found.path for found in validation.diagnostics} == {("cluster",), ("model",), ("training",)}
    assert {("version",), ("name",), ("zero", "stage")} <= validation.invalid_paths


def test_fixes_say_how_sure_they_are():
    assert only(changed("parallelism.tp", "8")).fixes[0].safety is Safety.SAFE
    assert only(changed("parallelism.mp_size", 2)).fixes[0].safety is Safety.SAFE
    assert only(changed("parallelism.ordre", "tp-cp")).fixes[0].safety is Safety.CHANGES_NUMERICS
    assert only(changed("training.precision", "bfloat16")).fixes[0].safety is Safety.SAFE
    assert only(changed("cluster.accelerator", "h100")).fixes[0].safety is Safety.CHANGES_COST


@pytest.mark.parametrize(
    "tree", [None, [], "x", 3, {"": {}}, {"model": [[]]}, {"training": {"optimizer": {"betas": {}}}}]
)
def test_odd_documents_have_diagnostics(tree: object):
    assert check(tree)


def test_an_unknown_schema_is_named_with_those_there_are():
    with pytest.raises(schema.UnknownSchemaError, match="spec"):
        schema.load("blub")


_ELSEWHERE = """
import importlib.util, sys
import parcompile
place = importlib.util.spec_from_file_location("parcompile.schemas", sys.argv[1])
parcompile.schemas = sys.modules["parcompile.schemas"] = importlib.util.module_from_spec(place)
place.loader.exec_module(parcompile.schemas)
from parcompile import schema
assert schema.load("spec") and "plan" in schema.names(), schema.names()
"""


def test_schemas_may_lie_apart_from_the_modules(tmp_path: Path):
    """As with an editable installation: the package of schemas is the sources' folder of that name."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "compiler", tmp_path / "parcompile", ignore=shutil.ignore_patterns("__pycache__"))
    words = [sys.executable, "-c", _ELSEWHERE, str(root / "schemas" / "__init__.py")]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
