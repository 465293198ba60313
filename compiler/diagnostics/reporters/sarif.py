"""SARIF 2.1.0 for code scanning: one run, one result for each diagnostic, with its rule, place and fixes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, TextIO
from urllib.parse import quote

from parcompile.diagnostics import Diagnostic, Fix, Position, Severity, format_path
from parcompile.version import __version__

from .dispatch import Context

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
PAGES = "https://parcompile.readthedocs.io/en/stable/rules.html"
"""The page that has every code, with its name in small letters as its anchor."""
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def write(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
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
                "results": _results(diagnostics, codes),
            }
        ],
    }
    stream.write(json.dumps(log, indent=2, ensure_ascii=True, allow_nan=False) + "\n")


def _rule(code: str, title: str | None) -> dict[str, Any]:
    text = title or code
    return {
        "id": code,
        "shortDescription": {"text": text},
        "helpUri": f"{PAGES}#{code.lower()}",
        "help": {"text": f"parcompile explain {code}"},
    }


def _results(diagnostics: Sequence[Diagnostic], codes: list[str]) -> list[dict[str, Any]]:
    seen: dict[str, int] = {}
    results = []
    for found in diagnostics:
        print_ = fingerprint(found)
        seen[print_] = seen.get(print_, 0) + 1
        results.append(_result(found, codes.index(found.code), f"{print_}:{seen[print_]}"))
    return results


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
