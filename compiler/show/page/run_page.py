"""The page of a run: its curves beside what the plan predicted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from parcompile.show.page.render import framed
from parcompile.show.page.sections import Html, joined, section, table, tag
from parcompile.show.pictures.curves import Points, draw
from parcompile.show.pictures.shapes import NARROW, WIDE, Picture, Subject
from parcompile.show.pictures.svg import inline
from parcompile.show.run import Run, described, figures, verdict
from parcompile.units import format_bytes, format_seconds

_ROLES = ("tp", "cp", "dp", "pp", "ep")
_CURVES: dict[str, tuple[str, tuple[str, ...], Callable[[float], str]]] = {
    "loss": ("Loss", ("loss", "eval_loss"), "{:.3f}".format),
    "gradient_norm": ("Gradient norm, before clipping", ("gradient_norm",), "{:.3g}".format),
    "lr": ("Learning rate", ("lr",), "{:.2g}".format),
    "step_seconds": ("Time of a step", ("seconds",), format_seconds),
    "mfu": ("MFU", ("mfu",), "{:.1%}".format),
    "memory_peak_bytes": ("Memory of the fullest rank", ("memory_peak_bytes",), format_bytes),
    "slowest_rank": ("Ranks by themselves", ("slowest_seconds", "fastest_seconds"), format_seconds),
    "router_load": ("Fullest expert over the mean", ("router_load",), "{:.2f}".format),
}
"""Pictures by anchor: the title, the figures, each with those behind its slash, and how a value is written."""


def run_page(run: Run, subject: Subject | None, note: str) -> str:
    """The report of a run as HTML.

    Args:
        run: its rows.
        subject: the plan that it is compared with.
        note: why there is none, or what is not known of it.
    """
    tree = figures(run, subject)
    drawn: list[Picture] = []
    parts, links = [], [("figures", "Figures")]
    rows = [("figure", "value"), *((name, said) for name, said in described(tree, note) if said)]
    parts.append(section("figures", "Figures", table(rows, caption="How the run went", class_="stacked")))
    for anchor, (title, names, unit) in _CURVES.items():
        lines = _lines(run, names)
        if not lines:
            continue
        known = tree.get(anchor)
        band = None
        if isinstance(known, dict) and "predicted_low" in known:
            band = ("predicted, 90 % interval", float(known["predicted_low"]), float(known["predicted_high"]))
        wide, narrow = (draw(title, lines, width, band=band, unit=unit) for width in (WIDE, NARROW))
        drawn += [wide, narrow]
        shown = (
            tag("div", Html(inline(wide)), class_="picture wide"),
            tag("div", Html(inline(narrow)), class_="picture narrow"),
        )
        parts.append(section(anchor, title, tag("p", f"{wide.description}.", class_="note"), *shown))
        links.append((anchor, title.partition(",")[0]))
    return framed(
        title=_title(run, subject),
        kind="run",
        summary=verdict(tree),
        links=links,
        main=joined(parts),
        drawn=drawn or [Picture("", "", "", WIDE, 1, ())],
        version="no plan" if subject is None else f"plan {subject.plan.plan_hash}",
    )


def _title(run: Run, subject: Subject | None) -> str:
    if subject is not None and subject.plan.spec.name != "unnamed":
        return f"A run of {subject.plan.spec.name}"
    return f"The run in {Path(run.file).parent.resolve().name}"


def _lines(run: Run, names: tuple[str, ...]) -> dict[str, tuple[str, Points]]:
    """The lines of a picture; of layers and domains as many as there are colours, those that end largest."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in run.rows:
        for name, value in row.items():
            if name.partition("/")[0] in names:
                found.setdefault(name, []).append((row["step"], value))
    kept = {name: points for name, points in found.items() if any(math.isfinite(value) for _, value in points)}
    order = sorted(kept, key=lambda name: ("/" in name, -kept[name][-1][1] if "/" in name else 0))[: len(_ROLES)]
    return {name.replace("_", " "): (role, kept[name]) for role, name in zip(_ROLES, order, strict=False)}
