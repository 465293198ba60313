"""Mutants of a good spec: no exception, and each place lies in the file."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from test_schema_messages import GOOD

from parcompile import schema
from parcompile.schema.accepting import accepted
from parcompile.text import parse

ODD = st.sampled_from(
    [None, True, "", "8", "auto", "bf16", 0, -1, 2.5, 1e300, [], [1], {}, {"a": 1}, [[]], "x" * 500, "é"]
)


def paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else []
    return [path, *(found for key, value in entries for found in paths(value, (*path, key)))]


@st.composite
def mutants(draw: st.DrawFn, specs: st.SearchStrategy[Any] = st.just(GOOD)) -> Any:  # noqa: B008 -- never changed
    tree: Any = copy.deepcopy(draw(specs))
    for path in draw(st.lists(st.sampled_from([path for path in paths(tree) if path]), max_size=4)):
        node: Any = tree
        try:
            for step in path[:-1]:
                node = node[step]
            action = draw(st.sampled_from(["set", "delete", "rename"]))
            if action == "set":
                node[path[-1]] = copy.deepcopy(draw(ODD))
            elif action == "delete":
                del node[path[-1]]
            elif isinstance(node, dict):
                key = str(path[-1])
                at = draw(st.integers(0, len(key)))
                node[key[:at] + draw(st.sampled_from(["", "x", "_", "S"])) + key[at + 1 :]] = node.pop(path[-1])
        except (KeyError, IndexError, TypeError):
            continue
    return tree


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutants(), st.sampled_from([None, 2]))
def test_any_mutant_is_valid_or_has_diagnostics_in_the_file(tree: Any, indent: int | None):
    text = json.dumps(tree, indent=indent, ensure_ascii=False)
    document = parse(text, "spec.json").document
    assert document is not None
    found = schema.validate(document, "spec").diagnostics
    lines = text.split("\n")
    for one in found:
        assert one.position is not None
        assert 1 <= one.position.line <= len(lines)
        assert 1 <= one.position.column <= len(lines[one.position.line - 1])
        assert one.message
        assert len(one.message) < 400
    assert len({(one.code, one.path) for one in found}) == len(found)


def refused(tree: Any, whole: Any) -> bool:
    return not Draft202012Validator(whole).is_valid(tree)


FILES = sorted(file for file in (Path(__file__).parents[1] / "specs").rglob("*.json") if ".expected" not in file.name)
READ = [parse(file.read_text(encoding="utf-8"), file.name).document for file in FILES]
SPECS = [GOOD, *(one.tree for one in READ if one is not None and isinstance(one.tree, dict))]


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutants(st.sampled_from(SPECS)))
def test_what_is_accepted_without_jsonschema_is_what_it_accepts(tree: Any):
    assert accepted(tree, schema.load("spec")) != refused(tree, schema.load("spec"))


@pytest.mark.parametrize(
    ("said", "accepts", "refuses"),
    [
        ({"type": "integer"}, [3, 3.0, -1], [True, 3.5, "3", None, float("nan")]),
        ({"type": ["number", "null"]}, [3, 3.5, None], [False, "3", []]),
        ({"enum": ["auto", 1, None]}, ["auto", 1, 1.0, None], [True, "1", [1], {}]),
        ({"const": 0}, [0, 0.0], [False, None, ""]),
        ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.5, "0", True], [0, 3, 0.5]),
        ({"maximum": 1, "exclusiveMinimum": 0}, [1, 0.5, None], [0, 2]),
        ({"minLength": 1, "maxLength": 2, "pattern": "b"}, ["b", "ab", 7], ["", "abb", "a"]),
        ({"minItems": 1, "maxItems": 2, "items": {"type": "integer"}}, [[1], [1, 2], {}], [[], [1, 2, 3], ["1"]]),
        ({"uniqueItems": True}, [[1, 2], [1, True], [0, False, "0"]], [[1, 1], [1, 1.0], ["a", "a"]]),
        ({"required": ["a"], "minProperties": 2}, [{"a": 1, "b": 2}, [], "a"], [{"a": 1}, {"b": 1, "c": 2}]),
        (
            {"properties": {"a": {"type": "null"}}, "additionalProperties": False},
            [{"a": None}, {}],
            [{"a": 1}, {"b": 1}],
        ),
        ({"properties": {"a": True}, "additionalProperties": {"type": "null"}}, [{"a": 1, "b": None}], [{"b": 1}]),
        ({"$ref": "#/$defs/a", "minimum": 2, "$defs": {"a": {"maximum": 3}}}, [2, 3], [1, 4]),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "a"], [2, 1.5]),
        ({"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"minimum": 1}}, ["a", 1], ["", 0]),
        ({"if": {"type": "string"}, "then": False}, [1], ["a"]),
        ({"then": False, "else": False}, [1], []),
        ({"uniqueItems": False}, [[1, 1]], []),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b", "maximum": 30}, "b": {"maximum": 10}}}, [9], [20]),
        ({"$ref": "#/$defs/a", "$defs": {"a": False}}, [], [1]),
    ],
)
def test_a_keyword_means_what_jsonschema_takes_it_for(said: Any, accepts: list[Any], refuses: list[Any]):
    assert [one for one in [*accepts, *refuses] if not refused(one, said)] == accepts
    assert [one for one in [*accepts, *refuses] if accepted(one, said)] == accepts


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        *((1, {"multipleOf": 1}), ((1,), {}), ([{1}], {"items": {"title": "a"}}), ([[1]], {"uniqueItems": True})),
        *(([1], {"enum": [[1]]}), ({"a": 1}, {"const": {"a": 1}}), (1, {"$ref": "other.json"})),
        ([1], {"oneOf": [True, {"items": False, "prefixItems": [True]}]}),
        ({"a": 1}, {"if": {"additionalProperties": False, "patternProperties": {"a": True}}, "then": False}),
        (1, {"properties": {}, "oneOf": [{"$id": "https://a.b/c", "type": "integer"}]}),
    ],
)
def test_what_is_not_known_here_is_left_to_jsonschema(tree: Any, said: Any):
    assert not accepted(tree, said)


DS_EXAMPLE: Any = {
    "train_batch_size": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": None},
    "data_types": {"keep_in_fp32_modules": ["x"]},
}
DS_PATHS = [path for path in paths(DS_EXAMPLE) if path]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(DS_PATHS), ODD), min_size=1, max_size=3))
def test_any_mutant_of_a_deepspeed_configuration_has_messages_and_no_exception(changes: Any):
    tree = copy.deepcopy(DS_EXAMPLE)
    for path, value in changes:
        node: Any = tree
        # An earlier change may have replaced what stood on the way.
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for step in path[:-1]:
                node = node[step]
            node[path[-1]] = copy.deepcopy(value)
    for one in schema.validate(tree, "ds_config").diagnostics:
        assert one.message
        assert "not valid under any" not in one.message
