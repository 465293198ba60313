"""YAML with places: YAML 1.2's values, and a word where YAML 1.1 would read others."""

import pytest

from parcompile.diagnostics import Position
from parcompile.text import Document, Result, parse


def codes(result: Result) -> list[tuple[str, int, int]]:
    return [(d.code, d.position.line, d.position.column) for d in result.diagnostics if d.position]


def document(text: str) -> Document:
    result = parse(text, "spec.yaml")
    assert result.diagnostics == ()
    assert result.document is not None
    return result.document


def test_every_value_and_key_has_its_line_and_column():
    found = document("a:\n  b: [1, x]\n  # why\n  'c': 2\nd: {e: 3}\n")
    assert found.tree == {"a": {"b": [1, "x"], "c": 2}, "d": {"e": 3}}
    assert found.position(("a", "b", 1)) == Position(2, 10)
    assert found.position(("a", "c"), key=True) == Position(4, 3)
    assert found.position(("d", "e")) == Position(5, 8)
    assert found.format == "yaml"


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-12", -12),
        ("+7", 7),
        ("0x10", 16),
        ("0o17", 15),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("12:30:45", "12:30:45"),
        ("2020-01-01", "2020-01-01"),
        ("'8'", "8"),
        ('"8"', "8"),
        ("!!str 8", "8"),
        ('!!int "8"', 8),
        ("tp-cp", "tp-cp"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(scalar: str, value: object):
    found = document(f"a: {scalar}\n").tree
    assert found == {"a": value}
    assert type(found["a"]) is type(value)  # type: ignore[index]


def test_digits_may_be_grouped_as_in_yaml_1_1():
    assert document("a: 1_000\nb: -2_000.5\nc: 1_a\n").tree == {"a": 1000, "b": -2000.5, "c": "1_a"}


NEARLY = [
    ("a: 010\n", [("J012", 1, 4)]),
    ("a: 0_10\n", [("J012", 1, 4)]),
    ("a: .nan\nb: -.inf\n", [("J010", 1, 4), ("J010", 2, 4)]),
    ("a: 99999999999999999999\n", [("J011", 1, 4)]),
    ("a: 0xffffffffffffffffff\n", [("J011", 1, 4)]),
    ("1: x\n", [("J018", 1, 1)]),
    ("a: 1\na: 2\n", [("J009", 2, 1)]),
    ("a: !!int x\n", [("J023", 1, 4)]),
]


@pytest.mark.parametrize(("text", "expected"), NEARLY)
def test_what_is_understood_all_the_same_comes_with_a_document(text: str, expected: list[tuple[str, int, int]]):
    result = parse(text, "spec.yaml")
    assert codes(result) == expected
    assert result.document is not None


BROKEN = [
    ("a:\n\t- b\n", "J021", 2, 1),
    ("\ta: 1\n", "J021", 1, 1),
    ("a: [1, 2\n", "J020", 1, 9),
    ('a: "x\n', "J005", 1, 4),
    ('a: "\\q"\n', "J006", 1, 5),
    ("a: b: c\n", "J020", 1, 5),
    ("- a\nb: 1\n", "J020", 2, 1),
    ("a: @x\n", "J020", 1, 4),
    ("a:\n  b: 1\n c: 2\n", "J020", 3, 2),
    ("a: 1\n---\nb: 2\n", "J024", 2, 1),
    ("a: *x\n", "J023", 1, 4),
    ("a: &x [*x]\n", "J022", 1, 8),
    ("a: !!python/object/apply:os.system [ls]\n", "J023", 1, 4),
    ("a: !custom 1\n", "J023", 1, 4),
    ("? [a]\n: b\n", "J018", 1, 3),
    ("", "J003", 1, 1),
    ("# nothing\n", "J003", 1, 1),
    ("a: \x01\n", "J005", 1, 4),
]


@pytest.mark.parametrize(("text", "code", "line", "column"), BROKEN)
def test_what_is_not_yaml_is_said_where_it_stands(text: str, code: str, line: int, column: int):
    result = parse(text, "spec.yaml")
    assert result.document is None
    assert codes(result) == [(code, line, column)]


def test_anchors_aliases_and_merges_are_followed():
    text = "base: &b {x: 1, y: [2]}\nother:\n  <<: *b\n  x: 5\nagain: *b\n"
    found = document(text)
    assert found.tree == {"base": {"x": 1, "y": [2]}, "other": {"x": 5, "y": [2]}, "again": {"x": 1, "y": [2]}}
    assert found.position(("other", "y")) == found.position(("base", "y"))
    assert found.position(("again",)) == Position(5, 8)


def test_a_bomb_of_aliases_is_one_diagnostic():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    result = parse("\n".join(lines), "spec.yaml")
    assert [d.code for d in result.diagnostics] == ["J022"]
    assert result.document is None


def test_a_hundred_thousand_brackets_are_one_diagnostic():
    result = parse("[" * 100_000, "spec.yaml")
    assert [d.code for d in result.diagnostics] == ["J008"]


def test_messages_do_not_depend_on_the_c_library(monkeypatch: pytest.MonkeyPatch):
    import yaml

    with_library = [codes(parse(text, "spec.yaml")) for text, _ in NEARLY]
    broken = [(parse(text, "spec.yaml").diagnostics[0].code, line) for text, _, line, _ in BROKEN]
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert [codes(parse(text, "spec.yaml")) for text, _ in NEARLY] == with_library
    pure = [parse(text, "spec.yaml").diagnostics[0] for text, _, _, _ in BROKEN]
    assert [(d.code, line) for d, (_, _, line, _) in zip(pure, BROKEN, strict=True)] == broken
