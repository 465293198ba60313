"""JSON with places, and one precise diagnostic for each way of not being JSON."""

import json

import pytest

from parcompile.diagnostics import Position
from parcompile.text import Document, Result, parse


def codes(result: Result) -> list[tuple[str, int, int]]:
    return [(d.code, d.position.line, d.position.column) for d in result.diagnostics if d.position]


def document(text: str) -> Document:
    result = parse(text, "spec.json")
    assert result.document is not None
    assert result.diagnostics == ()
    return result.document


def test_every_value_and_key_has_its_line_and_column():
    found = document('{\n  "a": [1, {"b": null}],\n\t"c": "é"\n}')
    assert found.tree == {"a": [1, {"b": None}], "c": "é"}
    assert found.position(()) == Position(1, 1)
    assert found.position(("a",)) == Position(2, 8)
    assert found.position(("a",), key=True) == Position(2, 3)
    assert found.position(("a", 1, "b")) == Position(2, 18)
    assert found.position(("c",), key=True) == Position(3, 2)


def test_a_missing_path_falls_back_to_the_key_of_its_nearest_ancestor():
    found = document('{"a": {"b": 1}}')
    assert found.position(("a", "x", "y")) == found.position(("a",), key=True)
    assert found.position(("x",)) == Position(1, 1)
    assert found.position((0,)) == Position(1, 1)


def test_columns_count_characters_after_wide_and_combining_ones():
    found = document('{"日本": 1, "é": 2}')
    assert found.position(("é",), key=True) == Position(1, 11)


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
def test_all_line_breaks_count(line_break: str):
    found = document(line_break.join(["{", '"a": 1,', '"b": 2', "}"]))
    assert found.position(("b",)) == Position(3, 6)
    assert found.line(3) == '"b": 2'


def test_values_are_those_of_the_json_module():
    text = r'{"s": "\"\\\/\b\f\n\r\té😀", "n": [-0, 1e3, 1.5E-3, 12345678901234567], "w": [true, false, null]}'
    assert document(text).tree == json.loads(text)


# text, the diagnostics as (code, line, column), and the tree that is read all the same (... for none)
NEARLY_JSON = [
    ('{"a": 1,}', [("J013", 1, 8)], {"a": 1}),
    ("[1, 2,\n]", [("J013", 1, 6)], [1, 2]),
    ('{"a": 1 "b": 2}', [("J004", 1, 8)], {"a": 1, "b": 2}),
    ('{"a": 1\n "b": 2\n "c": 3}', [("J004", 1, 8), ("J004", 2, 8)], {"a": 1, "b": 2, "c": 3}),
    ('{"a" 1}', [("J004", 1, 5)], {"a": 1}),
    ("{'a': 'b'}", [("J015", 1, 2)], {"a": "b"}),
    ("{“a”: 1}", [("J015", 1, 2)], {"a": 1}),
    ('{a: True, "b": None}', [("J016", 1, 2)], {"a": True, "b": None}),
    ('{"a": True}', [("J016", 1, 7)], {"a": True}),
    ('// x\n{"a": /* y */ 1} # z', [("J014", 1, 1)], {"a": 1}),
    ('{"a": NaN, "b": -Infinity}', [("J010", 1, 7), ("J010", 1, 17)], {"a": 0, "b": 0}),
    ('{"a": 9223372036854775807}', [], {"a": 2**63 - 1}),
    ('{"a": 9223372036854775808}', [("J011", 1, 7)], {"a": 2**63}),
    ('{"a": -9223372036854775809}', [("J011", 1, 7)], {"a": -(2**63) - 1}),
    ('{"a": 1e999}', [("J011", 1, 7)], {"a": 1.7976931348623157e308}),
    ('{"a": 1e-999}', [("J011", 1, 7)], {"a": 0.0}),
    ('{"a": 0e-999}', [], {"a": 0.0}),
    ('{"a": 010}', [("J012", 1, 7)], {"a": 10}),
    ('{"a": .5, "b": 1., "c": +3}', [("J012", 1, 7), ("J012", 1, 16), ("J012", 1, 25)], {"a": 0.5, "b": 1.0, "c": 3}),
    ('{"a": 1_000}', [("J012", 1, 7)], {"a": 1000}),
    ('{"a": 1, "a": 2}', [("J009", 1, 10)], {"a": 2}),
    ('{"a":\u00a01}', [("J004", 1, 6)], {"a": 1}),
    (r'{"a": "\ud800"}', [("J006", 1, 7)], {"a": "\ufffd"}),
    ("", [("J003", 1, 1)], ...),
    (" \n ", [("J003", 1, 1)], ...),
    ("{", [("J007", 1, 2)], ...),
    ('{"a": [1, 2}', [("J007", 1, 12)], ...),
    ('{"a": [1, 2', [("J007", 1, 12)], ...),
    ('{"a"}', [("J004", 1, 2)], ...),
    ('{"a":}', [("J004", 1, 6)], ...),
    ('{"a"=1}', [("J004", 1, 5)], ...),
    ("[1,,2]", [("J004", 1, 4)], ...),
    ("[,]", [("J004", 1, 2)], ...),
    ("{,}", [("J004", 1, 2)], ...),
    ("{1: 2}", [("J018", 1, 2)], ...),
    ("{} {}", [("J004", 1, 4)], ...),
    ("]", [("J004", 1, 1)], ...),
    ('{"a": "x', [("J005", 1, 7)], ...),
    ('{"a": "x\n"}', [("J005", 1, 7)], ...),
    ('{"a": "x\ty"}', [("J005", 1, 9)], ...),
    (r'{"a": "\q"}', [("J006", 1, 8)], ...),
    (r'{"a": "\u12"}', [("J006", 1, 8)], ...),
    ("/* never closed", [("J014", 1, 1)], ...),
    ('{"a": @}', [("J004", 1, 7)], ...),
]


