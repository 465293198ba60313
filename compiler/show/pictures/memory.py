"""The memory of each pipeline stage's ranks: stacked bars against what the accelerator has, with the interval."""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.cost.footprint import stage_interval
from parcompile.cost.table import fit_text, memory_bars, memory_rows
from parcompile.units import GIB, format_bytes

from . import SMALL, Box, Line, Picture, Sketch, Subject, Text, text_width, ticks
from .svg import COLOURS

ROLES: Mapping[str, str] = COLOURS["memory"]
"""Of the parts of a rank's memory, from the first one drawn to the last."""


def draw(subject: Subject, width: float) -> Picture:
    """A bar for each stage; what is exact is blue, what is estimated orange."""
    memory, work = subject.estimate.memory, subject.estimate.work
    sketch = Sketch(width)
    stages, limit = memory.stages, memory.limit_bytes
    intervals = [stage_interval(work, stage) for stage in stages]
    row, bar = (30.0, 18.0) if len(stages) <= 16 else (18.0, 11.0)
    left = text_width(f"stage {len(stages) - 1}") + 10
    right = text_width("000.00 GiB") + 20
    longest = max([high for _, high in intervals] + [stage.total_bytes for stage in stages] + [limit or 0.0])
    scale = (width - left - right) / longest
    top = 22.0 if limit else 4.0
    bottom = top + row * len(stages)
    marks = ticks(longest / GIB, 4 if sketch.narrow else 8)
    for value in marks:
        x = left + value * GIB * scale
        sketch.add(Line(x, top, x, bottom, "line"))
        sketch.add(Text(x, bottom + 14, f"{value:g}{' GiB' * (value == marks[-1])}", SMALL, "soft", "middle"))
    for index, (stage, (low, high)) in enumerate(zip(stages, intervals, strict=True)):
        y = top + index * row + (row - bar) / 2
        sketch.add(Text(0, y + bar / 2 + 4.5, f"stage {stage.stage}", fill="soft"))
        x = left
        for name, size in stage.components.items():
            if size:
                label = f"stage {stage.stage}, {name}: {format_bytes(size)}"
                sketch.add(Box(x, y, size * scale, bar, ROLES[name], label))
                x += size * scale
        middle = y + bar / 2
        for x1, y1, x2, y2 in (
            (low * scale, middle, high * scale, middle),
            (low * scale, middle - 5, low * scale, middle + 5),
            (high * scale, middle - 5, high * scale, middle + 5),
        ):
            sketch.add(Line(left + x1, y1, left + x2, y2, "ink", 1.6))
        sketch.add(Text(width, y + bar / 2 + 4.5, format_bytes(stage.total_bytes), anchor="end", strong=True))
    if limit:
        x = left + limit * scale
        sketch.add(Line(x, top - 4, x, bottom + 4, "bad", 2.0, dashed=True))
        anchor = "end" if x > width * 0.6 else "start"
        sketch.add(Text(x, top - 9, f"usable {format_bytes(limit)}", SMALL + 1, "bad", anchor, strong=True))
    sketch.y = bottom + 20
    sketch.legend([(ROLES[row[0]], row[0]) for row in rows(subject)[1:-1]])
    blue = "Blue is exact, byte for byte; the rest is estimated. The whisker is the 90 % interval."
    sketch.caption(blue, size=SMALL + 1)
    peak = memory.peak
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak.components.items() if size)
    total, exact = format_bytes(peak.total_bytes), format_bytes(peak.static_bytes)
    said = f"The fullest stage {peak.stage} holds {total}, {exact} of it exact: {parts}"
    return sketch.picture("Memory of a rank, by pipeline stage", verdict(subject), said)


def verdict(subject: Subject) -> str:
    """The peak, its interval and whether it fits, in one sentence."""
    memory = subject.estimate.memory
    peak, low, high = map(format_bytes, (memory.peak.total_bytes, *memory.interval_bytes))
    text = f"Peak {peak} on stage {memory.peak.stage}, 90 % interval {low} to {high}"
    fit = fit_text(subject.estimate.work, memory)
    return f"{text}; {fit}" if fit else text


def lines(subject: Subject, *, unicode: bool = True) -> list[str]:
    """For a terminal: the bars, and the parts of the fullest stage."""
    found = subject.estimate
    return [*memory_bars(found, unicode=unicode), "", *memory_rows(found.memory.peak.components)]


def rows(subject: Subject) -> list[tuple[str, ...]]:
    """As a table: a row for each component, a column for each stage."""
    stages = subject.estimate.memory.stages
    names = [name for name in ROLES if any(stage.components.get(name) for stage in stages)]
    head = ("component", *(f"stage {stage.stage}" for stage in stages))
    parts = [(name, *(format_bytes(stage.components[name]) for stage in stages)) for name in names]
    return [head, *parts, ("all", *(format_bytes(stage.total_bytes) for stage in stages))]
