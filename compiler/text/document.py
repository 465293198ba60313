"""A parsed file: its values as plain data, its text, and where each key and value stands in it."""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from parcompile.diagnostics import Diagnostic, Path, Position, Related, Severity

# The text of a file, with the way from offsets to lines and columns.

_LINE_BREAK = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class SourceText:
    """What a file says, as characters. `bom` tells that the file began with a UTF-8 byte order mark (not in `text`)."""

    file: str
    text: str
    bom: bool = False

    def __repr__(self) -> str:
        return f"SourceText({self.file!r}, {self.line_count} lines)"

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in _LINE_BREAK.finditer(self.text))]

    @property
    def line_count(self) -> int:
        """How many lines there are; an empty text has one."""
        return len(self._line_starts)

    def position(self, offset: int) -> Position:
        """Line and column, both from 1, of the character at `offset`."""
        offset = min(max(offset, 0), len(self.text))
        line = bisect_right(self._line_starts, offset)
        return Position(line, offset - self._line_starts[line - 1] + 1)

    def offset(self, position: Position) -> int:
        """The way back from `position`; a column past the end of its line gives the line's end."""
        line = min(max(position.line, 1), self.line_count)
        return self._line_starts[line - 1] + min(position.column - 1, len(self.line(line)))

    def line(self, number: int) -> str:
        """Line `number` (from 1) without its line break; "" when there is no such line."""
        if not 1 <= number <= self.line_count:
            return ""
        start = self._line_starts[number - 1]
        end = self._line_starts[number] if number < self.line_count else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def problem(
        self,
        code: str,
        message: str,
        offset: int,
        *,
        path: Path = (),
        advice: str | None = None,
        related: tuple[tuple[str, Path, int], ...] = (),
    ) -> Diagnostic:
        """An error of the text itself at `offset`; `related` holds (message, path, offset) of other places."""
        return Diagnostic(
            code=code,
            severity=Severity.ERROR,
            message=message,
            path=path,
            file=self.file,
            position=self.position(offset),
            help=advice,
            related=tuple(Related(text, where, self.position(at)) for text, where, at in related),
        )


# A parsed file: its values as plain data, and where each key and value stands in the text.


class SourceError(Exception):
    """A file that cannot be read at all: missing, a directory, no permission. The message is for the user."""


class Place(NamedTuple):
    """Where a value stands: character offsets of the value and of its key (-1 when it has none)."""

    start: int
    end: int
    key_start: int
    key_end: int
    children: dict[str, Place] | list[Place] | None
    """Places of the entries, by key or index; None for a scalar."""


@dataclass(frozen=True)
class Document:
    """One file's tree of dict, list, str, int, float, bool and None, and the place of everything in it.

    Paths in `invalid` hold a stand-in for a value that could not be taken as written (NaN, 10**400); those in
    `duplicates` were written more than once, and hold the last value. Both kinds have been reported already.
    """

    source: SourceText
    tree: object
    root: Place = field(repr=False)
    format: str = "json"
    invalid: frozenset[Path] = frozenset()
    duplicates: frozenset[Path] = frozenset()

    @property
    def file(self) -> str:
        """The name under which the file was read."""
        return self.source.file

    @property
    def text(self) -> str:
        """The file's characters, without a byte order mark."""
        return self.source.text

    def place(self, path: Path) -> Place | None:
        """The place of the value at `path`, None when there is no such value."""
        place = self.root
        for step in path:
            child = entry(place.children, step, None)
            if child is None:
                return None
            place = child
        return place

    def span(self, path: Path, *, key: bool = False) -> tuple[int, int]:
        """Start and end offset of the value at `path`, or of its key; of the nearest ancestor that exists otherwise."""
        for length in range(len(path), -1, -1):
            place = self.place(path[:length])
            if place is None:
                continue
            if key and place.key_start >= 0 and length == len(path):
                return place.key_start, place.key_end
            if length < len(path) and place.key_start >= 0:
                return place.key_start, place.key_end
            return place.start, place.end
        raise AssertionError("the root is always there")

    def position(self, path: Path, *, key: bool = False) -> Position:
        """Line and column of the value at `path` (or of its key).

        When the path does not exist: of the key of its nearest ancestor, where a missing entry belongs.
        """
        return self.source.position(self.span(path, key=key)[0])

    def locate(self, diagnostic: Diagnostic, *, key: bool = False) -> Diagnostic:
        """`diagnostic` with the file and the positions of its path and of the places it relates to.

        `key` says that it is about keys rather than values.
        """
        related = [
            one if one.position is not None else replace(one, **self._ends(one.path, key=key))
            for one in diagnostic.related
        ]
        return replace(diagnostic, file=self.file, related=tuple(related), **self._ends(diagnostic.path, key=key))

    def _ends(self, path: Path, *, key: bool) -> dict[str, Any]:
        start, end = self.span(path, key=key)
        return {"position": self.source.position(start), "end": self.source.position(end)}

    def line(self, number: int) -> str:
        """Line `number` (from 1) of the text, without its line break."""
        return self.source.line(number)

    def get(self, path: Path, default: object = None) -> object:
        """The value at `path`, or `default`."""
        value: Any = self.tree
        for step in path:
            value = entry(value, step, _NOTHING)
            if value is _NOTHING:
                return default
        return value