@pytest.mark.parametrize(("text", "expected", "tree"), NEARLY_JSON)
def test_what_is_not_json_is_said_where_it_stands(text: str, expected: list[tuple[str, int, int]], tree: object):
    result = parse(text, "spec.json")
    assert codes(result) == expected
    assert (... if result.document is None else result.document.tree) == tree
    assert all(d.message and d.file == "spec.json" for d in result.diagnostics)


def test_a_duplicate_key_names_both_places_and_is_known_as_such():
    result = parse('{"p": {"tp": 1,\n"cp": 2,\n"tp": 4}}', "spec.json")
    (found,) = result.diagnostics
    assert (found.code, found.path, found.position) == ("J009", ("p", "tp"), Position(3, 1))
    assert "line 1" in found.message
    assert found.related[0].position == Position(1, 8)
    assert found.is_error
    (found,) = parse('{"tp": 1, "tp": 1}', "spec.json").diagnostics
    assert (found.code, found.severity.value) == ("J009", "warning")
    assert "with the same value" in found.message
    for other in ("true", "1.0", '"1"'):
        assert [one.is_error for one in parse(f'{{"tp": 1, "tp": {other}}}', "spec.json").diagnostics] == [True]
    assert result.document is not None
    assert result.document.duplicates == {("p", "tp")}


def test_values_that_only_stand_in_are_named():
    result = parse('{"a": {"b": [1, NaN]}, "c": 1e999}', "spec.json")
    assert result.document is not None
    assert result.document.invalid == {("a", "b", 1), ("c",)}


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_a_hundred_thousand_brackets_are_one_diagnostic(opening: str):
    result = parse(opening * 100_000, "spec.json")
    assert [d.code for d in result.diagnostics] == ["J008"]
    assert result.document is None


def test_nesting_up_to_the_limit_is_read():
    assert document("[" * 100 + "]" * 100).tree is not None


def test_endless_mistakes_end():
    result = parse("[" + "NaN," * 10_000 + "1]", "spec.json")
    assert len(result.diagnostics) <= 52


def test_many_comments_do_not_exhaust_the_stack():
    result = parse("// x\n" * 50_000 + "{}", "spec.json")
    assert [d.code for d in result.diagnostics] == ["J014"]
    assert result.document is not None
