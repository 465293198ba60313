"""JSON tokens with their offsets, and a precise word about everything that is nearly JSON.

What can be understood although it is not JSON (a comment, single quotes, `True`) is reported once and read as it was
meant, so that the rest of the file is still checked.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from json.decoder import (  # type: ignore[attr-defined]  # the type stubs leave scanstring out
    JSONDecodeError,
    scanstring,
)
from typing import NamedTuple

from parcompile.diagnostics import Diagnostic, Path, Severity
from parcompile.units import first_of

from .document import SourceText

# What JSON and YAML have in common: numbers, texts in messages, keys that are written twice.

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
MAX_DIGITS = 400
"""Longer numbers are not even converted: that takes time with the square of their length."""


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


def duplicate_key(
    source: SourceText, key: str, path: Path, first: int, second: int, *, is_same: bool = False
) -> Diagnostic:
    """The same key at two offsets of one object: both places are named. With the same value it is a warning."""
    line = source.position(first).line
    found = source.problem(
        "J009",
        f'the key "{shown(key)}" is written twice here{", with the same value" * is_same}; the first is on line {line}',
        second,
        path=path,
        advice="keep one of the two; most readers silently take the last",
        related=(("the first", path, first),),
    )
    return replace(found, severity=Severity.WARNING) if is_same else found


FILL_IN = "fill in the values, then check the result"


def a_template(words: Iterable[str]) -> str:
    """What is said of words that stand for values: all of them in one finding."""
    names = list(dict.fromkeys(words))
    return f"a template: {first_of(names, 4)} {'stands for a value' if len(names) == 1 else 'stand for values'}"


# JSON tokens.

PUNCTUATION, STRING, NUMBER, WORD, END = "punctuation", "string", "number", "word", "end"

_TOKEN = re.compile(
    r"""[ \t\n\r]*(?:
        (?P<punctuation>[{}\[\],:])
      | (?P<string>"[^"\\\x00-\x1f]*")
      | (?P<number>-?(?:0|[1-9][0-9]*)(?P<fraction>\.[0-9]+)?(?P<exponent>[eE][+-]?[0-9]+)?(?![\w.+\-]))
      | (?P<word>true|false|null)(?![\w.\-])
      | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_KEY = re.compile(r"""[ \t\n\r]*(?P<comma>,)?[ \t\n\r]*(?P<key>"(?P<name>[^"\\\x00-\x1f]*)")[ \t\n\r]*:""")
_SPACE = re.compile(r"[ \t\n\r]*")
_ODD_SPACE = re.compile(r"[\u00a0\u2000-\u200b\u2028\u2029\u202f\u3000\ufeff\x0b\x0c\x85]+")
_COMMENT = re.compile(r"//[^\n\r]*|#[^\n\r]*|/\*.*?\*/", re.DOTALL)
_BARE = re.compile(r"[^\s\"'{}\[\],:]+")
_LINE = re.compile(r"[^\s=;#][^\r\n]*[^\s,;\]}\"'](?=[ \t]*[\r\n])")
"""Text up to the end of its line, which Hjson takes for a string."""
_VALUE_LIKE = re.compile(r"[+-]?\.?[0-9]|[+-]?(?i:true|false|none|null|\.?nan|\.?inf|infinity)\b|//|/\*")
_NUMBER_LIKE = re.compile(r"[+-]?\.?[0-9]")
_PYTHON_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9_]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONSTANTS: dict[str, object] = {"true": True, "false": False, "null": None}
_SPOKEN = {"true", "false", "none", "null", "nan", "inf", "infinity"}
_NOT_A_NUMBER = {"nan", "inf", "infinity", ".nan", ".inf"}
_PLACEHOLDER = re.compile(r"<[\w ./|:-]+>|\$\{[^}\n]*\}|\$[A-Za-z_]\w*|[A-Z][A-Z0-9_]+\w*(?![.])|[A-Z]\w*_[A-Z]\w*")
_QUOTES = {"'": "'", "\u2018": "\u2019", "\u2019": "\u2019", "\u201c": "\u201d", "\u201d": "\u201d", "`": "`"}

MAX_PROBLEMS = 50
"""After so many mistakes a text is not worth reading on."""


class Token(NamedTuple):
    """One token. `valid` is false when `value` only stands in for what was written."""

    kind: str
    value: object
    start: int
    end: int
    valid: bool = True


