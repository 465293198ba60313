"""YAML text to a `Document`, from PyYAML's events; unquoted scalars as YAML 1.2's core schema reads them.

PyYAML's own loaders are not used: they give no places, let duplicate keys pass, and read `3e-4` as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from parcompile.diagnostics import Diagnostic
from parcompile.user_files import shipped

from .document import MAX_DEPTH, NO_KEY, Fatal, Place, Reading, Result, SourceText, read_number, shown

if TYPE_CHECKING:
    import yaml


_WORDS = shipped("parcompile.text", "yaml_problems.json")
_KNOWN: Sequence[tuple[str, str, str, str | None]] = _WORDS["known"]
"""Part of the library's problem, code, message and advice; the first that fits is used."""
_STARTED: Sequence[tuple[str, str]] = _WORDS["started"]
"""Part of the library's context, and what it means for a reader."""
_TAGS: Mapping[str, str] = _WORDS["tags"]
"""Known tags in words."""


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
# What YAML 1.1 (and so most Python programs) reads otherwise is reported where it changes a number: `010` is 8 there.

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


def _index(mark: Any) -> int:
    return int(mark.index)


class _Node(NamedTuple):
    """A finished value: what it is, where it stands, and how many values it stands for."""

    value: Any
    place: Place
    size: int = 1


class _Composer(Reading):
    """Builds the tree and the places from events."""

    too_many = "J020"

    def __init__(self, source: SourceText, events: Iterator[Any]) -> None:
        super().__init__(source)
        self.events = events
        self.anchors: dict[str, _Node | None] = {}
        self.nodes = 0

    def compose(self) -> Result:
        import yaml

        root: _Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                message = "a second document starts here; a file may hold only one"
                raise self.fatal("J024", message, _index(event.start_mark), "put it into a file of its own")
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event, NO_KEY)
        if root is None:
            raise self.fatal("J003", "the file is empty", 0, "a spec starts with its keys, such as version: 1")
        return self.result(root.value, root.place, "yaml")

    def _node(self, event: Any, key: tuple[int, int]) -> _Node:
        """The value that begins with an event; `key` is where its key stands."""
        import yaml

        start = _index(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            node = self._alias(event)
            self.nodes += node.size
            node = _Node(node.value, Place(start, _index(event.end_mark), *key, node.place.children), node.size)
        else:
            if isinstance(event, yaml.ScalarEvent):
                node = self._scalar(event, key)
            else:
                node, start = self._collection(event, key)
            self.nodes += 1
            if event.anchor is not None:
                self.anchors[event.anchor] = node
        if self.nodes > MAX_NODES:
            message = f"with its aliases written out, the file has more than {MAX_NODES:,} values"
            raise self.fatal("J022", message, start, "write the values out, or use fewer aliases")
        return node

    def _collection(self, event: Any, key: tuple[int, int]) -> tuple[_Node, int]:
        """A mapping or list, and where the event stands that ends it."""
        import yaml

        start, is_mapping = _index(event.start_mark), isinstance(event, yaml.MappingStartEvent)
        self._tag(event)
        if len(self.path) >= MAX_DEPTH:
            raise self.fatal("J008", f"more than {MAX_DEPTH} levels inside each other", start, "nest less")
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        values: Any = {} if is_mapping else []
        places: Any = {} if is_mapping else []
        merged: list[tuple[dict[str, object], dict[str, Place]]] = []
        size = 1
        while not isinstance(one := next(self.events), yaml.CollectionEndEvent):
            span = NO_KEY
            if is_mapping:
                name, span = self._key(one), (_index(one.start_mark), _index(one.end_mark))
                one = next(self.events)
            self.path.append(name if is_mapping else len(values))
            node = self._node(one, span)
            size += node.size
            if not is_mapping:
                values.append(node.value)
                places.append(node.place)
            elif name == "<<":
                merged += self._merged(node, span[0])
            else:
                self.put(values, places, name, node.value, node.place)
            self.path.pop()
        for others, their_places in merged:
            for name, value in others.items():
                if name not in values:
                    values[name], places[name] = value, their_places[name]
        end = _index(one.end_mark)
        if self.source.text[start : start + 1] not in ("{", "["):
            # A block ends where the next token starts: give back the white space and comments between.
            inside = places.values() if is_mapping else places
            end = max((child.end for child in inside if start <= child.end <= end), default=end)
        return _Node(values, Place(start, end, *key, places), size), _index(one.start_mark)

    def _key(self, event: Any) -> str:
        import yaml

        start = _index(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            self._alias(event)
            raise self.fatal("J018", f"*{event.anchor} stands for a value, not for a key", start, "write the key")
        if not isinstance(event, yaml.ScalarEvent):
            self._tag(event)
            raise self.fatal("J018", "a key is text, not a list or a mapping", start, "write a plain key")
        text = str(event.value)
        if not event.style and text != "<<" and not isinstance(plain_value(text)[0], str):
            message = f"the key {shown(text) or 'before this colon'} is not text"
            self.say("J018", message, start, f'write "{shown(text)}"')
        return text

    def _merged(self, node: _Node, start: int) -> Iterator[tuple[dict[str, object], dict[str, Place]]]:
        several, children = isinstance(node.value, list), node.place.children
        values: Any = node.value if several else [node.value]
        places: Any = children if several else [node.place]
        for value, place in zip(values, places, strict=True):
            if not isinstance(value, dict):
                raise self.fatal("J023", "<< takes a mapping or a list of mappings", start, "write `<<: *anchor`")
            yield value, place.children

    def _alias(self, event: Any) -> _Node:
        name, start = shown(event.anchor), _index(event.start_mark)
        if event.anchor not in self.anchors:
            raise self.fatal("J023", f"*{name} refers to no &{name} above it", start, f"write &{name} first")
        node = self.anchors[event.anchor]
        if node is None:
            raise self.fatal("J022", f"*{name} stands inside its own &{name}: it would never end", start)
        return node

    def _tag(self, event: Any) -> None:
        if event.tag is None or event.tag == "!" or event.tag in _TAGS:
            return
        message = f"the tag {shown(event.tag.replace('tag:yaml.org,2002:', '!!'))} is not known here"
        raise self.fatal("J023", message, _index(event.start_mark), "remove the tag: values are plain data")

    def _scalar(self, event: Any, key: tuple[int, int]) -> _Node:
        self._tag(event)
        start, value, reason = _index(event.start_mark), event.value, None
        if event.tag is None and not event.style:
            value, reason = plain_value(event.value)
        elif event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            value, reason = plain_value(event.value)
            if tag_of(value) != event.tag:
                reason = ("J023", f"{shown(event.value)} is not {_TAGS[event.tag]}", "remove the tag")
        if reason is not None:
            self.invalid.add(tuple(self.path))
            code, message, advice = reason
            self.say(code, message, start, advice)
        return _Node(value, Place(start, _index(event.end_mark), *key, None))


def parse_yaml(source: SourceText) -> Result:
    """Read YAML. Errors that leave no doubt about what was meant come with a document."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    composer = _Composer(source, iter(yaml.parse(source.text, Loader=loader)))
    try:
        return composer.compose()
    except Fatal as fatal:
        problem = fatal.diagnostic
    except UnicodeEncodeError as error:
        problem = source.problem("J005", "half of a surrogate pair is no character", error.start, advice="remove it")
    except yaml.YAMLError as error:
        problem = explain(source, error)
    return Result(source, None, (*composer.problems, problem))
