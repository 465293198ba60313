"""`parcompile models`: which model types work, with which axes, and why others are refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from parcompile.cost.table import columns
from parcompile.diagnostics.reporters.style import writable
from parcompile.model.catalogue import ALIKE, ModelType, model_type, model_types
from parcompile.model.describing import axes_of, kinds_of, presets_of, summary_of

_STATES = click.Choice(["works", "refused"])


@click.command("models")
@click.argument("name", required=False)
@click.option("--only", type=_STATES, help="Only types that work, or only those that are refused.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(name: str | None, only: str | None, form: str) -> None:
    """List the model types that work, and why others do not.

    With NAME: one type in detail. A type that works runs with tp, cp, pp, dp and sequence
    parallelism, and with ep where it has experts.
    """
    if name is not None:
        one = model_type(name)
        if name not in model_types() and one.nearest is None:
            raise click.UsageError(f"there is no model type {name!r}; `parcompile models` lists all")
        shown = json.dumps(_tree(one), indent=2) if form == "json" else "\n".join(_details(one))
    else:
        chosen = [one for one in model_types().values() if only is None or one.works is (only == "works")]
        if form == "json":
            shown = json.dumps([_tree(one) for one in chosen], indent=2)
        else:
            ending = summary_of(model_types().values())
            shown = "\n".join([*columns([("model type", "", ""), *map(_row, chosen)]), "", ending])
    click.echo(writable(sys.stdout, shown))


def _row(one: ModelType) -> tuple[str, str, str]:
    if one.works:
        return one.name, "works", ", ".join(kinds_of(one))
    assert one.reason is not None
    if one.text_works:
        return one.name, "text part", f"its {one.text} is trained alone"
    return one.name, "refused", one.reason.title


def _details(one: ModelType) -> list[str]:
    if one.works:
        lines = [f"{one.name} works: {axes_of(one)}", *(f"  {kind}" for kind in kinds_of(one))]
    elif one.note:
        return [f"{one.name} works: {one.note}", *_details(model_type(ALIKE[one.name]))]
    else:
        assert one.reason is not None
        lines = [f"{one.name} is refused: {one.reason.why}"]
        if one.text is not None:
            state = "works and is trained alone; the rest is left as it is" if one.text_works else "is refused"
            lines.append(f"text part: {one.text}, which {state}")
        if one.reason.instead and not one.text:
            lines.append(f"what runs: {one.reason.instead}")
        if one.nearest and not one.text_works:
            lines.append(f"nearest type that works: {one.nearest}")
    found = presets_of(one.name if one.works or one.text is None else one.text)
    if found:
        lines.append(f"presets: {', '.join(found)}")
    return lines


def _tree(one: ModelType) -> dict[str, Any]:
    return {
        "model_type": one.name,
        "works": one.works,
        "axes": ["tp", "cp", "pp", "dp", "sequence_parallel"] if one.works else [],
        "planned": one.planned,
        "reason": None if one.reason is None else one.reason.title,
        "why": None if one.reason is None else one.reason.why,
        "text_part": one.text,
        "text_part_works": one.text_works,
        "nearest": one.nearest,
        "presets": list(presets_of(one.name)),
    }
