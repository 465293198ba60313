"""YAML text to a `Document`, from PyYAML's events; unquoted scalars as YAML 1.2's core schema reads them.

Unquoted YAML scalars to values, as YAML 1.2's core schema reads them, and `2_000` as every Python program does.

What YAML 1.1 (and so most Python programs) reads otherwise is reported where it changes a number: `010` is 8 there.

PyYAML's own loaders are not used: they give no places, let duplicate keys pass, and read `3e-4` as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from parcompile.diagnostics import Diagnostic, Path
from parcompile.user_files import shipped

from .document import Document, Place, Result, SourceText
from .json_parser import MAX_DEPTH
from .json_scanner import Fatal, duplicate_key, read_number, shown

if TYPE_CHECKING:
    import yaml


_STARTED = (
    ("flow sequence", "the list opened here"),
    ("flow mapping", "the mapping opened here"),
    ("quoted scalar", "the string opened here"),
    ("block mapping", "the mapping starts here"),
    ("block collection", "the list starts here"),
    ("simple key", "the key starts here"),
)

# (part of the library's problem, code, message, advice), the first that fits is used.
_KNOWN: Sequence[tuple[str, str, str, str | None]] = shipped("parcompile.text", "yaml_problems.json")


def explain(source: SourceText, error: yaml.YAMLError) -> Diagnostic:
    """The library's error as a diagnostic at its place."""
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "this is not YAML")
    mark = getattr(error, "problem_mark", None)
    offset = getattr(error, "position", 0) if mark is None else getattr(mark, "index", 0)
    if not isinstance(offset, int):
        offset = 0
    offset = min(offset, len(source.text))
    if offset > 0 and offset == len(source.text):
        offset = len(source.text.rstrip())
    position = source.position(offset)
    line = source.line(position.line)
    indentation = re.match(r" *\t[ \t]*", line)
    if indentation is not None and "\t" in line[: max(position.column, 1)]:
        at = source.offset(type(position)(position.line, line.index("\t") + 1))
        return source.problem(
            "J021", "a tab indents this line: YAML is indented with spaces", at, advice="replace the tab by spaces"
        )
    character = repr(source.text[offset]) if offset < len(source.text) else "the end of the file"
    context = _context(source, error)
    for part, code, message, advice in _KNOWN:
        if part in problem:
            if code == "J005" and context:
                return source.problem(code, message, context[0][2], advice=advice)
            return source.problem(code, message.format(character=character), offset, advice=advice, related=context)
    return source.problem("J020", f"this is not YAML: {problem}", offset, related=context)


def _context(source: SourceText, error: yaml.YAMLError) -> tuple[tuple[str, tuple[str | int, ...], int], ...]:
    """Where the thing started that the library was reading when it stumbled."""
    context, mark = getattr(error, "context", None), getattr(error, "context_mark", None)
    index = getattr(mark, "index", None)
    if not context or not isinstance(index, int) or index >= len(source.text):
        return ()
    return tuple((message, (), index) for part, message in _STARTED if part in str(context))[:1]


