"""For programs: JSON, SARIF 2.1.0, JUnit XML, and what GitHub and GitLab show in a pull or merge request.

JSON is one object, the whole of the output:
`{"valid", "error_count", "warning_count", "files": [{"file", "kind"}], "diagnostics": [{"code", "severity", "message",
"file", "line", "column", "end_line", "end_column", "path", "help", "related", "fixes"}]}`; `path` is the dotted path,
`related` hold `{"message", "path"}` with the same places, `fixes` hold `{"title", "safety", "edits"}`. Lines and
columns count from 1; the end lies behind the last character. Where files could not be read, `valid` is false and
`"unreadable"` says why, a text for each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, TextIO
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from parcompile.diagnostics import Diagnostic, Edit, Fix, Position, Related, Severity, format_path
from parcompile.version import __version__

from . import Context, printable, writable

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
PAGES = "https://parcompile.readthedocs.io/en/stable/rules.html"
"""The page that has every code, with its name in small letters as its anchor."""
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def write_sarif(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """The log, indented, with a line break at its end."""
    codes = sorted({found.code for found in diagnostics})
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "parcompile",
                        "semanticVersion": __version__,
                        "rules": [_rule(code, context.titles.get(code)) for code in codes],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "artifacts": [
                    {"location": {"uri": uri(file)}, "properties": {"kind": context.kinds.get(file)}}
                    for file in context.files
                ],
                "results": [
                    _result(found, codes.index(found.code), f"{print_}:{number}")
                    for found, print_, number in _told_apart(diagnostics)
                ],
                **({"invocations": [_failed(context.unreadable)]} if context.unreadable else {}),
            }
        ],
    }
    stream.write(json.dumps(log, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def _failed(messages: Sequence[str]) -> dict[str, Any]:
    told = [{"level": "error", "message": {"text": message}} for message in messages]
    return {"executionSuccessful": False, "toolExecutionNotifications": told}


def _rule(code: str, title: str | None) -> dict[str, Any]:
    text = title or code
    return {
        "id": code,
        "shortDescription": {"text": text},
        "helpUri": f"{PAGES}#{code.lower()}",
        "help": {"text": f"parcompile explain {code}"},
    }


def _told_apart(diagnostics: Sequence[Diagnostic]) -> Iterator[tuple[Diagnostic, str, int]]:
    """Each with its fingerprint and, as several may have the same, with its number among them, from 1."""
    seen: Counter[str] = Counter()
    for found in diagnostics:
        print_ = fingerprint(found)
        seen[print_] += 1
        yield found, print_, seen[print_]


def _result(found: Diagnostic, index: int, print_: str) -> dict[str, Any]:
    text = found.message + (f"\n{found.help}" if found.help else "")
    result: dict[str, Any] = {
        "ruleId": found.code,
        "ruleIndex": index,
        "level": _LEVELS[found.severity],
        "message": {"text": text},
        "partialFingerprints": {"parcompile/v1": print_},
    }
    if found.file is not None:
        result["locations"] = [_location(found.file, found.position, found.end, format_path(found.path))]
        related = [one for one in found.related if one.position is not None]
        if related:
            result["relatedLocations"] = [
                {"id": number, **_location(found.file, one.position, one.end, ""), "message": {"text": one.message}}
                for number, one in enumerate(related, 1)
            ]
        fixes = [_fix(fix, found.file) for fix in found.fixes if fix.replacement is not None]
        if fixes:
            result["fixes"] = fixes
    return result


def _fix(fix: Fix, file: str) -> dict[str, Any]:
    change = fix.replacement
    assert change is not None
    return {
        "description": {"text": f"{fix.title} ({fix.safety.value})"},
        "artifactChanges": [
            {
                "artifactLocation": {"uri": uri(file)},
                "replacements": [
                    {"deletedRegion": _region(change.start, change.end), "insertedContent": {"text": change.text}}
                ],
            }
        ],
    }


def _region(start: Position, end: Position | None) -> dict[str, int]:
    region = {"startLine": start.line, "startColumn": start.column}
    return region if end is None else region | {"endLine": end.line, "endColumn": end.column}


def _location(file: str, position: Position | None, end: Position | None, path: str) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": uri(file)}}
    # Code scanning refuses a result without a region.
    physical["region"] = _region(position or Position(1, 1), end)
    location: dict[str, Any] = {"physicalLocation": physical}
    if path:
        location["logicalLocations"] = [{"fullyQualifiedName": path}]
    return location


def uri(file: str) -> str:
    """A file's name as a URI reference: relative ones stay relative."""
    path = PurePath(file)
    if path.is_absolute():
        return path.as_uri()
    return quote(os.fsencode(path.as_posix()), safe="/")  # a name may be no text


