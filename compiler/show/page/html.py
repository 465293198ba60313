"""HTML that escapes everything it is given, except HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Html


def tag(name: str, *content: Content, **attributes: object) -> Html:
    """An element; attributes that are None or False are left out, `class_` is class, `aria_label` is aria-label."""
    head = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        head += f" {label}" if value is True else f' {label}="{escape(str(value))}"'
    return Html(f"<{head}>{joined(content)}</{name}>")


def joined(content: Iterable[Content]) -> Html:
    """Pieces one after the other, escaped unless they are HTML."""
    return Html("".join(one if isinstance(one, Html) else escape(one, quote=False) for one in content))


def with_code(text: str) -> list[Content]:
    """Text of messages: what stands between backticks is code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return [text]
    return [tag("code", part) if index % 2 else part for index, part in enumerate(parts)]


def table(rows: Sequence[Sequence[Content]], *, caption: str, **attributes: object) -> Html:
    """A table whose first row is its head, in a frame that scrolls when it is too wide.

    Roles are spelled out: a table that is stacked on a phone stays a table for who hears it.
    """
    head = tag("tr", *(tag("th", cell, scope="col", role="columnheader") for cell in rows[0]), role="row")
    body = joined(tag("tr", *(tag("td", cell, role="cell") for cell in row), role="row") for row in rows[1:])
    parts = (tag("caption", caption), tag("thead", head, role="rowgroup"), tag("tbody", body, role="rowgroup"))
    inner = tag("table", *parts, role="table", **attributes)
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def folded(title: str, *content: Content) -> Html:
    """A part that opens on a click."""
    return tag("details", tag("summary", title), *content)


def script_json(tree: object) -> Html:
    """JSON that can stand inside a script element: nothing in it ends the element or starts a comment."""
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
