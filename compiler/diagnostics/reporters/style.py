"""What a stream can show: colour, characters, width."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from dataclasses import dataclass
from typing import TextIO

from parcompile.diagnostics import Severity

_COLOURS = {Severity.ERROR: "1;31", Severity.WARNING: "1;33", Severity.INFO: "1;36"}


@dataclass(frozen=True, slots=True)
class Style:
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
        width = max(40, min(shutil.get_terminal_size((80, 24)).columns, 120)) if terminal else 80
        return cls(colour, terminal and _encodes(stream, "│╭─·…×≠"), width)

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


_PLAIN = {
    "×": "x",
    "·": "*",
    "≠": "!=",
    "≤": "<=",
    "≥": ">=",
    "−": "-",
    "–": "-",
    "…": "...",
    "→": "->",
    "²": "^2",
    "│": "|",
}