def fingerprint(found: Diagnostic) -> str:
    """Stays the same when the finding moves to another line: code, file and path, not the numbers in the message."""
    identity = "\0".join((found.code, found.file or "", format_path(found.path)))
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def write_json(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """The object, indented, with a line break at its end."""
    errors = sum(1 for found in diagnostics if found.severity is Severity.ERROR)
    summary = {
        "valid": errors == 0 and not context.unreadable,
        "error_count": errors,
        "warning_count": sum(1 for found in diagnostics if found.severity is Severity.WARNING),
        "files": [{"file": file, "kind": context.kinds.get(file)} for file in context.files],
        "diagnostics": [as_json(found) for found in diagnostics],
        **({"unreadable": [*context.unreadable]} if context.unreadable else {}),
    }
    stream.write(json.dumps(summary, indent=2, ensure_ascii=True, allow_nan=False, default=str) + "\n")


def as_json(found: Diagnostic) -> dict[str, Any]:
    """A diagnostic as plain data."""
    return {
        "code": found.code,
        "severity": found.severity.value,
        "message": found.message,
        "file": found.file,
        **_place(found),
        "path": format_path(found.path),
        "help": found.help,
        "related": [{"message": one.message, **_place(one), "path": format_path(one.path)} for one in found.related],
        "fixes": [
            {"title": fix.title, "safety": fix.safety.value, "edits": [_edit(edit) for edit in fix.edits]}
            for fix in found.fixes
        ],
    }


def _place(found: Diagnostic | Related) -> dict[str, int | None]:
    start, end = found.position, found.end
    return {
        "line": start.line if start else None,
        "column": start.column if start else None,
        "end_line": end.line if end else None,
        "end_column": end.column if end else None,
    }


def _edit(edit: Edit) -> dict[str, Any]:
    if edit.remove:
        return {"action": "remove", "path": list(edit.path)}
    if edit.rename_to is not None:
        return {"action": "rename", "path": list(edit.path), "key": edit.rename_to}
    return {"action": "set", "path": list(edit.path), "value": edit.value}


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """The document. Warnings and remarks pass, and stand in the case's output."""
    suites = [(file, [found for found in diagnostics if found.file == file]) for file in context.files]
    loose = [found for found in diagnostics if found.file is None]
    suites += [("-", loose)] if loose else []
    failures = sum(found.severity is Severity.ERROR for found in diagnostics)
    tests, unread = sum(max(1, len(found)) for _, found in suites), len(context.unreadable)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f'<testsuites name="parcompile" tests="{tests + unread}" failures="{failures}" errors="{unread}">')
    for message in context.unreadable:
        lines.append('  <testsuite name="unreadable" tests="1" failures="0" errors="1" skipped="0">')
        error = f"<error message={_attribute(message)}/>"
        lines.append(f'    <testcase classname="unreadable" name={_attribute(message)}>{error}</testcase>')
        lines.append("  </testsuite>")
    for file, found in suites:
        lines += _suite(file, found, context.kinds.get(file))
    lines.append("</testsuites>")
    text = "\n".join(lines) + "\n"
    encoding = str(getattr(stream, "encoding", None) or "utf-8")
    if encoding.lower().replace("-", "") != "utf8":  # the document promises UTF-8
        text = text.encode("ascii", "xmlcharrefreplace").decode("ascii")
    stream.write(text)


def _suite(file: str, found: Sequence[Diagnostic], kind: str | None) -> list[str]:
    failures = sum(one.severity is Severity.ERROR for one in found)
    name = _attribute(file)
    lines = [f'  <testsuite name={name} tests="{max(1, len(found))}" failures="{failures}" errors="0" skipped="0">']
    if kind:
        lines.append(f'    <properties><property name="kind" value={_attribute(kind)}/></properties>')
    if not found:
        lines.append(f'    <testcase classname={name} name="valid"/>')
    for one in found:
        place = f":{one.position.line}:{one.position.column}" if one.position else ""
        lines.append(f"    <testcase classname={name} name={_attribute(f'{one.code} {file}{place}')}>")
        body = f"{file}{place}: {one.message}" + (f"\nhelp: {one.help}" if one.help else "")
        if one.severity is Severity.ERROR:
            lines.append(
                f"      <failure type={_attribute(one.code)} message={_attribute(one.message)}>{_text(body)}</failure>"
            )
        else:
            lines.append(f"      <system-out>{_text(f'{one.severity.value}: {body}')}</system-out>")
        lines.append("    </testcase>")
    lines.append("  </testsuite>")
    return lines


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text), {"\r": "&#13;", "\t": "&#9;"})


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("\ufffd", text))


_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def write_github(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:  # noqa: ARG001
    """One command for each diagnostic; the characters that would end it early are escaped."""
    for found in diagnostics:
        properties = {"file": PurePath(found.file).as_posix()} if found.file else {}
        if found.position is not None:
            properties |= {"line": str(found.position.line), "col": str(found.position.column)}
        if found.end is not None:
            properties |= {"endLine": str(found.end.line), "endColumn": str(found.end.column)}
        properties["title"] = f"parcompile {found.code}"
        shown = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        text = found.message + (f"\n{found.help}" if found.help else "")
        stream.write(writable(stream, f"::{_COMMANDS[found.severity]} {shown}::{_data(text)}\n"))


def _data(text: str) -> str:
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


_SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "minor", Severity.INFO: "info"}


def write_gitlab(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """The list; each entry's fingerprint is its own, as GitLab drops those that repeat."""
    entries = []
    for found, print_, number in _told_apart(diagnostics):
        line = found.position.line if found.position else 1
        last = found.end.line if found.end else line
        entries.append(
            {
                "description": found.message + (f" ({found.help})" if found.help else ""),
                "check_name": found.code,
                "fingerprint": f"{print_}{number:04d}",
                "kind": context.kinds.get(found.file or ""),
                "severity": _SEVERITIES[found.severity],
                "location": {"path": PurePath(found.file or "-").as_posix(), "lines": {"begin": line, "end": last}},
            }
        )
    stream.write(json.dumps(entries, indent=2, ensure_ascii=True) + "\n")
