"""A picture as PNG, painted by matplotlib (the extra [pictures])."""

from __future__ import annotations

import io
from typing import Any

from parcompile.version import how_to_install

from .colours import colour
from .shapes import Area, Box, Cells, Line, Picture, Shape
from .svg import MARGIN, headline

SCALE = 2
"""Pixels of the file for one of the picture: sharp on dense screens."""


class PngError(RuntimeError):
    """A PNG cannot be made here; the message says what to install."""


def png(picture: Picture, *, dark: bool = False) -> bytes:
    """The picture as a PNG file, in the light colours unless `dark`.

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
    figure = Figure(figsize=(width / 72, height / 72), dpi=72 * SCALE, facecolor=colour("surface", dark=dark))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for shape in head:
        _paint(axes, shape, 0, 0, dark=dark)
    for shape in picture.shapes:
        _paint(axes, shape, MARGIN, top, dark=dark)
    stream = io.BytesIO()
    FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None})
    return stream.getvalue()


def _paint(axes: Any, shape: Shape, dx: float, dy: float, *, dark: bool) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Polygon, Rectangle

    if isinstance(shape, Box):
        edge = colour(shape.stroke, dark=dark) if shape.stroke else "none"
        place = (shape.x + dx, shape.y + dy)
        axes.add_patch(
            Rectangle(place, shape.width, shape.height, facecolor=colour(shape.fill, dark=dark), edgecolor=edge)
        )
    elif isinstance(shape, Cells):
        cells = [Rectangle((x + dx, y + dy), shape.width, shape.height) for x, y in shape.corners]
        axes.add_collection(PatchCollection(cells, facecolor=colour(shape.fill, dark=dark), edgecolor="none"))
    elif isinstance(shape, Area):
        corners = [(x + dx, y + dy) for x, y in shape.corners]
        axes.add_patch(Polygon(corners, facecolor=colour(shape.fill, dark=dark), edgecolor="none"))
    elif isinstance(shape, Line):
        axes.plot(
            [shape.x1 + dx, shape.x2 + dx],
            [shape.y1 + dy, shape.y2 + dy],
            color=colour(shape.stroke, dark=dark),
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
            color=colour(shape.fill, dark=dark),
            ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            va="baseline",
            fontweight="bold" if shape.strong else "normal",
        )
