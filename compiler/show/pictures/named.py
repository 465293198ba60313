"""Every picture by name, as text for a terminal or Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parcompile.show.markdown import fenced, plain, table

from . import cuts, grid, memory, ring, timeline, traffic
from .shapes import WIDE, Picture
from .subject import Subject

# Every picture by name: `picture("memory", subject)`, and as text for a terminal or Markdown.


@dataclass(frozen=True, slots=True)
class PictureKind:
    """A kind of picture; `options` are those of `axis` and `rank` that it takes."""

    draw: Callable[..., Picture]
    lines: Callable[..., list[str]]
    options: tuple[str, ...] = ()


KINDS = {
    "grid": PictureKind(grid.draw, grid.lines, ("axis", "rank")),
    "cuts": PictureKind(cuts.draw, cuts.lines, ("axis",)),
    "memory": PictureKind(memory.draw, memory.lines),
    "traffic": PictureKind(traffic.draw, traffic.lines),
    "schedule": PictureKind(ring.draw, ring.lines),
    "timeline": PictureKind(timeline.draw, timeline.lines),
}


def picture(
    name: str, subject: Subject, *, width: float = WIDE, axis: str | None = None, rank: int | None = None
) -> Picture:
    """A picture of a plan, `width` pixels wide.

    Args:
        name: one of `KINDS`.
        subject: the plan (`Subject.of(plan)`).
        width: in pixels, without margins.
        axis: what the grid is coloured by, or the only panel of `cuts`.
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


# A picture as Markdown: a heading, what it says, and its table or its drawing in characters.

TABLES: dict[str, Callable[[Subject], list[tuple[str, ...]]]] = {
    "memory": memory.rows,
    "traffic": traffic.rows,
    "timeline": timeline.rows,
    "schedule": ring.rows,
}
"""Pictures that are tables as well."""


def as_markdown(name: str, subject: Subject) -> str:
    """The picture for a README, an issue or a pull request.

    Raises:
        KeyError: there is no such picture.
    """
    drawn = picture(name, subject)
    body = table(TABLES[name](subject)) if name in TABLES else fenced(as_text(name, subject))
    parts = [f"### {plain(drawn.title)}\n", f"{plain(drawn.subtitle)}\n", body]
    if name == "schedule":
        parts.append(fenced(as_text(name, subject)))
    return "\n".join(parts)
