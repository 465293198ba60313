"""Markdown whose cells say what they were given, whatever characters it holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

_MARKUP = re.compile(r"([\\`*{}\[\]#|~@<>&]|\b_|_\b)")


def plain(text: object) -> str:
    """Text that means itself: nothing in it is markup, a mention, a link or a new line."""
    one_line = " ".join(str(text).split())
    # As entities: GitHub makes a mention of a backslashed @name all the same. A _ inside a word is no markup.
    return _MARKUP.sub(lambda found: f"&#{ord(found[1])};", one_line)


def table(rows: Sequence[Sequence[object]]) -> str:
    """A table; the first row is its head, and columns after the first are set to the right."""
    head, *rest = ([plain(cell) for cell in row] for row in rows)
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rest))


def fenced(text: str) -> str:
    """Text as it stands, in a fence that it does not close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}\n"


def folded(title: str, body: str) -> str:
    """A part that opens on a click."""
    return f"<details>\n<summary>{escape(title)}</summary>\n\n{body.rstrip()}\n\n</details>\n"