# Unquoted YAML scalars to values, as YAML 1.2's core schema reads them, and `2_000` as every Python program does.

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_BASED = re.compile(r"0[ox][0-9a-fA-F]+")
_GROUPED = re.compile(r"[-+]?[0-9]+(?:_+[0-9]+)+(?:\.[0-9_]*)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def tag_of(value: object) -> str:
    """The YAML tag of a scalar's value."""
    name = {bool: "bool", int: "int", float: "float", type(None): "null"}.get(type(value), "str")
    return f"tag:yaml.org,2002:{name}"


def plain_value(text: str) -> tuple[object, tuple[str, str, str] | None]:
    """The value of an unquoted scalar, and (code, message, advice) when it cannot be taken as it is."""
    first = text[:1]
    if (first == "" or first in "~nN") and _NULL.fullmatch(text):
        return None, None
    if first in ("t", "T", "f", "F"):
        return (text.lower() == "true", None) if _BOOLEAN.fullmatch(text) else (text, None)
    if first == "" or first not in "+-.0123456789":
        return text, None
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits[0] == "0":
            plain = text.lstrip("+").replace(digits, digits.lstrip("0") or "0")
            message = f"{shown(text)} starts with 0: YAML 1.1 reads it to the base 8, YAML 1.2 to the base 10"
            return 0, ("J012", message, f"write {shown(plain)}, or 0o{shown(digits.lstrip('0') or '0')} for the base 8")
        return _number(text, is_integer=True)
    if _FLOAT.fullmatch(text):
        return _number(text, is_integer=False)
    if _BASED.fullmatch(text):
        try:
            return _number(str(int(text, 0)) if len(text) < 40 else "1" + "0" * 40, is_integer=True)
        except ValueError:
            return text, None
    if _GROUPED.fullmatch(text):
        return plain_value(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return 0, ("J010", f"{text} is not a number that can be used here", "write a finite number")
    return text, None


def _number(text: str, *, is_integer: bool) -> tuple[int | float, tuple[str, str, str] | None]:
    value, reason = read_number(text.lstrip("+"), is_integer=is_integer)
    assert isinstance(value, int) or math.isfinite(value)
    return value, None if reason is None else ("J011", *reason)


# YAML text to a `Document`, from PyYAML's events.

MAX_NODES = 1_000_000
"""Values in one file once its aliases are written out: a few lines of anchors can stand for billions."""
MAX_PROBLEMS = 50

_TAGS = {
    "tag:yaml.org,2002:str": "text",
    "tag:yaml.org,2002:int": "a whole number",
    "tag:yaml.org,2002:float": "a number",
    "tag:yaml.org,2002:bool": "true or false",
    "tag:yaml.org,2002:null": "null",
    "tag:yaml.org,2002:map": "a mapping",
    "tag:yaml.org,2002:seq": "a list",
}


class _Node:
    """A finished value: what it is, where it stands, and how many values it stands for."""

    __slots__ = ("place", "size", "value")

    def __init__(self, value: object, place: Place, size: int) -> None:
        self.value = value
        self.place = place
        self.size = size


class _Frame:
    """A mapping or list that is still open."""

    __slots__ = ("anchor", "children", "key", "merges", "size", "start", "value")

    def __init__(self, start: int, anchor: str | None, *, is_mapping: bool) -> None:
        self.value: dict[str, object] | list[object] = {} if is_mapping else []
        self.children: dict[str, Place] | list[Place] = {} if is_mapping else []
        self.start = start
        self.anchor = anchor
        self.key: tuple[str, int, int] | None = None
        self.merges: list[_Node] = []
        self.size = 1


class _Composer:
    """Builds the tree and the places from events, keeping the open frames on a list of its own."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.problems: list[Diagnostic] = []
        self.frames: list[_Frame] = []
        self.anchors: dict[str, _Node | None] = {}
        self.invalid: set[Path] = set()
        self.duplicates: set[Path] = set()
        self.nodes = 0

    def path(self) -> Path:
        return tuple(
            frame.key[0] if isinstance(frame.value, dict) and frame.key is not None else len(frame.value)
            for frame in self.frames
        )

    def report(self, code: str, message: str, offset: int, advice: str | None = None) -> None:
        self._add(self.source.problem(code, message, offset, advice=advice), offset)

    def _add(self, problem: Diagnostic, offset: int) -> None:
        self.problems.append(problem)
        if len(self.problems) >= MAX_PROBLEMS:
            raise self.fatal("J020", f"more than {MAX_PROBLEMS} mistakes: the rest was not read", offset)

    def fatal(self, code: str, message: str, offset: int, advice: str | None = None) -> Fatal:
        return Fatal(self.source.problem(code, message, offset, advice=advice))

    def compose(self, events: Iterator[yaml.Event]) -> _Node:
        import yaml

        root: _Node | None = None
        for event in events:
            start, end = _index(event.start_mark), _index(event.end_mark)
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    message = "a second document starts here; a file may hold only one"
                    raise self.fatal("J024", message, start, "put it into a file of its own")
                continue
            if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self._tag(event, start)
                self._open(event, start)
                continue
            if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                node = self._close(end)
            elif isinstance(event, yaml.ScalarEvent):
                if self._is_key():
                    self._key(event, start, end)
                    continue
                node = self._scalar(event, start, end)
            elif isinstance(event, yaml.AliasEvent):
                node = self._alias(event, start, end)
                if self._is_key():
                    raise self.fatal(
                        "J018", f"*{event.anchor} stands for a value, not for a key", start, "write the key"
                    )
            else:
                continue
            self.nodes += node.size if isinstance(event, yaml.AliasEvent) else 1
            if self.nodes > MAX_NODES:
                advice = "write the values out, or use fewer aliases"
                raise self.fatal(
                    "J022", f"with its aliases written out, the file has more than {MAX_NODES:,} values", start, advice
                )
            if self.frames:
                self._put(node)
            else:
                root = node
        if root is None:
            raise self.fatal("J003", "the file is empty", 0, "a spec starts with its keys, such as version: 1")
        return root

    def _is_key(self) -> bool:
        return bool(self.frames) and isinstance(self.frames[-1].value, dict) and self.frames[-1].key is None

    def _open(self, event: yaml.CollectionStartEvent, start: int) -> None:
        import yaml

        if self._is_key():
            raise self.fatal("J018", "a key is text, not a list or a mapping", start, "write a plain key")
        if len(self.frames) >= MAX_DEPTH:
            raise self.fatal("J008", f"more than {MAX_DEPTH} levels inside each other", start, "nest less")
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.frames.append(_Frame(start, event.anchor, is_mapping=isinstance(event, yaml.MappingStartEvent)))

    def _close(self, end: int) -> _Node:
        frame = self.frames.pop()
        if isinstance(frame.value, dict) and isinstance(frame.children, dict):
            for merged in frame.merges:
                assert isinstance(merged.value, dict)
                assert isinstance(merged.place.children, dict)
                for key, value in merged.value.items():
                    if key not in frame.value:
                        frame.value[key] = value
                        frame.children[key] = merged.place.children[key]
        # A block ends where the next token starts: give back the white space and comments between.
        end = self._last_end(frame, end)
        node = _Node(frame.value, Place(frame.start, end, *self._key_span(), frame.children), frame.size)
        if frame.anchor is not None:
            self.anchors[frame.anchor] = node
        return node

    def _last_end(self, frame: _Frame, end: int) -> int:
        if self.source.text[frame.start : frame.start + 1] in ("{", "["):
            return end
        children = frame.children.values() if isinstance(frame.children, dict) else frame.children
        return max((child.end for child in children if frame.start <= child.end <= end), default=end)

    def _key_span(self) -> tuple[int, int]:
        frame = self.frames[-1] if self.frames else None
        return (frame.key[1], frame.key[2]) if frame and frame.key else (-1, -1)

    def _key(self, event: yaml.ScalarEvent, start: int, end: int) -> None:
        frame = self.frames[-1]
        text = event.value
        if not event.style and text != "<<":
            value, _ = plain_value(text)
            if not isinstance(value, str):
                self.report(
                    "J018", f"the key {shown(text) or 'before this colon'} is not text", start, f'write "{shown(text)}"'
                )
        frame.key = (text, start, end)

    def _put(self, node: _Node) -> None:
        frame = self.frames[-1]
        frame.size += node.size
        if isinstance(frame.value, list) and isinstance(frame.children, list):
            frame.value.append(node.value)
            frame.children.append(node.place)
            return
        assert isinstance(frame.value, dict)
        assert isinstance(frame.children, dict)
        assert frame.key is not None
        key, start, _ = frame.key
        if key == "<<":
            self._merge(frame, node, start)
        else:
            if key in frame.value:
                self._duplicate(key, frame.children[key], start, is_same=repr(frame.value[key]) == repr(node.value))
            frame.value[key] = node.value
            frame.children[key] = node.place
        frame.key = None

    def _merge(self, frame: _Frame, node: _Node, start: int) -> None:
        several = isinstance(node.value, list) and isinstance(node.place.children, list)
        values = list(node.value) if isinstance(node.value, list) else [node.value]
        places = list(node.place.children) if several and isinstance(node.place.children, list) else [node.place]
        for value, place in zip(values, places, strict=True):
            if not isinstance(value, dict):
                raise self.fatal("J023", "<< takes a mapping or a list of mappings", start, "write `<<: *anchor`")
            frame.merges.append(_Node(value, place, 1))

    def _duplicate(self, key: str, first: Place, start: int, *, is_same: bool) -> None:
        path = self.path()
        if not is_same:  # else it says what it says
            self.duplicates.add(path)
        self._add(duplicate_key(self.source, key, path, first.key_start, start, is_same=is_same), start)

    def _alias(self, event: yaml.AliasEvent, start: int, end: int) -> _Node:
        name = event.anchor or ""
        if name not in self.anchors:
            raise self.fatal(
                "J023", f"*{shown(name)} refers to no &{shown(name)} above it", start, f"write &{shown(name)} first"
            )
        node = self.anchors[name]
        if node is None:
            raise self.fatal("J022", f"*{shown(name)} stands inside its own &{shown(name)}: it would never end", start)
        return _Node(node.value, Place(start, end, *self._key_span(), node.place.children), node.size)

    def _tag(self, event: Any, start: int) -> None:
        if event.tag is None or event.tag == "!" or event.tag in _TAGS:
            return
        name = event.tag.replace("tag:yaml.org,2002:", "!!")
        raise self.fatal(
            "J023", f"the tag {shown(name)} is not known here", start, "remove the tag: values are plain data"
        )

    def _scalar(self, event: yaml.ScalarEvent, start: int, end: int) -> _Node:
        self._tag(event, start)
        text, reason = event.value, None
        value: object = text
        if event.tag is None and not event.style:
            value, reason = plain_value(text)
        elif event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            value, reason = plain_value(text)
            if tag_of(value) != event.tag:
                reason = ("J023", f"{shown(text)} is not {_TAGS[event.tag]}", "remove the tag")
        if reason is not None:
            self.invalid.add(self.path())
            self.report(reason[0], reason[1], start, reason[2])
        node = _Node(value, Place(start, end, *self._key_span(), None), 1)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node


def _index(mark: Any) -> int:
    return int(mark.index)


def parse_yaml(source: SourceText) -> Result:
    """Read YAML. Errors that leave no doubt about what was meant come with a document."""
    import yaml

    composer = _Composer(source)
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = composer.compose(yaml.parse(source.text, Loader=loader))
    except Fatal as fatal:
        return Result(source, None, (*composer.problems, fatal.diagnostic))
    except UnicodeEncodeError as error:
        problem = source.problem("J005", "half of a surrogate pair is no character", error.start, advice="remove it")
        return Result(source, None, (*composer.problems, problem))
    except yaml.YAMLError as error:
        return Result(source, None, (*composer.problems, explain(source, error)))
    document = Document(
        source, node.value, node.place, "yaml", frozenset(composer.invalid), frozenset(composer.duplicates)
    )
    return Result(source, document, tuple(composer.problems))
