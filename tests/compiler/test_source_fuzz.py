"""Whatever the text: no exception, and every place lies in the file."""

import json
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parcompile.text import Place, Result, parse, parse_bytes

WORDS = [
    "true",
    "nul",
    "NaN",
    "1e999",
    '"a"',
    '"a": ',
    "- ",
    "a: ",
    "<<: ",
    "&x ",
    "*x",
    "---\n",
    "...",
    "!!str ",
    "  ",
]
ODD = ["\u00a0", "\u2028", "\ud800", "\x00", "é", "😀", "\ufeff", "/*", "*/", "//"]
PIECES = st.sampled_from([*"{}[]:,\"'\\/#*-+.&!|>%@`~?=\t\n\r 019ae", *WORDS, *ODD])
TEXTS = st.one_of(st.lists(PIECES, max_size=40).map("".join), st.text(max_size=60))
TREES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(string.printable, max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)
many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(result: Result) -> None:
    assert result.document is not None or result.diagnostics
    for found in result.diagnostics:
        places = [found.position, *(related.position for related in found.related)]
        for place in places:
            assert place is not None
            assert 1 <= place.line <= result.source.line_count
            assert 1 <= place.column <= len(result.source.line(place.line)) + 2


@many
@given(TEXTS, st.sampled_from(["json", "yaml"]))
def test_any_text_gives_a_document_or_a_diagnostic(text: str, format: str):  # noqa: A002
    check(parse(text, "spec", format))


@many
@given(st.binary(max_size=80), st.sampled_from(["a.json", "a.yaml", "a"]))
def test_any_bytes_give_a_document_or_a_diagnostic(content: bytes, file: str):
    check(parse_bytes(content, file))


def same_shape(value: object, place: Place, text: str) -> None:
    assert 0 <= place.start < place.end <= len(text)
    if isinstance(value, dict):
        assert isinstance(place.children, dict)
        assert list(place.children) == list(value)
        for key, inner in value.items():
            child = place.children[key]
            assert json.loads(text[child.key_start : child.key_end]) == key
            same_shape(inner, child, text)
    elif isinstance(value, list):
        assert isinstance(place.children, list)
        for inner, child in zip(value, place.children, strict=True):
            same_shape(inner, child, text)
    else:
        assert json.loads(text[place.start : place.end]) == value


@many
@given(TREES, st.sampled_from([None, 1]), st.booleans())
def test_json_is_read_as_it_was_written_and_each_place_holds_its_value(tree: Any, indent: int | None, ascii_only: bool):
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_only)
    result = parse(text, "spec.json")
    assert result.diagnostics == ()
    assert result.document is not None
    assert result.document.tree == tree
    same_shape(tree, result.document.root, text)


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_a_truncated_document_is_one_fatal_diagnostic(cut: int):
    text = '{"version": 1, "model": {"preset": "llama"}, "list": [1, 2, 3]}'
    result = parse(text[:cut], "spec.json")
    assert result.document is None
    check(result)
