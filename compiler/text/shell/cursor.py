"""The place in a shell script up to which it was read."""

from __future__ import annotations

import re

_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")


class ShellSyntaxError(Exception):
    """Here stands what this reader does not understand. `searched` characters were gone through for its end."""

    def __init__(self, what: str, searched: int = 0) -> None:
        super().__init__(what)
        self.searched = searched


class Cursor:
    """A text and an offset in it, with the heredocs whose text begins on the next line."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at
        self.began = at
        """Where the statement begins that is read."""
        self.heredocs: list[tuple[str, bool]] = []

    def unclosed(self, mark: str) -> ShellSyntaxError:
        """The error for a bracket or quote without an end: all the rest of the text was searched."""
        return ShellSyntaxError(mark, len(self.text) - min(self.began, len(self.text)))

    def peek(self, text: str) -> bool:
        """Whether this text comes next."""
        return self.text.startswith(text, self.at)

    def blank(self) -> None:
        """Goes past blanks, a continued line and a comment."""
        while True:
            match = _BLANK.match(self.text, self.at)
            if match:
                self.at = match.end()
            if self.at < len(self.text) and self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
                return
            if not match:
                return

    def separators(self) -> None:
        """Goes past everything that parts two commands, and past the heredocs of a line."""
        while True:
            self.blank()
            if self.at < len(self.text) and self.text[self.at] in ";&\n":
                if self.text[self.at] == "\n":
                    self._newline()
                elif self.peek(";;"):
                    return
                else:
                    self.at += 1
            else:
                return

    def separators_of_lines(self) -> None:
        """Goes past blanks and ends of lines."""
        self.blank()
        while self.peek("\n"):
            self._newline()
            self.blank()

    def _newline(self) -> None:
        self.at += 1
        for delimiter, indented in self.heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                row = self.text[self.at : end].rstrip("\r")
                self.at = min(len(self.text), end + 1)
                if (row.lstrip("\t") if indented else row) == delimiter:
                    break
        self.heredocs.clear()
