"""The words of a shell script: what they consist of, and how they are read. Positions are offsets in its text.

Words are plain text, quotes, and what the shell puts in their place; redirections are gone past.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What a word consists of.


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


# How much of a script is followed.

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


# Words.

_PLAIN = re.compile(r"""[^\s\\'"$`;&|<>()#]+|#""")
_NAME = re.compile(r"[A-Za-z_]\w*")
_IN_QUOTES = re.compile(r"""[^"\\$`]+""")
_IN_BRACES = re.compile(r"""[^}$"'`\\]+"""), re.compile(r"""[^}$"'`\\]+|'""")
"""Plain text behind the operator of `${name…}`, and of one in double quotes, in which ' is a character as any other."""
_LINE_END = re.compile(r"\r?\n")
_NAMED = re.compile(r"([#!]?)(\w+|[@*])")
_OPERATOR = re.compile(r":[-=+?]?|%%?|##?|//?|\^\^?|,,?|[-=+?@]")
"""Of `${name…}`."""

_HEREDOC = re.compile(r"""<<(-?)[ \t]*(?:'([^'\n]+)'|"([^"\n]+)"|\\?([\w.-]+))""")
_REDIRECT = re.compile(r"\d*(?:&>>|&>|>>|>&|<&|<<<|>\||<>|>|<)")


class WordReader(Cursor):
    """Reads words where it stands."""

    def redirects(self) -> None:
        """Goes past redirections, and remembers the heredocs that begin with them."""
        while True:
            self.blank()
            if (match := _HEREDOC.match(self.text, self.at)) and not self.peek("<<<"):
                self.heredocs.append((match[2] or match[3] or match[4], bool(match[1])))
                self.at = match.end()
                continue
            match = _REDIRECT.match(self.text, self.at)
            if not match:
                return
            self.at = match.end()
            self.blank()
            if not self.peek("("):
                self.word()
            else:
                self._balanced()

    def word(self) -> Word:
        """One word, empty where none begins here."""
        return tuple(self._parts(_PLAIN, "", quoted=False))

    def _parts(self, plain: re.Pattern[str], end: str, *, quoted: bool) -> list[WordPart]:
        """The parts up to the character `end`; where it is empty, up to what no word holds."""
        parts: list[WordPart] = []
        text = self.text
        while self.at < len(text):
            here = text[self.at]
            if here == end:
                self.at += 1
                return parts
            if match := plain.match(text, self.at):
                if match[0] == "#" and not parts and not end:
                    break
                parts.append(Literal(match[0], self.at, quoted))
                self.at = match.end()
            elif here == "\\":
                parts += self._escaped(end)
            elif here == "'":
                parts.append(self._in_single_quotes(self.at + 1))
            elif here == '"':
                parts += self._in_double_quotes()
            elif here == "$":
                parts.append(self._dollar(quoted=quoted))
            elif here == "`":
                parts.append(self._backquotes(quoted=quoted))
            elif here in "<>" and text.startswith("(", self.at + 1):
                start = self.at
                self.at += 1
                self._balanced()
                parts.append(Substitution(text[start : self.at], start, self.at, quoted=False))
            else:
                break
        if end:
            raise self.unclosed(end)
        return parts

    def _escaped(self, end: str) -> list[Literal]:
        """What a backslash makes of the next character: a line goes on, or the character stands for itself."""
        start, following = self.at, self.text[self.at + 1 : self.at + 2]
        if end != "}" and (line := _LINE_END.match(self.text, start + 1)):
            self.at = line.end()
            return []
        self.at += 2
        if end == '"' and following not in '"$`\\':
            return [Literal("\\" + following, start, quoted=True)]
        return [Literal(following, start + 1, quoted=True)]

    def _in_double_quotes(self) -> list[WordPart]:
        self.at += 1
        return self._parts(_IN_QUOTES, '"', quoted=True) or [Literal("", self.at - 1, quoted=True)]

    def _in_single_quotes(self, start: int) -> Literal:
        end = self.text.find("'", start)
        if end < 0:
            raise self.unclosed("'")
        self.at = end + 1
        return Literal(self.text[start:end], start, quoted=True)

    def _dollar(self, *, quoted: bool) -> WordPart:
        start, text = self.at, self.text
        if text.startswith("$((", start):
            end = self._end_of_arithmetic(start + 3)
            self.at = end + 2
            return Arithmetic(text[start + 3 : end], start, self.at, quoted)
        if text.startswith("$(", start):
            self.at += 1
            self._balanced()
            return Substitution(text[start : self.at], start, self.at, quoted)
        if text.startswith("${", start):
            self.at += 2
            return self._braces(start, quoted=quoted)
        if text.startswith("$'", start) and not quoted:
            return self._in_single_quotes(start + 2)
        match = _NAME.match(text, start + 1)
        if match:
            self.at = match.end()
            return Expansion(match[0], start, self.at, quoted)
        if text[start + 1 : start + 2] and text[start + 1] in "@*#?$!-0123456789":
            self.at += 2
            return Expansion(text[start + 1], start, self.at, quoted)
        self.at += 1
        return Literal("$", start, quoted)

    def _end_of_arithmetic(self, start: int) -> int:
        depth, at = 0, start
        while at < len(self.text):
            here = self.text[at]
            if here == "(":
                depth += 1
            elif here == ")":
                if depth == 0 and self.text.startswith("))", at):
                    return at
                depth -= 1
            at += 1
        raise self.unclosed("))")

    def _braces(self, start: int, *, quoted: bool) -> WordPart:
        text = self.text
        if match := _NAMED.match(text, self.at):
            name, index, self.at = match[2], None, match.end()
            if self.peek("["):
                end = text.find("]", self.at)
                if end < 0:
                    raise self.unclosed("]")
                index, self.at = text[self.at + 1 : end], end + 1
            if not match[1] and self.peek("}"):
                self.at += 1
                return Expansion(name, start, self.at, quoted, index)
            if not match[1] and (operator := _OPERATOR.match(text, self.at)):
                self.at = operator.end()
                argument = tuple(self._parts(_IN_BRACES[quoted], "}", quoted=quoted))
                return Expansion(name, start, self.at, quoted, index, operator[0], argument)
        self._to_closing_brace()
        return Substitution(text[start : self.at], start, self.at, quoted)

    def _to_closing_brace(self) -> None:
        depth = 1
        while self.at < len(self.text):
            here = self.text[self.at]
            self.at += 1
            depth += (here == "{") - (here == "}")
            if depth == 0:
                return
        raise self.unclosed("}")

    def _backquotes(self, *, quoted: bool) -> WordPart:
        start = self.at
        end = self.text.find("`", start + 1)
        while end > 0 and self.text[end - 1] == "\\":
            end = self.text.find("`", end + 1)
        if end < 0:
            raise self.unclosed("`")
        self.at = end + 1
        return Substitution(self.text[start : self.at], start, self.at, quoted)

    def _balanced(self) -> None:
        """Goes past the round bracket that closes the one here, over quotes and comments."""
        depth = 0
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "\\":
                self.at += 2
                continue
            if here in "'\"":
                end = self.at + 1
                while end < len(self.text) and self.text[end] != here:
                    end += 2 if here == '"' and self.text[end] == "\\" else 1
                self.at = end + 1
                continue
            self.at += 1
            depth += (here == "(") - (here == ")")
            if depth == 0:
                return
        raise self.unclosed(")")
