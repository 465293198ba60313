"""A picture as Markdown: a heading, what it says, and its table or its drawing in characters."""

from __future__ import annotations

from collections.abc import Callable

from parcompile.show.markdown import fenced, plain, table

from . import memory, ring, timeline, traffic
from .named import as_text, picture
from .subject import Subject

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
