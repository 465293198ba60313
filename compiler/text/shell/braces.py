"""Brace expansion of whole words: `{1..4}` and `{a,b}`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .values import Piece, Value, known

MAX_ITERATIONS = 16
"""Numbers of a range, and turns of a loop, that are followed."""


def braces(values: tuple[Value, ...]) -> Iterable[Value]:
    """`{1..4}` and `{a,b}` as a whole word."""
    for value in values:
        text = known(value) or ""
        numbers = re.fullmatch(r"\{(-?\d+)\.\.(-?\d+)\}", text)
        listed = re.fullmatch(r"\{([^{}\s]+,[^{}\s]*)\}", text)
        start = value[0].start if value else None
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            step = 1 if last >= first else -1
            last = min(last, first + MAX_ITERATIONS) if step == 1 else max(last, first - MAX_ITERATIONS)
            yield from ((Piece(str(one), start),) for one in range(first, last + step, step))
        elif listed:
            yield from ((Piece(one, start),) for one in listed[1].split(","))
        else:
            yield value
