"""GitLab's code quality report: a JSON list that merge requests show as a widget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import TextIO

from parcompile.diagnostics import Diagnostic, Severity

from .dispatch import Context
from .sarif import fingerprint

_SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "minor", Severity.INFO: "info"}


def write(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """The list; each entry's fingerprint is its own, as GitLab drops those that repeat."""
    seen: dict[str, int] = {}
    entries = []
    for found in diagnostics:
        identity = fingerprint(found)
        seen[identity] = seen.get(identity, 0) + 1
        line = found.position.line if found.position else 1
        last = found.end.line if found.end else line
        entries.append(
            {
                "description": found.message + (f" ({found.help})" if found.help else ""),
                "check_name": found.code,
                "fingerprint": f"{identity}{seen[identity]:04d}",
                "kind": context.kinds.get(found.file or ""),
                "severity": _SEVERITIES[found.severity],
                "location": {"path": PurePath(found.file or "-").as_posix(), "lines": {"begin": line, "end": last}},
            }
        )
    stream.write(json.dumps(entries, indent=2, ensure_ascii=True) + "\n")
