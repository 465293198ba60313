"""Every format says the same findings in the way that its readers expect."""

import io
import json
import re
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parcompile.diagnostics import Diagnostic, Edit, Fix, Position, Related, Safety, Severity
from parcompile.diagnostics.reporters import FORMATS, Style, report
from parcompile.text import SourceText, parse

SPEC = SourceText("specs/a b.json", '{\n\t"tp": "8",\n  "global_batch_size": 100\n}')
FIX = Fix("write 8", Safety.SAFE, (Edit(("tp",), 8),))
FOUND = [
    Diagnostic(
        "B01",
        Severity.WARNING,
        "100 ≠ 2 × 8: 100 / 16 is not whole",
        ("global_batch_size",),
        SPEC.file,
        Position(3, 24),
        "write 96 or 112",
        related=(Related("the factor", ("tp",), Position(2, 2)),),
    ),
    Diagnostic("K003", Severity.ERROR, 'tp: found text "8"', ("tp",), SPEC.file, Position(2, 8), "write 8", (FIX,)),
    Diagnostic("X001", Severity.INFO, "no place, 100% sure:\nreally", ("a", 0, "b"), SPEC.file),
]


def written(format: str, diagnostics: list[Diagnostic] = FOUND, **options: object) -> str:  # noqa: A002
    stream = io.StringIO()
    report(diagnostics, [SPEC], format, stream, **options)  # type: ignore[arg-type]
    return stream.getvalue()


def test_text_shows_the_line_the_place_the_help_and_related_places():
    assert written("text", FOUND[:2], style=Style()) == (
        'error[K003]: tp: found text "8"\n'
        "  --> specs/a b.json:2:8\n"
        "   |\n"
        ' 2 |     "tp": "8",\n'
        "   |           ^^^\n"
        "  help: write 8\n"
        "\n"
        "warning[B01]: 100 ≠ 2 × 8: 100 / 16 is not whole\n"
        "  --> specs/a b.json:3:24\n"
        "   |\n"
        ' 3 |   "global_batch_size": 100\n'
        "   |                        ^^^\n"
        "  --- specs/a b.json:2:2\n"
        "   |\n"
        ' 2 |     "tp": "8",\n'
        "   |     ---- the factor\n"
        "  help: write 96 or 112\n"
        "\n"
        "1 error, 1 warning\n"
    )


def test_text_counts_what_a_command_can_fix():
    assert written("text", fix_hint="`parcompile check --fix`").endswith(
        "; [*] 1 can be fixed with `parcompile check --fix`\n"
    )


def test_nothing_found_is_nothing_said_to_people():
    assert written("text", []) == written("concise", []) == written("github", []) == ""


@pytest.mark.parametrize("column", [1, 60, 400, 799])
def test_long_lines_are_cut_around_the_place(column: int):
    source = SourceText("x.json", "".join(f'"key{i:04d}",' for i in range(100)))
    found = Diagnostic("K001", Severity.ERROR, "unknown " * 30, ("x",), "x.json", Position(1, column), "why " * 60)
    stream = io.StringIO()
    report([found], [source], "text", stream, style=Style(unicode=True))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    quote, carets = next((lines[i - 1], line) for i, line in enumerate(lines) if "^" in line)
    start, end = carets.index("^"), carets.rindex("^") + 1
    assert quote[start:end] == re.match(r'"[^"]*"|[^",]+|.', source.text[column - 1 :])[0]  # type: ignore[index]


def test_wide_characters_keep_the_carets_in_place():
    source = SourceText("x.json", '{"日本": "é", "a": 1}')
    found = Diagnostic("K001", Severity.ERROR, "x", ("a",), "x.json", Position(1, 13))
    stream = io.StringIO()
    report([found], [source], "text", stream, style=Style())
    carets = next(line for line in stream.getvalue().splitlines() if "^" in line)
    # Two columns for each of 日 and 本: two more than characters.
    assert carets.index("^") == len("   | ") + 12 + 2


