"""The text of a file, with the way from offsets to lines and columns."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from parcompile.diagnostics import Diagnostic, Path, Position, Related, Severity

_LINE_BREAK = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class SourceText:
    """What a file says, as characters. `bom` tells that the file began with a UTF-8 byte order mark (not in `text`)."""

    file: str
    text: str
    bom: bool = False

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
        start = self._line_starts[line - 1]
        return start + min(position.column - 1, len(self.line(line)))

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
