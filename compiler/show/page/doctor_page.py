"""The verdict of `parcompile doctor` as a page, with what each rank did last."""

from __future__ import annotations

from parcompile.doctor import Verdict
from parcompile.doctor.reading import KINDS, Evidence

from .render import framed
from .sections import joined, section, table, tag, with_code

MOST_RANKS = 256
"""Shown, those of the verdict first."""


def doctor_page(verdict: Verdict, found: Evidence) -> str:
    """The verdict as HTML."""
    parts = [section("verdict", "Verdict", table([("place", "value"), *verdict.places().items()], caption="Where"))]
    for name, title, lines in (("evidence", "Evidence", verdict.evidence), ("todo", "What to do", verdict.advice)):
        parts.append(section(name, title, tag("ul", *(tag("li", *with_code(one)) for one in lines))))
    ranks = sorted(found.ranks.values(), key=lambda one: (one.rank not in verdict.ranks, one.rank))[:MOST_RANKS]
    rows = [("rank", "last message", "step", "state", "its end")]
    for one in ranks:
        last = one.messages[-1] if one.messages else None
        place = ("none", "", "")
        if last is not None:
            place = (str(last), "" if last.step is None else str(last.step), last.state)
        rows.append((str(one.rank), *place, "; ".join(one.events)[:300]))
    parts.append(section("ranks", "Ranks", table(rows, caption="What each rank did last", class_="stacked")))
    unread = verdict.read.get("unreadable", {})
    said = [tag("p", f"{verdict.read.get('files', 0)} files: {verdict.read.get('said', '')}")]
    said += [table([("not read", "why"), *unread.items()], caption="Files that were not read")] if unread else []
    parts.append(section("read", "What was read", *said))
    return framed(
        title=KINDS[verdict.kind],
        kind="run",
        summary=verdict.summary,
        links=[("verdict", "Verdict"), ("evidence", "Evidence"), ("todo", "What to do"), ("ranks", "Ranks")],
        main=joined(parts),
        drawn=(),
        version="doctor",
    )
