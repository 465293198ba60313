"""The stages of an estimate as an SVG drawing: memory by component, time by micro-batch."""

from __future__ import annotations

from html import escape

from .estimate import Estimate

GIB = 1024**3
COLOURS = ("#3366cc", "#6699dd", "#dd8844", "#eebb77", "#aaaaaa", "#55aa77", "#cc5566", "#8877bb", "#bbbb66")
ROW, WIDTH, LEFT = 22, 640, 90


def svg(found: Estimate) -> str:
    """A drawing that any browser shows."""
    stages, times = found.memory.stages, found.time.step.stages
    names = list(stages[0].components)
    scale = max([stage.total_bytes for stage in stages] + [found.memory.limit_bytes or 0])
    shapes = [_text(LEFT, 16, f"memory of each stage, 90 % interval of the peak {_interval(found)}")]
    top = 26
    for stage in stages:
        left = float(LEFT)
        shapes.append(_text(4, top + 15, f"stage {stage.stage}"))
        for name, colour in zip(names, COLOURS, strict=True):
            width = WIDTH * stage.components[name] / scale
            title = f"{name}: {stage.components[name] / GIB:.2f} GiB"
            shapes.append(_box(left, top, width, colour, title))
            left += width
        shapes.append(_text(left + 6, top + 15, f"{stage.total_bytes / GIB:.1f} GiB"))
        top += ROW
    if found.memory.limit_bytes is not None:
        line = LEFT + WIDTH * found.memory.limit_bytes / scale
        shapes.append(f'<path d="M{line:.1f} 22V{top}" stroke="#cc0000" stroke-dasharray="4"/>')
    for index, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        row, column = divmod(index, 3)
        shapes.append(_box(LEFT + column * 220, top + 8 + row * 18, 12, colour, name, height=12))
        shapes.append(_text(LEFT + column * 220 + 18, top + 18 + row * 18, name))
    top += 8 + 18 * 3 + 24
    shapes.append(_text(LEFT, top, f"busy time of each stage for one micro-batch; a step takes {_seconds(found)}"))
    top += 10
    longest = max(times)
    for index, seconds in enumerate(times):
        shapes.append(_text(4, top + 15, f"stage {index}"))
        shapes.append(_box(LEFT, top, WIDTH * seconds / longest, COLOURS[0], f"{seconds:.4f} s"))
        shapes.append(_text(LEFT + WIDTH * seconds / longest + 6, top + 15, f"{seconds:.3f} s"))
        top += ROW
    size = f'width="{LEFT + WIDTH + 90}" height="{top + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, *shapes, "</svg>"]) + "\n"


def _interval(found: Estimate) -> str:
    low, high = found.memory.interval_bytes
    return f"{low / GIB:.1f} to {high / GIB:.1f} GiB"


def _seconds(found: Estimate) -> str:
    low, high = found.time.interval_seconds
    return f"{found.time.step.seconds:.3f} s, 90 % interval {low:.3f} to {high:.3f} s"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, colour: str, title: str, height: int = ROW - 4) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"'
    return f"<rect {place}><title>{escape(title)}</title></rect>"
