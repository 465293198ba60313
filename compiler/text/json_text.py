"""JSON text to a `Document`, with a precise word about everything that is nearly JSON.

What can be understood although it is not JSON (a comment, single quotes, `True`) is reported once and read as it was
meant, so that the rest of the file is still checked.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from json.decoder import (  # type: ignore[attr-defined]  # the type stubs leave scanstring out
    JSONDecodeError,
    scanstring,
)
from typing import Any, NamedTuple

from parcompile.diagnostics import Diagnostic, Path
from parcompile.units import first_of

from .document import MAX_DEPTH, MAX_DIGITS, NO_KEY, Fatal, Place, Reading, Result, SourceText, read_number, shown

FILL_IN = "fill in the values, then check the result"


def a_template(words: Iterable[str]) -> str:
    """What is said of words that stand for values: all of them in one finding."""
    names = list(dict.fromkeys(words))
    return f"a template: {first_of(names, 4)} {'stands for a value' if len(names) == 1 else 'stand for values'}"


# JSON tokens.

STRING, NUMBER, WORD, END = "string", "number", "word", "end"
_SCALARS = (STRING, NUMBER, WORD)

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


class Token(NamedTuple):
    """One token; the kind of punctuation is the character. `valid` is false when `value` only stands in for another."""

    kind: str
    value: object
    start: int
    end: int
    valid: bool = True


class Scanner(Reading):
    """Hands out the tokens of a text one by one, collecting `problems` on the way."""

    def __init__(self, source: SourceText) -> None:
        super().__init__(source)
        self.text = source.text
        self.offset = 0
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
            mark = self.text[self.offset - 1]
            return Token(mark, mark, self.offset - 1, self.offset)
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

    def report(self, problem: Diagnostic, at: int) -> None:  # noqa: ARG002 -- it is given up where it is read
        """Report, and give the file up when there is no end to it."""
        super().report(problem, self.offset)

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
            self.report(self.source.problem("J017", message, offset, advice=FILL_IN, related=related), offset)

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
            raise self.fatal("J014", "this comment is never closed, and JSON has no comments", start)
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
            raise self.fatal("J005", "this string is never closed on its line", start, 'use "…"')
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
            raise self.fatal("J004", f"unexpected {shown(found)!r}", start, advice)
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


# The tree.


@dataclass(slots=True)
class _Open:
    """An object or list that is being read, with the key and its offsets that an object's entry has."""

    start: int
    path: Path
    is_object: bool
    key: tuple[str, int, int] | None = None

    @property
    def closing(self) -> str:
        return "}" if self.is_object else "]"

    @property
    def name(self) -> str:
        return "object" if self.is_object else "list"


