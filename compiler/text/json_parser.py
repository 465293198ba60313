"""JSON text to a `Document`: iterative, so that no nesting depth can exhaust the stack."""

from __future__ import annotations

from parcompile.diagnostics import Path

from .document import Document, Place, Result, SourceText
from .json_scanner import END, NUMBER, PUNCTUATION, STRING, WORD, Fatal, Scanner, Token, duplicate_key, shown

MAX_DEPTH = 100
"""Brackets inside brackets; a spec needs 6."""


class _Frame:
    """An object or list that is still open."""

    __slots__ = ("children", "key", "key_end", "key_start", "start", "value")

    def __init__(self, opening: Token) -> None:
        self.value: dict[str, object] | list[object] = {} if opening.value == "{" else []
        self.children: dict[str, Place] | list[Place] = {} if opening.value == "{" else []
        self.start = opening.start
        self.key: str | None = None
        self.key_start = -1
        self.key_end = -1

    @property
    def closing(self) -> str:
        return "}" if isinstance(self.value, dict) else "]"

    def name(self) -> str:
        return "object" if isinstance(self.value, dict) else "list"


class _Parser:
    """Builds the tree and the places from tokens, keeping the open frames on a list of its own."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.scanner = Scanner(source)
        self.frames: list[_Frame] = []
        self.invalid: set[Path] = set()
        self.duplicates: set[Path] = set()

    def path(self) -> Path:
        """Path of the value that is being read."""
        return tuple(
            frame.key if isinstance(frame.value, dict) and frame.key is not None else len(frame.value)
            for frame in self.frames
        )

    def fail(
        self, code: str, message: str, offset: int, advice: str | None = None, opened: _Frame | None = None
    ) -> Fatal:
        related = ((f"the {opened.name()} opened here", self.path()[:-1], opened.start),) if opened else ()
        return Fatal(self.source.problem(code, message, offset, advice=advice, related=related))

    def parse(self) -> tuple[object, Place]:
        token = self.scanner.next()
        if token.kind == END:
            raise self.fail("J003", "the file is empty", 0, "a spec starts with {")
        while True:
            # `token` is the start of a value here.
            if token.kind == PUNCTUATION and token.value in ("{", "["):
                self._open(token)
                following = self._first_entry()
                if following is not None:
                    token = following
                    continue
                value, place = self._close(self.scanner.offset)
            else:
                value, place = self._scalar(token)
            # A value is complete: put it where it belongs, closing every frame that ends here.
            while True:
                if not self.frames:
                    self._nothing_more()
                    return value, place
                self._put(value, place)
                following = self._next_entry()
                if following is not None:
                    token = following
                    break
                value, place = self._close(self.scanner.offset)

    def _open(self, token: Token) -> None:
        if len(self.frames) >= MAX_DEPTH:
            raise self.fail("J008", f"more than {MAX_DEPTH} brackets inside each other", token.start, "nest less")
        self.frames.append(_Frame(token))

    def _scalar(self, token: Token) -> tuple[object, Place]:
        if token.kind not in (STRING, NUMBER, WORD):
            raise self._no_value(token)
        if not token.valid:
            self.invalid.add(self.path())
        frame = self.frames[-1] if self.frames else None
        key = (frame.key_start, frame.key_end) if frame and frame.key is not None else (-1, -1)
        return token.value, Place(token.start, token.end, *key, None)

    def _put(self, value: object, place: Place) -> None:
        frame = self.frames[-1]
        if isinstance(frame.value, dict) and isinstance(frame.children, dict):
            key = frame.key
            assert key is not None, "a key was read before its value"
            if key in frame.value:
                self._duplicate(key, frame.children[key], place, is_same=repr(frame.value[key]) == repr(value))
            frame.value[key] = value
            frame.children[key] = place
        elif isinstance(frame.value, list) and isinstance(frame.children, list):
            frame.value.append(value)
            frame.children.append(place)

    def _duplicate(self, key: str, first: Place, second: Place, *, is_same: bool) -> None:
        path = self.path()
        if not is_same:  # else it says what it says
            self.duplicates.add(path)
        both = first.key_start, second.key_start
        self.scanner.report(duplicate_key(self.source, key, path, *both, is_same=is_same))

    def _close(self, end: int) -> tuple[object, Place]:
        frame = self.frames.pop()
        outer = self.frames[-1] if self.frames else None
        key = (outer.key_start, outer.key_end) if outer and outer.key is not None else (-1, -1)
        return frame.value, Place(frame.start, end, *key, frame.children)

    def _first_entry(self) -> Token | None:
        """After an opening bracket: the first value's first token, None when the bracket closes at once."""
        frame = self.frames[-1]
        if self._key(frame, after_comma=False):
            return self.scanner.next()
        token = self.scanner.next(as_key=isinstance(frame.value, dict))
        if self._closes(token):
            return None
        if token.kind == PUNCTUATION and token.value == ",":
            raise self.fail("J004", "there is nothing before this comma", token.start, "remove the comma")
        return self._entry(token)

    def _next_entry(self) -> Token | None:
        """After a value: the next value's first token, None when the bracket closes."""
        frame = self.frames[-1]
        if self._key(frame, after_comma=True):
            return self.scanner.next()
        after = self.scanner.offset
        is_object = isinstance(frame.value, dict)
        token = self.scanner.next(as_key=is_object)
        if self._closes(token):
            return None
        if token.kind == PUNCTUATION and token.value == ",":
            comma = token.start
            token = self.scanner.next(as_key=is_object)
            if self._closes(token):
                message = f"a comma before {frame.closing} has nothing after it"
                self.scanner.once("J013", message, comma, "remove the comma")
                return None
            if token.kind == PUNCTUATION and token.value == ",":
                raise self.fail("J004", "there is nothing between these two commas", token.start, "remove one comma")
            return self._entry(token)
        if token.kind == PUNCTUATION and token.value == ":":
            entries = "an object's entry is one key and one value", "a list holds values; an object is written { }"
            what = entries[0] if is_object else entries[1]
            raise self.fail("J004", f"unexpected ':': {what}", token.start, "expected , or " + frame.closing)
        if token.kind == END or (token.kind == PUNCTUATION and token.value in ("}", "]")):
            raise self._no_value(token)
        between = self.source.text[max(after - 1, 0) : token.start]
        where = "here" if between[:1] in "}]\"'" or "\n" in between else "on this line"  # Hjson takes the former
        self.scanner.say("J004", f"a comma is missing {where}", after, "write , between two entries")
        return self._entry(token)

    def _key(self, frame: _Frame, *, after_comma: bool) -> bool:
        """Reads the key of an entry that is written without a mistake, which most are."""
        found = self.scanner.key(after_comma=after_comma) if isinstance(frame.value, dict) else None
        if found is not None:
            frame.key, frame.key_start, frame.key_end = found
        return found is not None

    def _closes(self, token: Token) -> bool:
        if token.kind != PUNCTUATION or token.value not in ("}", "]"):
            return False
        frame = self.frames[-1]
        if token.value != frame.closing:
            message = f"expected {frame.closing} to close the {frame.name()}, found {token.value}"
            raise self.fail("J007", message, token.start, f"write {frame.closing}", opened=frame)
        return True

    def _entry(self, token: Token) -> Token:
        """`token` starts an entry: for an object read `key :` and give the value's first token."""
        frame = self.frames[-1]
        if not isinstance(frame.value, dict):
            return token
        if token.kind == END:
            raise self._no_value(token)
        if token.kind != STRING:
            word = self.source.text[token.start : token.end]
            advice = (
                f'write "{shown(word)}"' if token.kind in (NUMBER, WORD) else 'an object holds entries like "tp": 2'
            )
            raise self.fail("J018", f"expected a key in double quotes, found {shown(word)}", token.start, advice)
        assert isinstance(token.value, str)
        frame.key, frame.key_start, frame.key_end = token.value, token.start, token.end
        colon = self.scanner.next()
        if colon.kind == PUNCTUATION and colon.value == ":":
            return self.scanner.next()
        if colon.kind in (STRING, NUMBER, WORD) or (colon.kind == PUNCTUATION and colon.value in ("{", "[")):
            self.scanner.say("J004", f'a colon is missing after "{shown(token.value)}"', token.end, "write :")
            return colon
        name, found = shown(token.value), "the end of the file" if colon.kind == END else str(colon.value)
        message = f'the key "{name}" has no value: found {found}'
        raise self.fail("J004", message, token.start, f'write "{name}": and a value')

    def _no_value(self, token: Token) -> Fatal:
        frame = self.frames[-1] if self.frames else None
        if token.kind == END and frame is not None:
            line = self.source.position(frame.start).line
            message = f"the file ends inside the {frame.name()} opened on line {line}"
            return self.fail("J007", message, token.start, f"write {frame.closing}", opened=frame)
        if frame is not None and frame.key is not None:
            message = f'the key "{shown(frame.key)}" has no value'
            return self.fail("J004", message, token.start, "write a value after the colon")
        return self.fail("J004", f"expected a value, found {token.value}", token.start, "a spec starts with {")

    def _nothing_more(self) -> None:
        token = self.scanner.next()
        if token.kind == END:
            return
        message = f"found {shown(self.source.text[token.start : token.end])} after the end of the document"
        raise self.fail("J004", message, token.start, "remove it: a file holds one document")


def parse_json(source: SourceText) -> Result:
    """Read JSON. Errors that leave no doubt about what was meant come with a document."""
    parser = _Parser(source)
    try:
        tree, root = parser.parse()
        parser.scanner.finish()
    except Fatal as fatal:
        return Result(source, None, (*parser.scanner.problems, fatal.diagnostic))
    document = Document(source, tree, root, "json", frozenset(parser.invalid), frozenset(parser.duplicates))
    return Result(source, document, tuple(parser.scanner.problems))
