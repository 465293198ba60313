"""Chooses a format and writes it to a stream."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from parcompile.diagnostics import Diagnostic, Severity, in_file_order

from .style import Style

FORMATS = ("text", "concise", "json", "sarif", "github", "gitlab", "junit")
"""Names of the formats that `report` knows."""


class QuotedFile(Protocol):
    """A file that diagnostics speak of: `Document` and `SourceText` both are one."""

    @property
    def file(self) -> str:
        """The name that diagnostics carry."""
        ...

    def line(self, number: int) -> str:
        """Line `number`, from 1; "" when there is none."""
        ...


def report(
    diagnostics: Iterable[Diagnostic],
    sources: Iterable[QuotedFile],
    format: str,  # noqa: A002 - the word of the command line
    stream: TextIO,
    *,
    style: Style | None = None,
    files: Iterable[str] | None = None,
    titles: Mapping[str, str] | None = None,
    fix_hint: str | None = None,
    kinds: Mapping[str, str] | None = None,
    folded: bool = False,
) -> None:
    """Write `diagnostics` to `stream` in one of `FORMATS`: errors before warnings before remarks, each in file order.

    Args:
        diagnostics: What was found, in any order.
        sources: The files that were read, for quoting their lines. Files that could not be read may be left out.
        format: The name of the format.
        stream: Where to write.
        style: Colour and characters of the text format; by default what `stream` can show.
        files: Every file that was checked, for formats that also name those without a finding; default: of `sources`.
        titles: Short descriptions of the codes, for formats that carry a table of rules.
        fix_hint: The command that applies safe fixes, for the last line of the text format.
        kinds: What each file is, for the formats that programs read.
        folded: Whether the text format gives each remark one line.

    Raises:
        ValueError: There is no such format.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; there are: {', '.join(FORMATS)}")
    known = {source.file: source for source in sources}
    order = list(Severity)
    found = sorted(in_file_order(diagnostics), key=lambda one: order.index(one.severity))
    checked = list(dict.fromkeys([*(known if files is None else files), *(d.file for d in found if d.file)]))
    writer = importlib.import_module(f"{__package__}.{format}")
    shown = style or Style.of(stream)
    context = Context(known, checked, dict(titles or {}), shown, fix_hint, dict(kinds or {}), folded)
    writer.write(found, stream, context)


@dataclass(frozen=True, slots=True)
class Context:
    """What the formats need beside the diagnostics."""

    sources: Mapping[str, QuotedFile]
    files: list[str]
    titles: Mapping[str, str]
    style: Style
    fix_hint: str | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    folded: bool = False

    def line(self, file: str | None, number: int) -> str | None:
        """The line of a file, None when the file is not at hand."""
        source = self.sources.get(file) if file is not None else None
        return None if source is None else source.line(number)
