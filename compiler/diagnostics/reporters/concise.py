"""One line for each diagnostic, as editors and `grep` like it: `file:line:column: severity[CODE] message (help)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from parcompile.diagnostics import Diagnostic

from .dispatch import Context, printable, writable


def write(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:
    """One line each."""
    style = context.style
    for found in diagnostics:
        where = printable(found.file or "-")
        if found.position is not None:
            where += f":{found.position.line}:{found.position.column}"
        severity = style.severity(found.severity, f"{found.severity.value}[{found.code}]")
        text = " ".join(found.message.split()) + (f" ({' '.join(found.help.split())})" if found.help else "")
        stream.write(writable(stream, f"{where}: {severity} {printable(text)}") + "\n")
