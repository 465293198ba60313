"""For programs: one JSON object, the whole of the output.

`{"valid", "error_count", "warning_count", "diagnostics": [{"code", "severity", "message", "file", "line", "column",
"path", "help", "fixes"}]}`; `path` is the dotted path, `fixes` hold `{"title", "safety", "edits"}`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TextIO

from parcompile.diagnostics import Diagnostic, Edit, Severity, format_path

from .dispatch import Context


def write(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:  # noqa: ARG001
    """The object, indented, with a line break at its end."""
    errors = sum(1 for found in diagnostics if found.severity is Severity.ERROR)
    summary = {
        "valid": errors == 0,
        "error_count": errors,
        "warning_count": sum(1 for found in diagnostics if found.severity is Severity.WARNING),
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
        "line": found.position.line if found.position else None,
        "column": found.position.column if found.position else None,
        "path": format_path(found.path),
        "help": found.help,
        "fixes": [
            {"title": fix.title, "safety": fix.safety.value, "edits": [_edit(edit) for edit in fix.edits]}
            for fix in found.fixes
        ],
    }


def _edit(edit: Edit) -> dict[str, Any]:
    if edit.remove:
        return {"action": "remove", "path": list(edit.path)}
    if edit.rename_to is not None:
        return {"action": "rename", "path": list(edit.path), "key": edit.rename_to}
    return {"action": "set", "path": list(edit.path), "value": edit.value}
