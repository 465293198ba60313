"""Single pictures of a plan: drawn once as shapes, written as SVG, PNG, Markdown or text for a terminal.

What a picture is made of: boxes, cells, lines and text, in pixels from the top left, coloured by role.

A subject is what pictures are drawn of: a plan and what it is estimated to cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from parcompile.cost.estimate import Estimate, estimate
from parcompile.layout.groups import CP_LEVELS, DENSE_AXES, EMBEDDING, EXPERT_DP, KV_REPLICA, Axis
from parcompile.plan import Plan
from parcompile.spec.values import workload_of

WIDE, NARROW = 920, 340
"""Widths of a picture in pixels: for a page, and for a phone."""
SMALL, NORMAL, LARGE = 11.0, 13.0, 17.0
"""Sizes of text in pixels."""


class Box(NamedTuple):
    """A filled rectangle; `title` is what it says of itself."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""
    stroke: str = ""
    radius: float = 0.0


class Cells(NamedTuple):
    """Many equal rectangles of one colour, by their corners."""

    corners: tuple[tuple[float, float], ...]
    width: float
    height: float
    fill: str


class Area(NamedTuple):
    """A filled polygon."""

    corners: tuple[tuple[float, float], ...]
    fill: str


class Line(NamedTuple):
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str
    width: float = 1.0
    dashed: bool = False


class Text(NamedTuple):
    """One line of text; y is its baseline, `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = NORMAL
    fill: str = "ink"
    anchor: str = "start"
    strong: bool = False


Shape = Box | Cells | Area | Line | Text


class Picture(NamedTuple):
    """A picture with its headline; `description` says in words what it shows, for who cannot see it."""

    title: str
    subtitle: str
    description: str
    width: float
    height: float
    shapes: tuple[Shape, ...]

    @property
    def fills(self) -> set[str]:
        """Roles of areas and text."""
        return {shape.fill for shape in self.shapes if not isinstance(shape, Line)} | {"surface", "ink", "soft"}

    @property
    def strokes(self) -> set[str]:
        """Roles of lines."""
        return {shape.stroke for shape in self.shapes if isinstance(shape, (Line, Box))} - {""}


@dataclass(slots=True)
class Sketch:
    """Collects shapes from the top to the bottom; `y` is where the next one goes."""

    width: float
    y: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    @property
    def narrow(self) -> bool:
        """Whether there is room for one column only."""
        return self.width < 600

    def add(self, *shapes: Shape) -> None:
        """Draws shapes."""
        self.shapes += shapes

    def caption(self, text: str, *, strong: bool = False, size: float = NORMAL) -> None:
        """Text over the whole width, broken into lines."""
        for line in broken(text, self.width, size * (1.14 if strong else 1)):
            self.y += size * 1.4
            self.add(Text(0, self.y - size * 0.3, line, size, "ink" if strong else "soft", strong=strong))

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """Swatches of roles with their names, as many to a line as fit."""
        x, top = 0.0, self.y + 6
        for role, text in entries:
            needed = 18 + text_width(text, SMALL + 1) + 16
            if x and x + needed - 16 > self.width:
                x, top = 0.0, top + 19
            self.add(Box(x, top, 12, 12, role, radius=2), Text(x + 18, top + 10.5, text, SMALL + 1))
            x += needed
        self.y = top + 20

    def picture(self, title: str, subtitle: str, description: str) -> Picture:
        """The finished picture."""
        return Picture(title, subtitle, description, self.width, self.y + 4, tuple(self.shapes))


class Plot(NamedTuple):
    """Axes in a sketch, and where a value stands: as far to the right and upwards as it is from the lowest."""

    sketch: Sketch
    left: float
    height: float
    top: float
    lowest: tuple[float, float]
    spans: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Of a point."""
        (first, low), (wide, tall) = self.lowest, self.spans
        room = self.sketch.width - self.left - 12
        return self.left + (x - first) / wide * room, self.top + self.height * (1 - (y - low) / tall)

    def level(self, y: float, said: str) -> None:
        """A line across, with its value at the left."""
        _, at = self.place(self.lowest[0], y)
        self.sketch.add(Line(self.left, at, self.sketch.width - 12, at, "line"))
        self.sketch.add(Text(self.left - 6, at + 4, said, SMALL, "soft", "end"))

    def mark(self, x: float, said: str, anchor: str = "middle") -> None:
        """A value below the plot, behind which the sketch goes on."""
        bottom = self.top + self.height
        self.sketch.add(Text(self.place(x, self.lowest[1])[0], bottom + 18, said, SMALL, "soft", anchor))
        self.sketch.y = bottom + 34


def text_width(text: str, size: float = NORMAL) -> float:
    """About how wide a text is in a sans-serif face: pictures are drawn without measuring fonts."""
    narrow = sum(character in " .,:;'|ilIjtf()[]-·" for character in text)
    return size * (0.63 * (len(text) - narrow) + 0.36 * narrow)


def broken(text: str, width: float, size: float) -> list[str]:
    """Lines of a text that fit a width."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def fitted(text: str, width: float, size: float = NORMAL) -> str:
    """The text, cut to a width."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…" if text else ""


def ticks(longest: float, most: int = 6) -> tuple[float, ...]:
    """Round values from 0 up to `longest`: steps of 1, 2 or 5 times a power of ten."""
    if longest <= 0:
        return (0.0,)
    power = 10.0 ** math.floor(math.log10(longest / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if longest / (power * factor) <= most)
    return tuple(step * index for index in range(int(longest / step + 1e-9) + 1))


def reached(leaves_node: bool) -> str:
    """Where messages go."""
    return "between nodes" if leaves_node else "in a node"


AXIS_OF_GROUP: Mapping[str, Axis] = {
    KV_REPLICA: Axis.TP,
    EMBEDDING: Axis.PP,
    EXPERT_DP: Axis.EP,
    "dp-cp": Axis.DP,
    **dict.fromkeys(CP_LEVELS, Axis.CP),
}
"""The axis in whose colour a group's traffic is drawn, where it is not the group's own name."""


class Subject(NamedTuple):
    """A plan with its estimate."""

    plan: Plan
    estimate: Estimate

    @classmethod
    def of(cls, plan: Plan) -> Subject:
        """The plan, estimated.

        Raises:
            ValueError: the layout cannot be estimated.
        """
        return cls(plan, estimate(workload_of(plan.spec)))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks differ, innermost first; tp when there is one rank only."""
        parallelism = self.plan.spec.parallelism
        found = tuple(axis for axis in parallelism.order if axis in DENSE_AXES and parallelism.size(axis) > 1)
        return found or (Axis.TP,)