class _Parser(Scanner):
    """Builds the tree and the places from tokens."""

    def parse(self) -> Result:
        token = self.next()
        if token.kind == END:
            raise self.fatal("J003", "the file is empty", 0, "a spec starts with {")
        tree, root = self._value(token, None, NO_KEY)
        token = self.next()
        if token.kind != END:
            message = f"found {shown(self.text[token.start : token.end])} after the end of the document"
            raise self.fatal("J004", message, token.start, "remove it: a file holds one document")
        self.finish()
        return self.result(tree, root, "json")

    def _value(self, token: Token, holder: _Open | None, key: tuple[int, int]) -> tuple[object, Place]:
        """The value that begins with `token`; `key` is where its key stands in `holder`."""
        if token.kind in ("{", "["):
            return self._collection(token, key)
        if token.kind not in _SCALARS:
            raise self._no_value(token, holder)
        if not token.valid:
            self.invalid.add(tuple(self.path))
        return token.value, Place(token.start, token.end, *key, None)

    def _collection(self, opening: Token, key: tuple[int, int]) -> tuple[object, Place]:
        if len(self.path) >= MAX_DEPTH:
            raise self.fatal("J008", f"more than {MAX_DEPTH} brackets inside each other", opening.start, "nest less")
        here = _Open(opening.start, tuple(self.path), opening.value == "{")
        values: Any = {} if here.is_object else []
        places: Any = {} if here.is_object else []
        token = self._first_entry(here)
        while token is not None:
            name, *span = here.key or (len(values), *NO_KEY)
            self.path.append(name)
            value, place = self._value(token, here, (span[0], span[1]))
            if isinstance(name, str):
                self.put(values, places, name, value, place)
            else:
                values.append(value)
                places.append(place)
            self.path.pop()
            token = self._next_entry(here)
        return values, Place(here.start, self.offset, *key, places)

    def _first_entry(self, here: _Open) -> Token | None:
        """After an opening bracket: the first value's first token, None when the bracket closes at once."""
        if self._reads_key(here, after_comma=False):
            return self.next()
        token = self.next(as_key=here.is_object)
        if self._closes(token, here):
            return None
        if token.kind == ",":
            raise self.fatal("J004", "there is nothing before this comma", token.start, "remove the comma")
        return self._entry(token, here)

    def _next_entry(self, here: _Open) -> Token | None:
        """After a value: the next value's first token, None when the bracket closes."""
        if self._reads_key(here, after_comma=True):
            return self.next()
        after = self.offset
        token = self.next(as_key=here.is_object)
        if self._closes(token, here):
            return None
        if token.kind == ",":
            comma = token.start
            token = self.next(as_key=here.is_object)
            if self._closes(token, here):
                message = f"a comma before {here.closing} has nothing after it"
                self.once("J013", message, comma, "remove the comma")
                return None
            if token.kind == ",":
                raise self.fatal("J004", "there is nothing between these two commas", token.start, "remove one comma")
            return self._entry(token, here)
        if token.kind == ":":
            entries = "an object's entry is one key and one value", "a list holds values; an object is written { }"
            what = entries[0] if here.is_object else entries[1]
            raise self.fatal("J004", f"unexpected ':': {what}", token.start, "expected , or " + here.closing)
        if token.kind == END:
            raise self._no_value(token, here)
        between = self.text[max(after - 1, 0) : token.start]
        where = "here" if between[:1] in "}]\"'" or "\n" in between else "on this line"  # Hjson takes the former
        self.say("J004", f"a comma is missing {where}", after, "write , between two entries")
        return self._entry(token, here)

    def _reads_key(self, here: _Open, *, after_comma: bool) -> bool:
        """Reads the key of an entry that is written without a mistake, which most are."""
        found = self.key(after_comma=after_comma) if here.is_object else None
        here.key = found or here.key
        return found is not None

    def _closes(self, token: Token, here: _Open) -> bool:
        if token.kind not in ("}", "]"):
            return False
        if token.kind != here.closing:
            message = f"expected {here.closing} to close the {here.name}, found {token.value}"
            raise self._unclosed(message, token, here)
        return True

    def _entry(self, token: Token, here: _Open) -> Token:
        """`token` starts an entry: for an object read `key :` and give the value's first token."""
        if not here.is_object:
            return token
        if token.kind == END:
            raise self._no_value(token, here)
        if token.kind != STRING:
            word = shown(self.text[token.start : token.end])
            advice = f'write "{word}"' if token.kind in (NUMBER, WORD) else 'an object holds entries like "tp": 2'
            raise self.fatal("J018", f"expected a key in double quotes, found {word}", token.start, advice)
        assert isinstance(token.value, str)
        here.key = token.value, token.start, token.end
        name, colon = shown(token.value), self.next()
        if colon.kind == ":":
            return self.next()
        if colon.kind in (*_SCALARS, "{", "["):
            self.say("J004", f'a colon is missing after "{name}"', token.end, "write :")
            return colon
        found = "the end of the file" if colon.kind == END else str(colon.value)
        message = f'the key "{name}" has no value: found {found}'
        raise self.fatal("J004", message, token.start, f'write "{name}": and a value')

    def _no_value(self, token: Token, here: _Open | None) -> Fatal:
        if token.kind == END and here is not None:
            line = self.source.position(here.start).line
            return self._unclosed(f"the file ends inside the {here.name} opened on line {line}", token, here)
        if here is not None and here.key is not None:
            message = f'the key "{shown(here.key[0])}" has no value'
            return self.fatal("J004", message, token.start, "write a value after the colon")
        return self.fatal("J004", f"expected a value, found {token.value}", token.start, "a spec starts with {")

    def _unclosed(self, message: str, token: Token, here: _Open) -> Fatal:
        related = ((f"the {here.name} opened here", here.path, here.start),)
        return self.fatal("J007", message, token.start, f"write {here.closing}", related=related)


def parse_json(source: SourceText) -> Result:
    """Read JSON. Errors that leave no doubt about what was meant come with a document."""
    parser = _Parser(source)
    try:
        return parser.parse()
    except Fatal as fatal:
        return Result(source, None, (*parser.problems, fatal.diagnostic))
