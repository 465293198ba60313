"""Reads the words of a shell script: plain text, quotes, what the shell puts in their place, and redirections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .syntax import Arithmetic, Cursor, Expansion, Literal, Substitution, Word, WordPart

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


@dataclass(frozen=True, slots=True)
class Piece:
    """Known text. `start` is where it stands in the script; None for text that was computed or read elsewhere.

    `splits` says whether white space in it separates words; `is_quoted` keeps an empty word.
    """

    text: str
    start: int | None
    splits: bool = False
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Hole:
    """Text that the script does not decide, as `$NAME` is written, with the variables that would.

    `can_be_words` says whether several words, or none, may stand there.
    """

    text: str
    names: tuple[str, ...]
    start: int | None
    end: int | None
    can_be_words: bool = False


Part = Piece | Hole
Value = tuple[Part, ...]
"""One string: what a variable holds, or one word of a command."""
Array = tuple[Value, ...]


def known(value: Value) -> str | None:
    """The text, when all of it is known."""
    return "".join(part.text for part in value if isinstance(part, Piece)) if is_known(value) else None


def is_known(value: Value) -> bool:
    """Whether there is no hole in it."""
    return not any(isinstance(part, Hole) for part in value)


def shown(value: Value) -> str:
    """The text, with holes as they are written."""
    return "".join(part.text for part in value)


def missing(value: Value) -> tuple[str, ...]:
    """The variables that decide what is not known."""
    return tuple(dict.fromkeys(name for part in value if isinstance(part, Hole) for name in part.names))


def span(value: Value) -> tuple[int, int] | None:
    """Where the text stands, from the start of its first part to the end of the last that follows it there."""
    start: int | None = None
    end = 0
    for part in value:
        if part.start is None:
            continue
        stop = part.start + len(part.text) if isinstance(part, Piece) else part.end or part.start
        if start is None:
            start, end = part.start, stop
        elif end <= part.start <= end + 2:
            end = stop
    return None if start is None else (start, end)


def fields(parts: Iterable[Part | None]) -> Iterator[Value]:
    """Words out of expanded parts; None stands between two words."""
    current: list[Part] = []
    for part in parts:
        if part is None:
            if current:
                yield tuple(current)
            current = []
        elif isinstance(part, Hole) or not part.splits:
            if part.text or (isinstance(part, Piece) and part.is_quoted):
                current.append(part)
        else:
            yield from _split(part, current)
    if current:
        yield tuple(current)


def _split(part: Piece, current: list[Part]) -> Iterator[Value]:
    """The words that end in a part that white space splits; what is left stays in `current`."""
    at, text = 0, part.text
    while at < len(text):
        if text[at].isspace():
            if current:
                yield tuple(current)
                current.clear()
            at += 1
            continue
        stop = at
        while stop < len(text) and not text[stop].isspace():
            stop += 1
        current.append(Piece(text[at:stop], None if part.start is None else part.start + at))
        at = stop


def unquoted(value: Value) -> Value:
    """A word as the text of commands: white space splits it, and its quotes are taken away."""
    found: list[Part] = []
    quote = ""
    for part in value:
        if isinstance(part, Hole):
            found.append(part)
            continue
        begin = 0
        text = part.text
        for at, character in enumerate(text):
            is_mark = character == quote or (not quote and character in "'\"")
            if is_mark or (character == "\\" and text[at + 1 : at + 2] in "\n\"'"):
                found.append(_cut(part, begin, at, splits=not quote))
                begin = at + 1
                if is_mark:
                    quote = "" if quote else character
        found.append(_cut(part, begin, len(text), splits=not quote))
    return tuple(one for one in found if one.text)


def _cut(part: Piece, start: int, stop: int, *, splits: bool) -> Piece:
    return Piece(part.text[start:stop], None if part.start is None else part.start + start, splits)


def joined(values: Sequence[Value]) -> Value:
    """Several strings as one, with a space between them."""
    found: list[Part] = []
    for value in values:
        if found:
            found.append(Piece(" ", None, splits=True))
        found += value
    return tuple(found)
