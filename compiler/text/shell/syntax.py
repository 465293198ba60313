"""What a shell script consists of, and the place up to which it was read. Positions are offsets in its text."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What a shell script consists of. Positions are offsets in its text.


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stands for itself. Quoted text is neither split into words nor matched as a pattern."""

    text: str
    start: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """`$name`, `${name}`, `${name[index]}`, `${name:-word}` and the like. `operator` is empty for the plain value."""

    name: str
    start: int
    end: int
    quoted: bool
    index: str | None = None
    operator: str = ""
    argument: Word = ()


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$((…))`."""

    expression: str
    start: int
    end: int
    quoted: bool


@dataclass(frozen=True, slots=True)
class Substitution:
    """The output of a command: `$(…)` or backquotes. It is never known."""

    text: str
    start: int
    end: int
    quoted: bool


WordPart = Literal | Expansion | Arithmetic | Substitution
Word = tuple[WordPart, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value` or `name=(…)`."""

    name: str
    value: Word | tuple[Word, ...]
    is_array: bool = False
    append: bool = False
    index: str | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its words. Assignments before it hold for it alone; without words they stay."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    start: int


@dataclass(frozen=True, slots=True)
class AndOr:
    """`left && right` or `left || right`."""

    left: Node
    operator: str
    right: Node


@dataclass(frozen=True, slots=True)
class Branch:
    """A condition and what runs when it holds."""

    condition: Block
    body: Block


@dataclass(frozen=True, slots=True)
class If:
    """`if … elif … else … fi`."""

    branches: tuple[Branch, ...]
    otherwise: Block


@dataclass(frozen=True, slots=True)
class Choice:
    """The patterns of a case and what runs when one of them matches."""

    patterns: tuple[Word, ...]
    body: Block


@dataclass(frozen=True, slots=True)
class Case:
    """`case word in … esac`."""

    word: Word
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class For:
    """`for name in words; do … done`; `words` is None for the C-like form and for one without `in`."""

    name: str
    words: tuple[Word, ...] | None
    body: Block


@dataclass(frozen=True, slots=True)
class While:
    """`while` and `until`."""

    condition: Block
    body: Block


@dataclass(frozen=True, slots=True)
class Group:
    """`{ … }` or `( … )`; `own` variables stay inside."""

    body: Block
    own: bool


@dataclass(frozen=True, slots=True)
class Function:
    """A function, which runs when it is called."""

    name: str
    body: Block


Node = Simple | AndOr | If | Case | For | While | Group | Function
Block = tuple[Node, ...]


# The place in a shell script up to which it was read.

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


MAX_LENGTH = 2**20
"""Characters of one value. Linux starts no program with a word of more than 2**17."""
MAX_WORK = 500_000
"""Parts that are put together, and blocks of 16 characters in them: a second or so. Scripts take a few thousand."""
MAX_MATCHED = 4096
"""Characters of a value that a pattern is taken off: trying every place takes the square of it."""
_BLOCK = 16


class ShellLimitError(Exception):
    """A script asks for more than is followed. The message is meant for the user.

    `start` is where the statement stands that did; None where that is in another file.
    """

    def __init__(self, message: str, start: int | None = None) -> None:
        super().__init__(message)
        self.start = start


@dataclass
class Work:
    """What was done for a script so far."""

    done: int = 0

    def spend(self, length: int) -> None:
        """Counts one part of so many characters.

        Raises:
            ShellLimitError: that is too much.
        """
        self.done += 1 + length // _BLOCK
        if self.done > MAX_WORK:
            raise ShellLimitError(
                f"its loops and expansions take more than {MAX_WORK:,} steps: write the arguments out, or give the "
                "variables with --variable"
            )


def bounded(length: int, name: str) -> int:
    """A length of a value.

    Raises:
        ShellLimitError: it is too long; `name` is what the value is of.
    """
    if length > MAX_LENGTH:
        raise ShellLimitError(f"{name} would have more than {MAX_LENGTH:,} characters")
    return length
