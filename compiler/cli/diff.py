"""`parcompile diff A B`: what changes from one plan to another."""

from __future__ import annotations

from typing import Any

import click

from parcompile.diff import Change, Difference, Kind, difference
from parcompile.targets.files import to_text

from .plans import read_plan

_TITLES = {
    Kind.NUMERICS: "Numerics: another training",
    Kind.ROUNDING: "Rounding: the same sums in another order",
    Kind.LAYOUT: "Layout",
    Kind.COST: "Cost",
}


@click.command("diff")
@click.argument("before")
@click.argument("after")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(before: str, after: str, form: str) -> None:
    """Show what changes from BEFORE to AFTER: numerics, layout, cost, and whether a checkpoint can be resumed.

    Both may be a spec, a plan.json, or the folder that holds one.
    """
    found = difference(read_plan(before)[0], read_plan(after)[0])
    click.echo(to_text(found.to_json()) if form == "json" else _text(found), nl=False)


def _text(found: Difference) -> str:
    if found.same:
        return "The plans are the same.\n"
    lines: list[str] = []
    for kind, title in _TITLES.items():
        changes = found.of(kind)
        if changes:
            width = max(len(change.what) for change in changes)
            lines += [title, *(f"  {change.what:<{width}}  {_values(change)}" for change in changes), ""]
    if found.moved_ranks is not None:
        lines += [f"Ranks with other coordinates: {found.moved_ranks}", ""]
    lines += [f"Checkpoint: {found.resume.value}", *(f"  {reason}" for reason in found.reasons)]
    return "\n".join(lines) + "\n"


def _values(change: Change) -> str:
    before, after = change.before, change.after
    text = f"{_value(before)} → {_value(after)}"
    if change.kind is Kind.COST and isinstance(before, (int, float)) and isinstance(after, (int, float)) and before:
        text += f" ({(after - before) / before:+.1%})"
    return text


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