class Fatal(Exception):  # noqa: N818 - control flow inside this package, never seen outside
    """The text cannot be read any further."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


class Scanner:
    """Hands out the tokens of a text one by one, collecting `problems` on the way."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.text = source.text
        self.offset = 0
        self.problems: list[Diagnostic] = []
        self.placeholders: list[tuple[str, int]] = []
        """Words of a template that stand for values, with their offsets: they are one thing to do, not thirty
        mistakes."""
        self._said: set[str] = set()

    def next(self, *, as_key: bool = False) -> Token:
        """The next token; `as_key` says that a key is expected, where a bare word is read as one."""
        match = _TOKEN.match(self.text, self.offset)
        while match is None:
            token = self._odd(as_key=as_key)
            if token is not None:
                return token
            match = _TOKEN.match(self.text, self.offset)
        self.offset = match.end()
        kind = match.lastgroup
        if kind == "string":
            start = match.start("string")
            value = self.text[start + 1 : self.offset - 1]
            return Token(STRING, value, start, self.offset)
        if kind == "punctuation":
            return Token(PUNCTUATION, self.text[self.offset - 1], self.offset - 1, self.offset)
        if kind == "word":
            return Token(WORD, _CONSTANTS[match["word"]], match.start("word"), self.offset)
        if kind == "end":
            return Token(END, None, self.offset, self.offset)
        return self._number(match["number"], match.start("number"), match["fraction"], match["exponent"])

    def key(self, *, after_comma: bool) -> tuple[str, int, int] | None:
        """A key that stands as it should between its comma and its colon, with its offsets; both are read with it.

        Of anything else nothing is read.
        """
        match = _KEY.match(self.text, self.offset)
        if match is None or (match.start("comma") >= 0) is not after_comma:
            return None
        self.offset = match.end()
        return match["name"], *match.span("key")

    def report(self, diagnostic: Diagnostic) -> None:
        """Report, and give the file up when there is no end to it."""
        self.problems.append(diagnostic)
        if len(self.problems) >= MAX_PROBLEMS:
            message = f"more than {MAX_PROBLEMS} mistakes: the rest was not read"
            raise Fatal(self.source.problem("J004", message, self.offset))

    def say(self, code: str, message: str, at: int, advice: str | None = None) -> None:
        """Report a mistake of the text at an offset."""
        self.report(self.source.problem(code, message, at, advice=advice))

    def once(self, code: str, message: str, at: int, advice: str) -> None:
        """Report only the first of its code: twenty trailing commas are one habit, not twenty mistakes."""
        if code not in self._said:
            self._said.add(code)
            self.say(code, message, at, advice)

    def finish(self) -> None:
        """Reports what is said once, at the end."""
        if self.placeholders:
            message = a_template(shown(word) for word, _ in self.placeholders)
            related = tuple((f"{shown(word)} here", (), offset) for word, offset in self.placeholders[1:20])
            offset = self.placeholders[0][1]
            self.report(self.source.problem("J017", message, offset, advice=FILL_IN, related=related))

    def _number(self, literal: str, start: int, fraction: str | None, exponent: str | None) -> Token:
        value, reason = read_number(literal, is_integer=fraction is None and exponent is None)
        if reason is not None:
            self.say("J011", reason[0], start, reason[1])
        return Token(NUMBER, value, start, start + len(literal), reason is None)

    def _odd(self, *, as_key: bool) -> Token | None:
        """What is not a JSON token: None when it was skipped, a token when it can be read as one."""
        text = self.text
        space = _SPACE.match(text, self.offset)
        start = space.end() if space else self.offset
        character = text[start]
        if odd := _ODD_SPACE.match(text, start):
            self.once("J004", f"U+{ord(character):04X} is not white space in JSON", start, "write an ordinary space")
            self.offset = odd.end()
            return None
        if comment := _COMMENT.match(text, start):
            advice = "remove it, or keep the file as YAML (.yaml), where `# …` is a comment"
            self.once("J014", "JSON has no comments", start, advice)
            self.offset = comment.end()
            return None
        if text.startswith("/*", start):
            raise Fatal(self.source.problem("J014", "this comment is never closed, and JSON has no comments", start))
        if character == '"':
            return self._string(start)
        if character in _QUOTES:
            return self._odd_quotes(start)
        return self._bare(start, as_key=as_key)

    def _string(self, start: int) -> Token:
        try:
            value, end = scanstring(self.text, start + 1, True)
        except JSONDecodeError as error:
            raise Fatal(self._bad_string(start, error)) from None
        self.offset = end
        if _SURROGATE.search(value):
            message = f'"{shown(self.text[start + 1 : end - 1])}" holds half of a surrogate pair, which is no character'
            self.say("J006", message, start, "write the character itself: the file is UTF-8")
            return Token(STRING, _SURROGATE.sub("\ufffd", value), start, end, valid=False)
        return Token(STRING, value, start, end)

    def _bad_string(self, start: int, error: JSONDecodeError) -> Diagnostic:
        at = error.pos
        if "escape" in error.msg:
            at = self.text.rfind("\\", start, at + 1)
            escape = self.text[at : at + (6 if self.text[at + 1 : at + 2] == "u" else 2)]
            return self.source.problem(
                "J006",
                f"{shown(escape)} is not an escape that JSON knows",
                at,
                advice=r"write \\ for a backslash; JSON knows \" \\ \/ \b \f \n \r \t and \uXXXX",
            )
        line_end = re.compile(r"[\r\n]|\Z").search(self.text, start)
        beyond = line_end.start() if line_end else len(self.text)
        if "control character" in error.msg and at < beyond:
            name = "a tab" if self.text[at] == "\t" else f"the control character U+{ord(self.text[at]):04X}"
            write = r"\t" if self.text[at] == "\t" else f"\\u{ord(self.text[at]):04x}"
            return self.source.problem("J005", f"a string cannot hold {name} as it is", at, advice=f"write {write}")
        return self.source.problem(
            "J005",
            f"this string is never closed on its line: {shown(self.text[start:beyond])}",
            start,
            advice='close it with "',
        )

    def _odd_quotes(self, start: int) -> Token:
        quote = self.text[start]
        close = _QUOTES[quote]
        end = start + 1
        while end < len(self.text) and self.text[end] not in (close, "\n", "\r"):
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text) or self.text[end] != close:
            raise Fatal(self.source.problem("J005", "this string is never closed on its line", start, advice='use "…"'))
        value = self.text[start + 1 : end]
        self.once("J015", f"strings need double quotes, not {quote}…{close}", start, f'write "{shown(value)}"')
        self.offset = end + 1
        return Token(STRING, value, start, end + 1)

    def _bare(self, start: int, *, as_key: bool) -> Token:
        placeholder = _PLACEHOLDER.match(self.text, start)
        if not as_key and placeholder is not None and placeholder[0].lower() not in _SPOKEN:
            self.placeholders.append((placeholder[0], start))
            self.offset = placeholder.end()
            return Token(STRING, placeholder[0], start, placeholder.end(), valid=False)
        bare = _BARE.match(self.text, start)
        line = _LINE.match(self.text, start)
        if not as_key and line is not None and not _VALUE_LIKE.match(line[0]):
            self.once("J016", f"text without quotes: {shown(line[0])}", start, f'write "{shown(line[0])}"')
            self.offset = line.end()
            return Token(STRING, line[0], start, line.end())
        if bare is None or not re.match(r"[\w.+\-$]", bare[0]):
            found, values = self.text[start], "a value: a string, a number, true, false, null, { or ["
            known = {"=": "write : between a key and its value", ";": "write , between two entries"}
            advice = known.get(found, f"expected {'a key in double quotes' if as_key else values}")
            raise Fatal(self.source.problem("J004", f"unexpected {shown(found)!r}", start, advice=advice))
        word = bare[0].rstrip(";")
        end = start + len(word)
        self.offset = bare.end()
        if as_key:
            self.once("J016", f"the key {shown(word)} is not in quotes", start, f'write "{shown(word)}"')
            return Token(STRING, word, start, end)
        if word.lower() in ("true", "false", "none", "null"):
            right = "null" if word.lower() in ("none", "null") else word.lower()
            self.once("J016", f"{word} is written {right} in JSON", start, f"write {right}")
            return Token(WORD, _CONSTANTS[right], start, end)
        if word.lstrip("+-").lower() in _NOT_A_NUMBER:
            self.say("J010", f"{word} is not a number that can be used here", start, "write a finite number")
            return Token(NUMBER, 0, start, end, valid=False)
        if _NUMBER_LIKE.match(word):
            return self._bad_number(word, start, end)
        self.say("J016", f"{shown(word)} is not a value", start, f'text stands in quotes: "{shown(word)}"')
        return Token(STRING, word, start, end, valid=False)

    def _bad_number(self, word: str, start: int, end: int) -> Token:
        value: int | float = 0
        advice = "write digits, with a point or an exponent if needed: 8, 0.1, 3e-4"
        if _PYTHON_NUMBER.fullmatch(word) and len(word) < MAX_DIGITS:
            plain = word.replace("_", "")
            value = float(plain) if re.search(r"[.eE]", plain) else int(plain)
            if isinstance(value, float) and not math.isfinite(value):
                value = sys.float_info.max
            advice = f"write {value!r}"
        self.say("J012", f"{shown(word)} is not how a number is written in JSON", start, advice)
        return Token(NUMBER, value, start, end, valid=False)
