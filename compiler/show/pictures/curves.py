"""Figures over the steps of a run as lines, with what was predicted as a band behind them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from . import SMALL, Area, Line, Picture, Plot, Sketch, text_width

Points = Sequence[tuple[float, float]]

_MOST = 400
"""Points of a line; of more, the least and the largest of each stretch stay."""
_MARKS = 4
_DOT = 2.0


def draw(
    title: str,
    lines: Mapping[str, tuple[str, Points]],
    width: float,
    *,
    subtitle: str = "",
    band: tuple[str, float, float] | None = None,
    unit: Callable[[float], str] = "{:.3g}".format,
) -> Picture:
    """One picture of lines over steps. What is not finite is left out, and the line is broken there.

    Args:
        title: of the picture.
        lines: by name, the role of the colour and the points (step, value).
        width: in pixels.
        subtitle: a sentence below the title.
        band: name, lower and upper end of what was predicted.
        unit: how a value is written.
    """
    finite = [point for _, points in lines.values() for point in points if math.isfinite(point[1])]
    steps = [step for step, _ in finite] or [0.0]
    values = [value for _, value in finite] + [end for end in (band or ())[1:] if isinstance(end, float)] or [0.0]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    tall, wide = high - low or abs(high) or 1.0, last - first or 1.0
    sketch = Sketch(width)
    entries = [(role, name) for name, (role, _) in lines.items()]
    if len(lines) > 1 or band is not None:
        sketch.legend([*entries, *([("track", band[0])] if band is not None else [])])
    marks = [low + tall * part / _MARKS for part in range(_MARKS + 1)]
    left = max(text_width(unit(one), SMALL) for one in marks) + 10
    plot = Plot(sketch, left, 240.0, sketch.y + 10, (first, low), (wide, tall))
    if band is not None:
        (x1, y1), (x2, y2) = plot.place(first, band[1]), plot.place(first + wide, band[2])
        sketch.add(Area(((x1, y1), (x2, y1), (x2, y2), (x1, y2)), "track"))
    for value in marks:
        plot.level(value, unit(value))
    for step in sorted({round(first + wide * part / _MARKS) for part in range(_MARKS + 1)}):
        if step <= last:
            plot.mark(step, f"{step:,}")
    for role, points in lines.values():
        shown = [plot.place(*one) if math.isfinite(one[1]) else None for one in _thinned(points)]
        for before, after in itertools.pairwise(shown):
            if before is not None and after is not None:
                sketch.add(Line(*before, *after, role, 2))
        if len(shown) == 1 and shown[0] is not None:
            x, y = shown[0]
            sketch.add(Line(x - _DOT, y, x + _DOT, y, role, 2 * _DOT))
    said = "; ".join(f"{name}: {_words(points, unit)}" for name, (_, points) in lines.items())
    return sketch.picture(title, subtitle, said)


def _thinned(points: Points) -> Points:
    """The points, or of many the least and the largest of each stretch, in their order."""
    if len(points) <= _MOST:
        return points
    found: list[tuple[float, float]] = []
    size = math.ceil(2 * len(points) / _MOST)
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [point for point in stretch if math.isfinite(point[1])]
        broken = [point for point in stretch if not math.isfinite(point[1])][:1]
        ends = {min(finite, key=lambda one: one[1]), max(finite, key=lambda one: one[1])} if finite else set()
        found += sorted([*ends, *broken], key=lambda one: one[0])
    return found


def _words(points: Points, unit: Callable[[float], str]) -> str:
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return "no finite value"
    (first, start), (last, end) = finite[0], finite[-1]
    return f"{unit(start)} at step {first:,.0f}, {unit(end)} at step {last:,.0f}"


def spark(values: Sequence[float], width: int, *, unicode: bool) -> str:
    """The course of values in one line of characters: bars, or digits from 0, the lowest, to 9, the highest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    levels = "▁▂▃▄▅▆▇█" if unicode else "0123456789"
    low, tall = min(finite), max(finite) - min(finite) or 1.0
    size = math.ceil(len(finite) / width)
    means = [sum(part) / len(part) for at in range(0, len(finite), size) if (part := finite[at : at + size])]
    return "".join(levels[round((mean - low) / tall * (len(levels) - 1))] for mean in means)
