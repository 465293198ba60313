"""For programs: one JSON object, the whole of the output.

`{"valid", "error_count", "warning_count", "files": [{"file", "kind"}], "diagnostics": [{"code", "severity", "message",
"file", "line", "column", "end_line", "end_column", "path", "help", "related", "fixes"}]}`; `path` is the dotted path,
`related` hold `{"message", "path"}` with the same places, `fixes` hold `{"title", "safety", "edits"}`. Lines and
columns count from 1; the end lies behind the last character.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TextIO

from parcompile.diagnostics import Diagnostic, Edit, Related, Severity, format_path

from .dispatch import Context


def write(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """The object, indented, with a line break at its end."""
    errors = sum(1 for found in diagnostics if found.severity is Severity.ERROR)
    summary = {
        "valid": errors == 0,
        "error_count": errors,
        "warning_count": sum(1 for found in diagnostics if found.severity is Severity.WARNING),
        "files": [{"file": file, "kind": context.kinds.get(file)} for file in context.files],
        "diagnostics": [as_json(found) for found in diagnostics],
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
