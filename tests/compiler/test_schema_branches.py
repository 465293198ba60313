"""The keywords that the spec's own schema does not use: exclusions, dependencies, conditions, nested alternatives."""

from typing import Any

import pytest

from parcompile import schema

ALTERNATIVES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "kind": {
            "oneOf": [
                {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["type", "path"],
                    "properties": {"type": {"const": "file"}, "path": {"type": "string"}},
                },
                {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["type", "size"],
                    "properties": {
                        "type": {"const": "memory"},
                        "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    },
                },
            ]
        },
        "a": {"type": "integer"},
        "b": {"type": "integer"},
        "c": {"type": "integer"},
        "even": {"multipleOf": 2},
        "many": {"type": "array", "uniqueItems": True, "items": {"type": "integer", "maximum": 9}},
        "names": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]+$"},
            "additionalProperties": {"type": "integer"},
        },
        "none": {"not": {}},
    },
    "not": {"required": ["a", "b"]},
    "dependentRequired": {"c": ["a"]},
    "if": {"properties": {"even": {"const": 4}}, "required": ["even"]},
    "then": {"required": ["a"]},
}

CASES: list[tuple[dict[str, Any], list[tuple[str, tuple[object, ...]]]]] = [
    ({"kind": {"type": "file", "path": "x"}}, []),
    ({"kind": {"type": "memory", "path": "x"}}, [("K008", ("kind", "path"))]),
    ({"kind": {"type": "memory"}}, [("K002", ("kind", "size"))]),
    ({"kind": {"type": "memory", "size": "x"}}, [("K003", ("kind", "size"))]),
    ({"kind": {"type": "file", "path": 3}}, [("K003", ("kind", "path"))]),
    ({"kind": 3}, [("K003", ("kind",))]),
    ({"a": 1, "b": 2}, [("K008", ("b",))]),
    ({"c": 1}, [("K009", ("a",))]),
    ({"even": 3}, [("K005", ("even",))]),
    ({"even": 4}, [("K002", ("a",))]),
    ({"many": [1, 2, 1]}, [("K007", ("many", 2))]),
    ({"many": [1, 20]}, [("K005", ("many", 1))]),
    ({"names": {"A": 1}}, [("K001", ("names", "A"))]),
    ({"names": {"a": "1"}}, [("K003", ("names", "a"))]),
    ({"none": 1}, [("K008", ("none",))]),
]


@pytest.mark.parametrize(("tree", "expected"), CASES)
def test_the_deepest_useful_error_is_said(
    tree: dict[str, Any], expected: list[tuple[str, tuple[object, ...]]], monkeypatch: pytest.MonkeyPatch
):
    for function in (schema._validator, schema._view):
        monkeypatch.setattr(schema, function.__name__, function.__wrapped__)
    monkeypatch.setattr(schema, "load", lambda _: ALTERNATIVES)
    found = schema.validate(tree, "test").diagnostics
    assert [(one.code, one.path) for one in found] == expected
