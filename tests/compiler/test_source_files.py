"""Files as they come: encodings, sizes, suffixes, and those that cannot be read."""

import io
import os
import sys
from pathlib import Path

import pytest

from parcompile.text import MAX_BYTES, SourceError, parse, parse_bytes, read_file


def test_a_byte_order_mark_is_accepted_and_does_not_count_as_a_column(tmp_path: Path):
    file = tmp_path / "spec.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    result = read_file(file)
    assert result.document is not None
    assert result.document.source.bom
    assert result.document.position(()).column == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_wide_encodings_are_named(encoding: str):
    result = parse_bytes('{"version": 1, "name": "x"}'.encode(encoding), "spec.json")
    (found,) = result.diagnostics
    assert found.code == "J001"
    assert encoding[:6].upper() in found.message


def test_a_byte_that_is_not_utf_8_is_said_where_it_stands():
    (found,) = parse_bytes('{\n "é": "è"}'.encode("latin-1"), "spec.json").diagnostics
    assert (found.code, found.position and (found.position.line, found.position.column)) == ("J001", (2, 3))
    assert "0xE9" in found.message


def test_a_compressed_file_is_named():
    (found,) = parse_bytes(b"\x1f\x8b\x08\x00\xff", "spec.json").diagnostics
    assert "gzip" in found.message


def test_a_file_of_fifty_megabytes_is_one_diagnostic(tmp_path: Path):
    file = tmp_path / "spec.json"
    with file.open("wb") as stream:
        stream.truncate(50_000_000)
    (found,) = read_file(file).diagnostics
    assert found.code == "J002"
    assert "50,000,000" in found.message
    assert MAX_BYTES < 50_000_000


def test_files_that_cannot_be_read_raise_with_a_clear_message(tmp_path: Path):
    (tmp_path / "spec.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no such file; did you mean .*spec\.json"):
        read_file(tmp_path / "spce.json")
    with pytest.raises(SourceError, match="no folder"):
        read_file(tmp_path / "none" / "spec.json")
    with pytest.raises(SourceError, match="is a directory"):
        read_file(tmp_path)
    with pytest.raises(SourceError, match="cannot be read"):
        read_file("a\0b")


def test_a_toml_file_is_told_that_it_is_not_read(tmp_path: Path):
    (tmp_path / "llama3.toml").write_text('[model]\nname = "llama3"\n')
    with pytest.raises(SourceError, match=r"llama3\.toml: parcompile reads JSON and YAML, no TOML"):
        read_file(tmp_path / "llama3.toml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_raises(tmp_path: Path):
    file = tmp_path / "spec.json"
    file.write_text("{}")
    file.chmod(0)
    with pytest.raises(SourceError, match="no permission"):
        read_file(file)


def test_a_minus_is_standard_input(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a: 1\n")))
    result = read_file("-")
    assert result.document is not None
    assert (result.document.tree, result.document.file) == ({"a": 1}, "<stdin>")


@pytest.mark.parametrize(
    ("file", "text", "format"),
    [
        ("a.json", "a: 1", None),
        ("a.yaml", '{"a": 1}', "yaml"),
        ("a.yml", "a: 1", "yaml"),
        ("a.conf", '\n {"a": 1}', "json"),
        ("a.conf", "a: 1", "yaml"),
        ("a", "# x\na: 1", "yaml"),
    ],
)
def test_the_format_follows_the_suffix_then_the_text(file: str, text: str, format: str | None):  # noqa: A002
    found = parse(text, file).document
    assert (found and found.format) == format
