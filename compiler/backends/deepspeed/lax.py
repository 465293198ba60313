"""How DeepSpeed reads a value: pydantic's lax mode for its classes, as it stands from plain dictionaries.

A type is written as in keys.json: {"type": "int", "gt": 0}. The rules of pydantic 2 are those of its conversion table;
pydantic 1, which DeepSpeed used before 0.15.2, cuts the fraction off a whole number.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .table import broken, find, newest

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_WHOLE = re.compile(r"[+-]?\d+(?:_\d+)*(?:\.0+)?")
_DIGITS = 4300
"""So many neither Python nor pydantic reads."""
_LARGEST = 2.0**63
"""A number with a fraction part becomes a whole one only below this."""


class How(enum.Enum):
    """What becomes of a value."""

    SAME = "taken as it is"
    CONVERTED = "read as another value"
    REFUSED = "refused"


class Read(NamedTuple):
    """A value after it was read. `why` names what a refused one violates: "type", "bound" or "choice"."""

    how: How
    value: Any = None
    why: str = ""


_REFUSED = Read(How.REFUSED, why="type")


def read(value: Any, facts: Mapping[str, Any], pydantic: int = 2) -> Read:
    """`value` as a field of a pydantic class reads it. Sections are only asked to be objects."""
    kind = facts.get("type", "any")
    if value is None:
        allowed = facts.get("null") or kind in ("any", "none")
        return Read(How.SAME) if allowed else _REFUSED
    if kind == "union":
        return _union(value, facts["of"], pydantic)
    found = _READERS[kind](value, facts, pydantic)
    return _within(found, facts) if found.how is not How.REFUSED else found


def _union(value: Any, parts: list[Mapping[str, Any]], pydantic: int) -> Read:
    found = [read(value, part, pydantic) for part in parts]
    exact = next((one for one in found if one.how is How.SAME), None)
    return exact or next((one for one in found if one.how is How.CONVERTED), _REFUSED)


def _bool(value: Any, facts: Mapping[str, Any], pydantic: int) -> Read:  # noqa: ARG001
    if isinstance(value, bool):
        return Read(How.SAME, value)
    if isinstance(value, (int, float)) and value in (0, 1):
        return Read(How.CONVERTED, bool(value))
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return Read(How.CONVERTED, value.lower() in _TRUE)
    return _REFUSED


def _int(value: Any, facts: Mapping[str, Any], pydantic: int) -> Read:  # noqa: ARG001
    if isinstance(value, bool):
        return Read(How.CONVERTED, int(value))
    if isinstance(value, int):
        return Read(How.SAME, value)
    if isinstance(value, float) and abs(value) < _LARGEST:
        if value == int(value):
            return Read(How.SAME, int(value))
        return Read(How.CONVERTED, int(value)) if pydantic == 1 else _REFUSED
    if isinstance(value, str) and len(value) < _DIGITS:
        text = value.strip()
        if pydantic == 2 and _WHOLE.fullmatch(text):
            return Read(How.CONVERTED, int(text.split(".")[0]))
        if pydantic == 1 and "." not in text and _WHOLE.fullmatch(text):
            return Read(How.CONVERTED, int(text))
    return _REFUSED


def _float(value: Any, facts: Mapping[str, Any], pydantic: int) -> Read:  # noqa: ARG001
    if isinstance(value, bool):
        return Read(How.CONVERTED, float(value))
    if isinstance(value, (int, float)):
        return Read(How.SAME, value)
    if isinstance(value, str):
        try:
            return Read(How.CONVERTED, float(value))
        except ValueError:
            return _REFUSED
    return _REFUSED


def _text(value: Any, facts: Mapping[str, Any], pydantic: int) -> Read:  # noqa: ARG001
    if isinstance(value, str):
        return Read(How.SAME, value)
    if pydantic == 1 and isinstance(value, (int, float)) and not isinstance(value, bool):
        return Read(How.CONVERTED, str(value))
    return _REFUSED


def _choice(value: Any, facts: Mapping[str, Any], pydantic: int) -> Read:  # noqa: ARG001
    for one in facts["in"]:
        if one == value and (isinstance(one, bool) == isinstance(value, bool)):
            return Read(How.SAME, one)
    if facts.get("enum"):
        for one in facts["in"]:
            if isinstance(one, int) and isinstance(value, (bool, str)) and _int(value, {}, 2).value == one:
                return Read(How.CONVERTED, one)
    return Read(How.REFUSED, why="choice")


def _list(value: Any, facts: Mapping[str, Any], pydantic: int) -> Read:
    if not isinstance(value, list):
        return _REFUSED
    if "of" in facts and any(read(one, facts["of"], pydantic).how is How.REFUSED for one in value):
        return Read(How.REFUSED, why="entry")
    return Read(How.SAME, value)


_READERS: Mapping[str, Callable[[Any, Mapping[str, Any], int], Read]] = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "str": _text,
    "path": _text,
    "choice": _choice,
    "list": _list,
    **dict.fromkeys(
        ("dict", "section"), lambda value, *_: Read(How.SAME, value) if isinstance(value, dict) else _REFUSED
    ),
    "any": lambda value, *_: Read(How.SAME, value),
    **dict.fromkeys(("class", "none"), lambda *_: _REFUSED),
}


def _within(found: Read, facts: Mapping[str, Any]) -> Read:
    value = found.value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and any(broken(value, facts)):
        return Read(How.REFUSED, why="bound")
    if isinstance(value, list):
        wrong = ("length" in facts and len(value) != facts["length"]) or len(value) < facts.get("least", 0)
        if wrong:
            return Read(How.REFUSED, why="length")
    return found


# -- plain dictionaries ------------------------------------------------------------------------------------------------


def as_written(value: Any, facts: Mapping[str, Any]) -> Read:
    """`value` as DeepSpeed has it after a look into a plain dictionary: as it stands.

    What has another type than the key is meant to have is refused, because it fails later or means something else. Text
    that is no truth value counts as true, as Python has it.
    """
    kind = facts.get("type", "any")
    if value is None:
        allowed = facts.get("null") or kind in ("any", "none") or facts.get("default", 0) is None
        return Read(How.SAME) if allowed else _REFUSED
    if kind == "union":
        found = [as_written(value, part) for part in facts["of"]]
        return next((one for one in found if one.how is not How.REFUSED), _REFUSED)
    if kind == "bool" and isinstance(value, str):
        return _REFUSED if value.lower() in _FALSE | {""} else Read(How.CONVERTED, value=True)
    if kind in ("bool", "int", "float") and (isinstance(value, str) or (kind != "bool" and isinstance(value, bool))):
        return _REFUSED
    if kind == "bool" and isinstance(value, (int, float)):
        return Read(How.SAME if value in (0, 1) else How.CONVERTED, bool(value))
    if kind == "list" and "of" in facts and isinstance(value, list):
        if any(as_written(one, facts["of"]).how is How.REFUSED for one in value):
            return Read(How.REFUSED, why="entry")
        return _within(Read(How.SAME, value), facts)
    return read(value, facts)


def is_on(path: str, value: Any) -> bool:
    """Whether a switch is on, as DeepSpeed reads what stands at its dotted path; it refuses what it cannot read."""
    key = find(newest(), *path.split("."))
    return bool(value) and (key is None or key.loose or read(value, key.facts).value is not False)