_NOTHING = object()


def entry(container: Any, step: str | int, default: Any) -> Any:
    """Entry `step` of a dict or list; a bool is no index."""
    if isinstance(container, dict) and isinstance(step, str):
        return container.get(step, default)
    if isinstance(container, list) and type(step) is int and -len(container) <= step < len(container):
        return container[step]
    return default


@dataclass(frozen=True)
class Result:
    """What reading a file gave. `document` is None when the text makes no sense; errors may stand beside one."""

    source: SourceText
    document: Document | None
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def why_unread(self) -> str:
        """Where and why the text makes no sense, in one line; empty where it has a document."""
        if self.document is not None or not self.diagnostics:
            return ""
        first = self.diagnostics[0]
        at = f"line {first.position.line}, column {first.position.column}: " if first.position else ""
        return f"{at}{first.message}"


# What the parsers of JSON and YAML have in common: numbers, texts in messages, what they note while they read.

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
MAX_DIGITS = 400
"""Longer numbers are not even converted: that takes time with the square of their length."""
MAX_PROBLEMS = 50
"""After so many mistakes a text is not worth reading on."""
MAX_DEPTH = 100
"""Lists and mappings inside each other; a spec needs 6."""
NO_KEY = (-1, -1)
"""Where the key of a value stands that has none."""


def shown(text: str, limit: int = 40) -> str:
    """`text` fit for a message: one line, printable, not longer than `limit`."""
    flat = "".join(
        character if character.isprintable() else f"\\u{ord(character):04x}" for character in text[: limit + 1]
    )
    return flat if len(text) <= limit else flat[: limit - 1] + "…"


def read_number(literal: str, *, is_integer: bool) -> tuple[int | float, tuple[str, str] | None]:
    """The number that `literal` means and, when it cannot be held exactly enough, (message, advice) and a stand-in."""
    if is_integer:
        if len(literal) <= 18:
            return int(literal), None
        value = int(literal) if len(literal) <= MAX_DIGITS else (INT64_MIN if literal[0] == "-" else INT64_MAX)
        if INT64_MIN <= value <= INT64_MAX and len(literal) <= MAX_DIGITS:
            return value, None
        limit = "-2^63" if literal[0] == "-" else "2^63 - 1"
        return value, (
            f"{shown(literal)} is beyond {limit}, the largest whole number that can be held",
            "write a smaller number",
        )
    number = float(literal)
    if math.isinf(number):
        stand_in = math.copysign(sys.float_info.max, number)
        return stand_in, (
            f"{shown(literal)} is too large for a 64-bit float (at most 1.8e308)",
            "write a smaller number",
        )
    if number == 0.0 and re.search(r"[1-9]", re.split("[eE]", literal)[0]):
        return number, (
            f"{shown(literal)} is too small for a 64-bit float: it would be 0",
            "write 0 or a larger number",
        )
    return number, None


class Fatal(Exception):  # noqa: N818 - control flow inside this package, never seen outside
    """The text cannot be read any further."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


class Reading:
    """What a parser notes while it reads a text: its `problems`, and the path of the value that it is at."""

    too_many = "J004"
    """Code of more mistakes than are worth reading."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.problems: list[Diagnostic] = []
        self.path: list[str | int] = []
        self.invalid: set[Path] = set()
        self.duplicates: set[Path] = set()

    def fatal(self, code: str, message: str, at: int, advice: str | None = None, **more: Any) -> Fatal:
        """The end of the reading, by a mistake at an offset."""
        return Fatal(self.source.problem(code, message, at, advice=advice, **more))

    def report(self, problem: Diagnostic, at: int) -> None:
        """Report, and give the file up when there is no end to it."""
        self.problems.append(problem)
        if len(self.problems) >= MAX_PROBLEMS:
            raise self.fatal(self.too_many, f"more than {MAX_PROBLEMS} mistakes: the rest was not read", at)

    def say(self, code: str, message: str, at: int, advice: str | None = None) -> None:
        """Report a mistake of the text at an offset."""
        self.report(self.source.problem(code, message, at, advice=advice), at)

    def put(self, values: dict[str, object], places: dict[str, Place], key: str, value: object, place: Place) -> None:
        """Puts the value at `path` into its mapping. The same key at two offsets: both places are named."""
        if (first := places.get(key)) is not None:
            path, is_same = tuple(self.path), repr(values[key]) == repr(value)
            line = self.source.position(first.key_start).line
            found = self.source.problem(
                "J009",
                f'the key "{shown(key)}" is written twice here{", with the same value" * is_same}; the first is on '
                f"line {line}",
                place.key_start,
                path=path,
                advice="keep one of the two; most readers silently take the last",
                related=(("the first", path, first.key_start),),
            )
            if not is_same:  # else it says what it says
                self.duplicates.add(path)
            self.report(replace(found, severity=Severity.WARNING) if is_same else found, place.key_start)
        values[key] = value
        places[key] = place

    def result(self, tree: object, root: Place, format: str) -> Result:  # noqa: A002
        """The document, with what was noted."""
        found = Document(self.source, tree, root, format, frozenset(self.invalid), frozenset(self.duplicates))
        return Result(self.source, found, tuple(self.problems))
