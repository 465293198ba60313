"""What PyYAML's complaints mean for somebody who writes a spec."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from parcompile.diagnostics import Diagnostic

from .document import SourceText

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
_KNOWN: tuple[tuple[str, str, str, str | None], ...] = (
    ("cannot start any token", "J020", "{character} cannot start a value in YAML", 'put the text in quotes: "…"'),
    (
        "mapping values are not allowed",
        "J020",
        "this colon does not end a key",
        "quote text that holds `: `; check this line's indentation and the line above",
    ),
    ("could not find expected ':'", "J020", "a key without a colon", "write `key: value`"),
    (
        "expected <block end>",
        "J020",
        "this line is indented differently from its neighbours",
        "indent entries of one mapping alike",
    ),
    (
        "did not find expected key",
        "J020",
        "expected a key here",
        "indent entries of one mapping alike; write `key: value`",
    ),
    ("did not find expected '-' indicator", "J020", "expected `- ` here", "indent the entries of one list alike"),
    ("expected ',' or", "J020", "expected , or a closing bracket", None),
    ("did not find expected ',' or", "J020", "expected , or a closing bracket", None),
    ("unexpected end of stream", "J005", "this string is never closed", "close the quotes"),
    (
        "found unknown escape",
        "J006",
        "an escape that YAML does not know",
        r"write \\ for a backslash, or use single quotes",
    ),
    ("undefined alias", "J023", "an alias to something that is not defined above it", None),
    ("undefined tag", "J023", "a tag that is not known here", "remove the tag: values are plain data"),
    (
        "block sequence entries are not allowed",
        "J020",
        "a list entry cannot stand here",
        "start the list on a line of its own",
    ),
    ("expected the node content", "J020", "a value is missing here", None),
    ("found duplicate anchor", "J023", "this anchor is defined twice", None),
    ("multiple documents", "J024", "a second document starts here; a file may hold only one", None),
    ("special characters are not allowed", "J005", "a control character that YAML does not allow", None),
    ("control characters are not allowed", "J005", "a control character that YAML does not allow", None),
    ("maximum nesting", "J008", "too many levels inside each other", "nest less"),
)


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
