"""The files in which a run tells of its steps, as they are written and read.

`metrics.jsonl` has one JSON object for each step, whose values are numbers; what is not finite is null. A figure of a
layer, a data set or a parameter group stands behind a slash: `router_load/3`. `run.json` says which plan ran from which
step on.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence

from parcompile.text import typed
from parcompile.units import MIB

METRICS, RUN = "metrics.jsonl", "run.json"
FORMAT = 1
"""Of run.json."""
MAX_BYTES = 512 * MIB
"""Of a metrics file: about a million steps."""
WINDOW, SPIKE = 16, 8.0
"""A loss or norm leaves what so many steps before it show by so many times their spread."""


def read_metrics(text: str) -> tuple[list[dict[str, float]], list[tuple[int, str]]]:
    """The rows of a metrics file, and the lines that are none: their numbers, from 1 on, and what they are instead.

    What is null is no number; values that are neither are left out. A last line that a killed run wrote in part is no
    line.
    """
    rows, damaged = [], []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            row = {
                name: math.nan if value is None else float(value)
                for name, value in one.items()
                if value is None or type(value) in (int, float)
            }
            rows.append({**row, "step": typed.integer(row["step"], "step", least=0)})
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError):  # noqa: PERF203
            if number < len(lines):
                damaged.append((number, f"is no row of metrics, whose step is a whole number from 0 on: {line[:60]!r}"))
    return rows, damaged


def usual(values: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Of each value from the one at `WINDOW` on, the middle of those before it and what it would leave them by."""
    for place in range(WINDOW, len(values)):
        before = values[place - WINDOW : place]
        middle = statistics.median(before)
        spread = statistics.median(abs(value - middle) for value in before)
        yield middle, middle + SPIKE * spread + 0.2 * abs(middle)
