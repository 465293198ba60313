"""A picture as SVG, a file of its own or a part of a page, and as PNG (the extra [pictures])."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from parcompile.layout.groups import Axis
from parcompile.user_files import shipped
from parcompile.version import how_to_install

from . import LARGE, NORMAL, Area, Box, Cells, Line, Picture, Shape, Text, broken

SHADES = 16

COLOURS = shipped("parcompile.show.pictures", "colours.json")
"""Colours by role, and the roles of the parts of memory and of a step."""
LIGHT: Mapping[str, str] = COLOURS["light"]

DARK: Mapping[str, str] = COLOURS["dark"]

_RAMPS: Mapping[str, Sequence[Sequence[str]]] = COLOURS["ramps"]
"""Of each axis the lightest, the middle and the darkest shade in light, and the other way round in dark."""


def shade(axis: Axis, index: int, size: int) -> str:
    """The role of the `index`-th of `size` coordinates along an axis."""
    # Few coordinates keep away from the ends, which are nearly white and nearly black.
    margin = max(0, 4 - size // 2)
    place = SHADES // 2 if size <= 1 else margin + index * (SHADES - 1 - 2 * margin) // (size - 1)
    return f"{axis}-{place}"


def colour(role: str, *, dark: bool = False) -> str:
    """The colour of a role as #rrggbb; `on:ROLE` is ink that can be read on it."""
    scheme = DARK if dark else LIGHT
    if role.startswith("on:"):
        below = colour(role[3:], dark=dark)
        return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, below))
    if role in scheme:
        return scheme[role]
    axis, _, place = role.rpartition("-")
    low, middle, high = _RAMPS[axis][dark]
    share = int(place) / (SHADES - 1) * 2
    return _mixed(low, middle, share) if share <= 1 else _mixed(middle, high, share - 1)


def contrast(one: str, other: str) -> float:
    """How far two colours can be told apart, from 1 to 21 (WCAG 2.2, 1.4.3)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def rules(fills: Iterable[str], strokes: Iterable[str], *, dark: bool = False) -> str:
    """CSS that gives the classes of shapes their colours."""
    found = [f".f-{name(role)}{{fill:{colour(role, dark=dark)}}}" for role in sorted(set(fills))]
    found += [f".s-{name(role)}{{stroke:{colour(role, dark=dark)}}}" for role in sorted(set(strokes))]
    return "".join(found)


def name(role: str) -> str:
    """A role as a class of CSS."""
    return role.replace(":", "-")


def _mixed(one: str, other: str, share: float) -> str:
    mixed = (round(a + (b - a) * share) for a, b in zip(_channels(one), _channels(other), strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _channels(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _luminance(text: str) -> float:
    shares = (channel / 255 for channel in _channels(text))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# A picture as SVG: a file of its own that follows the reader's light or dark, or a part of a page.

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MARGIN = 16


def svg(*pictures: Picture) -> str:
    """A file: pictures below each other with headlines, background and colours of their own."""
    width, height = max(one.width for one in pictures) + 2 * MARGIN, 0.0
    body = []
    for one in pictures:
        head, top = headline(one)
        body += [
            f'<g transform="translate(0 {_n(height)})">',
            *map(_shape, head),
            f'<g transform="translate({MARGIN} {_n(top)})">',
            *map(_shape, one.shapes),
            "</g></g>",
        ]
        height += top + one.height + MARGIN
    fills, strokes = (set().union(*sets) for sets in zip(*((one.fills, one.strokes) for one in pictures), strict=True))
    colours = f"{rules(fills, strokes)}@media(prefers-color-scheme:dark){{{rules(fills, strokes, dark=True)}}}"
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    label = " ".join(_label(one) for one in pictures)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">',
            f"<style>text{{font-family:{FONT}}}{colours}</style>",
            '<rect class="f-surface" width="100%" height="100%" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def inline(picture: Picture) -> str:
    """A part of a page, which has the headline and the colours (`colours.rules`) itself."""
    box = f'viewBox="0 0 {_n(picture.width)} {_n(picture.height)}"'
    return f'<svg {box} role="img" aria-label="{_label(picture)}">{"".join(map(_shape, picture.shapes))}</svg>'


def headline(picture: Picture) -> tuple[list[Shape], float]:
    """Title and subtitle at the top of a picture, and the height that they take."""
    shapes: list[Shape] = []
    y = float(MARGIN)
    for text, size, fill in ((picture.title, LARGE, "ink"), (picture.subtitle, NORMAL, "soft")):
        for line in broken(text, picture.width, size * (1.06 if fill == "ink" else 1)) if text else ():
            y += size * 1.4
            shapes.append(Text(MARGIN, y - size * 0.35, line, size, fill, strong=fill == "ink"))
    return shapes, y + 8


def _label(picture: Picture) -> str:
    return escape(f"{picture.title}. {picture.description}")


def _shape(shape: Shape) -> str:
    if isinstance(shape, Box):
        roles = f"f-{name(shape.fill)} s-{name(shape.stroke)}" if shape.stroke else f"f-{name(shape.fill)}"
        place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"'
        radius = f' rx="{_n(shape.radius)}"' if shape.radius else ""
        inner = f"><title>{escape(shape.title)}</title></rect>" if shape.title else "/>"
        return f'<rect class="{roles}" {place}{radius}{inner}'
    if isinstance(shape, Cells):
        width, height = _n(shape.width), _n(shape.height)
        path = "".join(f"M{_n(x)} {_n(y)}h{width}v{height}h-{width}z" for x, y in shape.corners)
        return f'<path class="f-{name(shape.fill)}" d="{path}"/>'
    if isinstance(shape, Area):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.corners)
        return f'<polygon class="f-{name(shape.fill)}" points="{points}"/>'
    if isinstance(shape, Line):
        place = f'x1="{_n(shape.x1)}" y1="{_n(shape.y1)}" x2="{_n(shape.x2)}" y2="{_n(shape.y2)}"'
        more = f' stroke-width="{_n(shape.width)}"' if shape.width != 1 else ""
        more += ' stroke-dasharray="5 4"' if shape.dashed else ""
        return f'<line class="s-{name(shape.stroke)}" {place}{more}/>'
    anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    weight = ' font-weight="600"' if shape.strong else ""
    place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" font-size="{_n(shape.size)}"'
    return f'<text class="f-{name(shape.fill)}" {place}{anchor}{weight}>{escape(shape.text)}</text>'


def _n(value: float) -> str:
    """A number of pixels, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


