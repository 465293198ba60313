"""What JSON and YAML have in common: numbers, texts in messages, keys that are written twice."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from parcompile.diagnostics import Diagnostic, Path, Severity

from .document import SourceText

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


def template(source: SourceText, placeholders: Sequence[tuple[str, int]]) -> Diagnostic:
    """Words that stand for values, with their offsets: all of them in one finding."""
    names = list(dict.fromkeys(word for word, _ in placeholders))
    listed = ", ".join(shown(name) for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    stand = "stands for a value" if len(names) == 1 else "stand for values"
    return source.problem(
        "J017",
        f"a template: {listed} {stand}",
        placeholders[0][1],
        advice="fill in the values, then check the result",
        related=tuple((f"{shown(word)} here", (), offset) for word, offset in placeholders[1:20]),
    )
