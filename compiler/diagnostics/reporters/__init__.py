"""Diagnostics to people and machines: one function per format, chosen by `report`.

`Style` says what the stream that it writes to can show: colour, characters, width.
"""

from __future__ import annotations

import importlib
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TextIO

from parcompile.diagnostics import Diagnostic, Severity, in_file_order
from parcompile.user_files import shipped

_COLOURS = {Severity.ERROR: "1;31", Severity.WARNING: "1;33", Severity.INFO: "1;36"}


class Style(NamedTuple):
    """How text is shown. `width` is in columns."""

    colour: bool = False
    unicode: bool = False
    width: int = 80

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """What `stream` can show. NO_COLOR and TERM=dumb switch colour off, FORCE_COLOR switches it on."""
        try:
            terminal = stream.isatty()
        except (AttributeError, ValueError):
            terminal = False
        colour = terminal and os.environ.get("TERM") != "dumb"
        if os.environ.get("FORCE_COLOR"):
            colour = True
        if os.environ.get("NO_COLOR"):
            colour = False
        if not terminal:
            return cls(colour)
        import shutil  # and with it archives of three kinds

        width = max(40, min(shutil.get_terminal_size((80, 24)).columns, 120))
        return cls(colour, _encodes(stream, "│╭─·…×≠"), width)

    def paint(self, text: str, colour: str) -> str:
        """`text` in a colour given as an SGR code such as "1;31"."""
        return f"\x1b[{colour}m{text}\x1b[0m" if self.colour and text else text

    def severity(self, severity: Severity, text: str) -> str:
        """`text` in the colour of a severity."""
        return self.paint(text, _COLOURS[severity])

    def strong(self, text: str) -> str:
        """`text` in bold."""
        return self.paint(text, "1")

    def quiet(self, text: str) -> str:
        """`text` as a frame or margin."""
        return self.paint(text, "1;34")


def _encodes(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def printable(text: str) -> str:
    """`text` with every character that would move a terminal's cursor, or speak to it, as its escape in JSON.

    The colours of `Style` stay: no other colours or effects do.
    """
    parts = _PAINT.split(text)
    parts[::2] = [_ODD.sub(_escaped, part) for part in parts[::2]]
    return "".join(parts)


_PAINT = re.compile(r"(\x1b\[(?:0|1(?:;3[1346])?)m)")
_ODD = re.compile(r"[^\n\x20-\x7e]+")


def _escaped(found: re.Match[str]) -> str:
    return "".join(one if one.isprintable() else _escape(one) for one in found[0])


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def hanging(label: str, text: str, width: int) -> str:
    """`text` behind `label`, wrapped to `width` columns; further lines start below the first word."""
    return label + f"\n{' ' * len(label)}".join(wrapped(text, max(width - len(label), 24)))


def wrapped(text: str, width: int) -> list[str]:
    """The lines of `text`, at least one, wrapped between words to `width` columns. A number stays with its unit."""
    kept = re.sub(r"(?<=\d) (?=(?:[KMG]iB|B|ms|us|s|%)\b|%)", "\u00a0", text)
    lines = textwrap.wrap(kept, width, break_long_words=False, break_on_hyphens=False) or [""]
    return [line.replace("\u00a0", " ") for line in lines]


def writable(stream: TextIO, text: str) -> str:
    """`text` with what the stream's encoding cannot hold written plainly: × as x, ≠ as !=, others as escapes."""
    encoding = getattr(stream, "encoding", None)
    if not encoding:
        return text.encode("utf-8", "replace").decode()
    try:
        text.encode(encoding)
    except LookupError:
        return text
    except UnicodeError:
        for character, plain in _PLAIN.items():
            text = text.replace(character, plain)
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


_PLAIN: Mapping[str, str] = shipped("parcompile.diagnostics", "plain.json")


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
    unreadable: Sequence[str] = (),
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
        unreadable: What is wrong with files that could not be read, for the formats that programs read.

    Raises:
        ValueError: There is no such format.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; there are: {', '.join(FORMATS)}")
    known = {source.file: source for source in sources}
    order = list(Severity)
    found = sorted(in_file_order(diagnostics), key=lambda one: order.index(one.severity))
    checked = list(dict.fromkeys([*(known if files is None else files), *(d.file for d in found if d.file)]))
    home = "text" if format in ("text", "concise") else "programs"
    write = getattr(importlib.import_module(f"{__package__}.{home}"), f"write_{format}")
    shown = style or Style.of(stream)
    context = Context(known, checked, dict(titles or {}), shown, fix_hint, dict(kinds or {}), folded, unreadable)
    write(found, stream, context)


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
    unreadable: Sequence[str] = ()

    def line(self, file: str | None, number: int) -> str | None:
        """The line of a file, None when the file is not at hand."""
        source = self.sources.get(file) if file is not None else None
        return None if source is None else source.line(number)
