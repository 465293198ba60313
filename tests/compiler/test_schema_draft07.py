"""The draft-07 twins are schemas, and accept and refuse as the schemas do."""

from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from test_schema_messages import GOOD, MISTAKES, changed

from parcompile import schema
from parcompile.schema import draft07


@pytest.mark.parametrize("name", schema.names())
def test_every_schema_has_a_twin(name: str):
    Draft202012Validator.check_schema(schema.load(name))
    twin = draft07(schema.load(name))
    Draft7Validator.check_schema(twin)
    assert twin["$id"] != schema.load(name)["$id"]
    assert "$defs" not in str(twin)


def test_the_twin_of_the_spec_judges_alike():
    twin = Draft7Validator(draft07(schema.load("spec")))
    assert twin.is_valid(GOOD)
    for path, value, *_ in MISTAKES:
        assert not twin.is_valid(changed(path, value)), path


@pytest.mark.parametrize(
    ("newer", "good", "bad"),
    [
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 2}, {"a": 1}),
        ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, ["x", 1], ["x", "y"]),
        (
            {"$defs": {"n": {"type": "integer"}}, "properties": {"$defs": {"$ref": "#/$defs/n", "minimum": 2}}},
            {"$defs": 3},
            {"$defs": 1},
        ),
        (
            {"properties": {"dependentRequired": {"const": {"$defs": 1}}}},
            {"dependentRequired": {"$defs": 1}},
            {"dependentRequired": 1},
        ),
    ],
)
def test_newer_keywords_keep_their_meaning(newer: dict[str, Any], good: object, bad: object):
    twin = Draft7Validator(draft07(newer))
    assert twin.is_valid(good)
    assert not twin.is_valid(bad)