# A picture as PNG, painted by matplotlib (the extra [pictures]).

SCALE = 2
"""Pixels of the file for one of the picture: sharp on dense screens."""


class PngError(RuntimeError):
    """A PNG cannot be made here; the message says what to install."""


def png(picture: Picture) -> bytes:
    """The picture as a PNG file, in the light colours.

    Raises:
        PngError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PngError(f"PNG needs matplotlib: {how_to_install('pictures')}, or write SVG instead") from None
    head, top = headline(picture)
    width, height = picture.width + 2 * MARGIN, top + picture.height + MARGIN
    # 72 points of matplotlib's to the inch, so that one of them is one pixel of the picture.
    figure = Figure(figsize=(width / 72, height / 72), dpi=72 * SCALE, facecolor=colour("surface"))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for shape in head:
        _paint(axes, shape, 0, 0)
    for shape in picture.shapes:
        _paint(axes, shape, MARGIN, top)
    stream = io.BytesIO()
    FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None})
    return stream.getvalue()


def _paint(axes: Any, shape: Shape, dx: float, dy: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Polygon, Rectangle

    if isinstance(shape, Box):
        edge = colour(shape.stroke) if shape.stroke else "none"
        place, fill = (shape.x + dx, shape.y + dy), colour(shape.fill)
        axes.add_patch(Rectangle(place, shape.width, shape.height, facecolor=fill, edgecolor=edge))
    elif isinstance(shape, Cells):
        cells = [Rectangle((x + dx, y + dy), shape.width, shape.height) for x, y in shape.corners]
        axes.add_collection(PatchCollection(cells, facecolor=colour(shape.fill), edgecolor="none"))
    elif isinstance(shape, Area):
        corners = [(x + dx, y + dy) for x, y in shape.corners]
        axes.add_patch(Polygon(corners, facecolor=colour(shape.fill), edgecolor="none"))
    elif isinstance(shape, Line):
        axes.plot(
            [shape.x1 + dx, shape.x2 + dx],
            [shape.y1 + dy, shape.y2 + dy],
            color=colour(shape.stroke),
            linewidth=shape.width,
            linestyle=(0, (5, 4)) if shape.dashed else "-",
        )
    else:
        axes.text(
            shape.x + dx,
            shape.y + dy,
            # A dollar sign is a dollar sign here, not mathematics.
            shape.text.replace("$", r"\$"),
            fontsize=shape.size * 0.94,
            color=colour(shape.fill),
            ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            va="baseline",
            fontweight="bold" if shape.strong else "normal",
        )
