"""Statements of tables: a condition, and texts with values in them.

A row of such a table is a JSON object. Its texts hold "{expression}" or "{expression:format}", which is replaced by the
value of an expression (`model/tables/expression.py`), as `when` is one. `each` makes several rows of one: it lists what
"$word" stands for in all texts of the row, as objects, or by the words that share a text: {"first second": ["a b"]}.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from parcompile.model.tables.expression import compiled

Row = Mapping[str, Any]
EXPRESSION = re.compile(r"""\{((?=[\w(\['])(?:'[^']*'|"[^"]*"|[^{}:'"])+)(?::([^{}]*))?\}""")
"""A value in a text, and its format. An expression begins with no double quote, as objects of JSON do."""
_NONE: Mapping[str, Iterable[Row]] = {}
_WORD = re.compile(r"\$(\w+)")
Facts = Mapping[str, Callable[..., Any]]
Formats = Mapping[str, Callable[[Any], str]]
"""How values are written, beside Python's formats."""
_FORMATS: Formats = {"list": ", ".join, "lower": lambda value: str(value).lower(), "repr": repr}


class Values(Mapping[str, Any]):
    """What expressions read of a subject: facts about it by name, and by path what it holds.

    Args:
        subject: what is spoken of.
        facts: functions of the subject; one called "is." is asked for "is.NAME", with NAME beside the subject.
        read: gives the value at any other name, None where there is none.
        bound: what names of a row stand for, with its attributes.
    """

    def __init__(
        self, subject: Any, facts: Facts, read: Callable[[str], Any], bound: Mapping[str, Any] = _NONE
    ) -> None:
        self._subject, self._facts, self._read, self._bound = subject, facts, read, bound

    def __getitem__(self, name: str) -> Any:
        if name in self._facts:
            return self._facts[name](self._subject)
        head, _, rest = name.partition(".")
        if head in self._bound:
            return functools.reduce(getattr, filter(None, rest.split(".")), self._bound[head])
        asked = self._facts.get(f"{head}.")
        return self._read(name) if asked is None else asked(self._subject, rest)

    def __iter__(self) -> Iterator[str]:
        raise TypeError("names are looked up one by one")

    __len__ = __iter__  # type: ignore[assignment]

    def over(self, row: Row) -> Iterator[Values]:
        """These for a row, once for each of what it goes `over`, which has a name in them then."""
        names = row.get("over")
        for name, found in names.items() if names else ():
            for one in compiled(found)(self):
                yield Values(self._subject, self._facts, self._read, {name: one})
        if not names:
            yield self


def rows_of(rows: Iterable[Row], words: Mapping[str, str], table: Mapping[str, Iterable[Row]] = _NONE) -> Iterator[Row]:
    """Every row that is meant, where `words` stand for others in all of them; "of" names rows of the table."""
    for row in rows:
        for given in _given(row.get("each", [{}])):
            found = {key: _replaced(value, {**words, **given}) for key, value in row.items() if key != "each"}
            if "of" in found:
                yield from rows_of(table[found["of"]], {**words, **found}, table)
            else:
                yield found


def _given(each: Any) -> Iterator[Mapping[str, str]]:
    if isinstance(each, list):
        yield from each
        return
    for names, texts in each.items():
        words = names.split()
        yield from (dict(zip(words, text.split(" ", len(words) - 1), strict=True)) for text in texts)


def _replaced(node: Any, words: Mapping[str, str]) -> Any:
    if isinstance(node, str):
        said = _WORD.sub(lambda match: words.get(match[1], match[0]), node)
        return said if said == node else _replaced(said, words)
    if isinstance(node, list):
        return [_replaced(one, words) for one in node]
    if isinstance(node, dict):
        return {_replaced(key, words): _replaced(one, words) for key, one in node.items()}
    return node


def holds(row: Row, values: Values) -> bool:
    """Whether the condition of a row is true; one without a condition always is."""
    return "when" not in row or bool(compiled(row["when"])(values))


def filled(text: str, values: Values, formats: Formats = _FORMATS) -> str:
    """A text with the values that it names."""

    def value(match: re.Match[str]) -> str:
        form, found = match[2] or "", compiled(match[1])(values)
        write = formats.get(form) or _FORMATS.get(form)
        return format(found, form) if write is None else write(found)

    return EXPRESSION.sub(value, text)


def made(node: Any, values: Values) -> Any:
    """A tree with the values that it names: a text that is one expression becomes its value.

    An entry {"when": condition, "is": …} is left out where its condition is false; a key that begins with "..." adds
    the entries of a mapping.
    """
    if isinstance(node, str):
        match = EXPRESSION.fullmatch(node)
        return filled(node, values) if match is None or match[2] is not None else compiled(match[1])(values)
    if isinstance(node, list):
        return [made(one, values) for one in node]
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for key, value in node.items():
        is_choice = isinstance(value, dict) and value.keys() == {"when", "is"}
        if is_choice and not holds(value, values):
            continue
        one = made(value["is"] if is_choice else value, values)
        found |= one if key.startswith("...") else {key: one}
    return found