def test_control_characters_do_not_reach_the_terminal():
    result = parse('{"a": "\x1b[2J\x07"}', "x.json")
    stream = io.StringIO()
    report(result.diagnostics, [result.source], "text", stream, style=Style())
    assert "\x1b" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_colour_and_frames_only_where_they_can_be_shown(monkeypatch: pytest.MonkeyPatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Style.of(io.StringIO()) == Style(colour=False, unicode=False)
    assert Style.of(Terminal()).colour
    assert Style.of(Terminal()).unicode
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Style.of(Terminal()).colour
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not Style.of(Terminal()).colour
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Style.of(io.StringIO()).colour


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp1252"])
def test_every_format_can_be_written_in_every_encoding(format: str, encoding: str):  # noqa: A002
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    report(FOUND, [SPEC], format, stream)
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert "B01" in text
    if format in ("text", "concise") and encoding == "ascii":
        assert "100 != 2 x 8" in text


def test_concise_is_one_line_each():
    assert written("concise", FOUND[:2]).splitlines() == [
        'specs/a b.json:2:8: error[K003] tp: found text "8" (write 8)',
        "specs/a b.json:3:24: warning[B01] 100 ≠ 2 × 8: 100 / 16 is not whole (write 96 or 112)",
    ]


def test_json_holds_exactly_the_documented_fields():
    tree = json.loads(written("json"))
    assert list(tree) == ["valid", "error_count", "warning_count", "files", "diagnostics"]
    assert (tree["valid"], tree["error_count"], tree["warning_count"]) == (False, 1, 1)
    assert tree["diagnostics"][0] == {
        "code": "K003",
        "severity": "error",
        "message": 'tp: found text "8"',
        "file": "specs/a b.json",
        "line": 2,
        "column": 8,
        "end_line": None,
        "end_column": None,
        "path": "tp",
        "help": "write 8",
        "related": [],
        "fixes": [{"title": "write 8", "safety": "safe", "edits": [{"action": "set", "path": ["tp"], "value": 8}]}],
    }
    assert json.loads(written("json", [])) == {
        "valid": True,
        "error_count": 0,
        "warning_count": 0,
        "files": [{"file": "specs/a b.json", "kind": None}],
        "diagnostics": [],
    }


def test_sarif_has_what_code_scanning_needs():
    log = json.loads(written("sarif", titles={"K003": "wrong type"}))
    assert log["version"] == "2.1.0"
    assert "sarif-schema-2.1.0" in log["$schema"]
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["B01", "K003", "X001"]
    assert rules[1]["shortDescription"]["text"] == "wrong type"
    assert [result["level"] for result in run["results"]] == ["error", "warning", "note"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "specs/a%20b.json"
        assert location["physicalLocation"]["region"]["startLine"] >= 1
    assert run["results"][1]["relatedLocations"][0]["message"]["text"] == "the factor"
    assert run["columnKind"] == "unicodeCodePoints"


def test_fingerprints_follow_the_finding_not_the_line():
    def prints(line: int, message: str) -> list[str]:
        twice = [Diagnostic("K001", Severity.ERROR, message, ("a",), "x.json", Position(line, 1))] * 2
        results = json.loads(written("sarif", twice))["runs"][0]["results"]
        return [result["partialFingerprints"]["parcompile/v1"] for result in results]

    assert prints(1, "4 is not 5") == prints(7, "4 is not 6")
    assert len(set(prints(1, "x"))) == 2


def test_absolute_files_are_uris(tmp_path: Path):
    found = Diagnostic("K001", Severity.ERROR, "x", (), str(tmp_path / "ä b.json"), Position(1, 1))
    log = json.loads(written("sarif", [found]))
    location = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert location.startswith("file:///")
    assert location.endswith("/%C3%A4%20b.json")


def test_github_commands_are_escaped():
    lines = written("github").splitlines()
    assert len(lines) == 3
    assert lines[2] == "::notice file=specs/a b.json,title=parcompile X001::no place, 100%25 sure:%0Areally"
    assert lines[0] == '::error file=specs/a b.json,line=2,col=8,title=parcompile K003::tp: found text "8"%0Awrite 8'
    tricky = Diagnostic("K001", Severity.ERROR, "x", (), "a,b:c.json", Position(1, 1))
    assert written("github", [tricky]).startswith("::error file=a%2Cb%3Ac.json,line=1,")


def test_gitlab_entries_have_their_required_fields_and_unique_fingerprints():
    entries = json.loads(written("gitlab", [*FOUND, *FOUND]))
    assert len({entry["fingerprint"] for entry in entries}) == len(entries) == 6
    for entry in entries:
        assert entry["severity"] in {"info", "minor", "major", "critical", "blocker"}
        assert entry["description"]
        assert entry["check_name"]
        assert entry["location"]["path"] == "specs/a b.json"
        assert entry["location"]["lines"]["begin"] >= 1


def test_junit_has_a_suite_for_each_file_and_counts_failures():
    found = [*FOUND, Diagnostic("K001", Severity.ERROR, "<a> & \x00\x1b", ("x",), "b.json", Position(1, 1))]
    root = ElementTree.fromstring(written("junit", found, files=["specs/a b.json", "b.json", "good.json"]))
    assert root.attrib == {"name": "parcompile", "tests": "5", "failures": "2", "errors": "0"}
    suites = {suite.attrib["name"]: suite for suite in root}
    assert list(suites) == ["specs/a b.json", "b.json", "good.json"]
    assert [suite.attrib["failures"] for suite in suites.values()] == ["1", "1", "0"]
    assert len(suites["good.json"].findall("testcase")) == 1
    failure = suites["b.json"].find("testcase/failure")
    assert failure is not None
    assert failure.attrib["message"] == "<a> & \ufffd\ufffd"


def test_an_unknown_format_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="sarif"):
        written("xml")


@pytest.mark.parametrize("letter", ["x", "日", "e\u0301", "\t"])
@pytest.mark.parametrize("column", [1, 40, 79, 120])
def test_no_line_is_wider_than_the_terminal_and_the_place_is_in_it(letter: str, column: int):
    source = SourceText("x.json", letter * 120)
    found = Diagnostic("K001", Severity.ERROR, "x", (), "x.json", Position(1, column))
    stream = io.StringIO()
    report([found], [source], "text", stream, style=Style(width=80))
    lines = stream.getvalue().splitlines()
    number = next(number for number, line in enumerate(lines) if "^" in line)
    quote, carets = lines[number - 1], lines[number]
    width = sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) == "W" else 1 for c in quote)
    assert width <= 80
    assert len(carets) <= 80


@pytest.mark.parametrize("format_", FORMATS)
def test_errors_come_before_warnings_before_remarks_in_every_format(format_: str) -> None:
    """Each kind in file order, whatever order they were found in."""
    codes = {Severity.INFO: "W005", Severity.WARNING: "Z003", Severity.ERROR: "B001"}
    found = [
        Diagnostic(code=code, severity=severity, message=f"{code} speaks", file="a.json", position=Position(line, 1))
        for line, (severity, code) in enumerate(codes.items(), 1)
    ]
    stream = io.StringIO()
    report(found, [], format_, stream, style=Style())
    said = stream.getvalue()
    places = [said.index(f"{code} speaks") for code in ("B001", "Z003", "W005")]
    assert places == sorted(places)


def test_sarif_carries_the_page_of_each_rule() -> None:
    found = Diagnostic(code="B001", severity=Severity.ERROR, message="no", file="a.json", position=Position(1, 1))
    stream = io.StringIO()
    report([found], [], "sarif", stream)
    (rule,) = json.loads(stream.getvalue())["runs"][0]["tool"]["driver"]["rules"]
    assert rule["helpUri"] == "https://parcompile.readthedocs.io/en/stable/rules.html#b001"
