"""Workflow commands of GitHub Actions: annotations at the lines of a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TextIO

from parcompile.diagnostics import Diagnostic, Severity

from .dispatch import Context, printable, writable

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def write(diagnostics: Sequence[Diagnostic], stream: TextIO, context: Context) -> None:  # noqa: ARG001
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
        line = f"::{_COMMANDS[found.severity]} {shown}::{_data(text)}\n"
        stream.write(writable(stream, line))


def _data(text: str) -> str:
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
