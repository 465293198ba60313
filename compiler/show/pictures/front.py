"""Every picture by name, and that of a search: time against memory, where no layout beats the front in both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from parcompile.show.markdown import fenced, plain, table
from parcompile.units import GIB, format_bytes, format_seconds

from . import (
    WIDE,
    Box,
    Line,
    Picture,
    Plot,
    Sketch,
    Subject,
    grid,
    memory,
    rates,
    ring,
    splits,
    ticks,
    timeline,
    traffic,
)

_DOT, _LARGE_DOT = 5.0, 9.0
_FARTHEST = 3.0
_MOST = 300
"""Layouts that take more than so many times the shortest step would press the others together: they are left out, and
what is more than so many layouts."""


def draw(tree: Mapping[str, Any], width: float) -> Picture:
    """A point for each layout that fits, with its step to the right and its peak of memory upwards.

    Args:
        tree: what `parcompile search --format json` prints.
        width: in pixels.
    """
    fitting, front, best = tree["fitting"], tree["pareto_front"], tree["best"]
    shortest = min(one["step_seconds"] for one in fitting)
    near = [one for one in fitting if one["step_seconds"] <= _FARTHEST * shortest][:_MOST]
    near += [one for one in front if one not in near and one["step_seconds"] <= _FARTHEST * shortest]
    sketch = Sketch(width)
    sketch.legend([("activations", "chosen"), ("dp", "front"), ("framework", "other layouts that fit")])
    seconds, largest = [one["step_seconds"] for one in near], max(one["peak_bytes"] for one in near) / GIB
    low, high = min(seconds), max(max(seconds), min(seconds) * 1.01)
    plot = Plot(sketch, 52.0, 260.0, sketch.y + 8, (low, 0.0), (high - low, largest))
    for mark in ticks(largest, 5):
        plot.level(mark, f"{mark:g} GiB")
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        plot.mark(low + share * (high - low), format_seconds(low + share * (high - low)), anchor)

    def place(one: Mapping[str, Any]) -> tuple[float, float]:
        return plot.place(one["step_seconds"], one["peak_bytes"] / GIB)

    for one in near:
        _dot(sketch, place(one), _DOT, "framework", one)
    line = [place(one) for one in front if one in near]
    for (x1, y1), (x2, y2) in itertools.pairwise(line):
        sketch.add(Line(x1, y1, x2, y1, "dp", 2), Line(x2, y1, x2, y2, "dp", 2))
    for one in front:
        if one in near:
            _dot(sketch, place(one), _DOT + 2, "dp", one)
    _dot(sketch, place(best), _LARGE_DOT, "activations", best)
    left_out = len(fitting) - len(near)
    more = f"; {left_out:,} slower ones are left out" if left_out else ""
    description = f"{len(near):,} layouts that fit{more}. The front has {len(front)}: " + "; ".join(
        f"{format_seconds(one['step_seconds'])} in {format_bytes(one['peak_bytes'])}" for one in front[:8]
    )
    return sketch.picture("Time against memory", "Steps to the right, peaks of memory upwards.", description)


def _dot(sketch: Sketch, at: tuple[float, float], size: float, role: str, one: Mapping[str, Any]) -> None:
    layout = ", ".join(f"{name} {value}" for name, value in one["layout"].items() if not isinstance(value, bool))
    title = f"{layout}: {format_seconds(one['step_seconds'])}, {format_bytes(one['peak_bytes'])}"
    x, y = at
    sketch.add(Box(x - size / 2, y - size / 2, size, size, role, title, radius=size / 2))


# Every picture by name: `picture("memory", subject)`, and as text for a terminal or Markdown.


class PictureKind(NamedTuple):
    """A kind of picture; `rows` are those of its table, where it has one, `options` those of `axis` and `rank`."""

    draw: Callable[..., Picture]
    lines: Callable[..., list[str]]
    rows: Callable[[Subject], list[tuple[str, ...]]] | None = None
    options: tuple[str, ...] = ()


KINDS = {
    "grid": PictureKind(grid.draw, grid.lines, options=("axis", "rank")),
    "splits": PictureKind(splits.draw, splits.lines, options=("axis",)),
    "memory": PictureKind(memory.draw, memory.lines, memory.rows),
    "traffic": PictureKind(traffic.draw, traffic.lines, traffic.rows),
    "schedule": PictureKind(ring.draw, ring.lines, ring.rows),
    "timeline": PictureKind(timeline.draw, timeline.lines, timeline.rows),
    "rates": PictureKind(rates.draw, rates.lines, rates.rows),
}


def picture(
    name: str, subject: Subject, *, width: float = WIDE, axis: str | None = None, rank: int | None = None
) -> Picture:
    """A picture of a plan, `width` pixels wide.

    Args:
        name: one of `KINDS`.
        subject: the plan (`Subject.of(plan)`).
        width: in pixels, without margins.
        axis: what the grid is coloured by, or the only panel of `splits`.
        rank: the rank whose groups the grid lights up.

    Raises:
        ValueError: the picture does not take this option, or the axis or the rank does not exist.
    """
    kind = KINDS[name]
    given = {option: value for option, value in (("axis", axis), ("rank", rank)) if value is not None}
    for option in given:
        if option not in kind.options:
            raise ValueError(f"the picture {name} takes no --{option}")
    return kind.draw(subject, width, **given)


def as_text(name: str, subject: Subject, *, unicode: bool = True) -> str:
    """The picture in characters."""
    return "\n".join(KINDS[name].lines(subject, unicode=unicode)) + "\n"


def as_markdown(name: str, subject: Subject) -> str:
    """The picture for a README, an issue or a pull request: a heading, what it says, its table or its drawing.

    Raises:
        KeyError: there is no such picture.
    """
    drawn, rows = picture(name, subject), KINDS[name].rows
    body = table(rows(subject)) if rows else fenced(as_text(name, subject))
    parts = [f"### {plain(drawn.title)}\n", f"{plain(drawn.subtitle)}\n", body]
    if name == "schedule":
        parts.append(fenced(as_text(name, subject)))
    return "\n".join(parts)
