"""`parcompile diff A B`: what changes from one plan to another."""

from __future__ import annotations

import sys

import click

from parcompile.backends.artefacts import to_text
from parcompile.diagnostics.reporters.dispatch import Style, hanging
from parcompile.plan.diff import TITLES, Difference, difference
from parcompile.show.markdown import as_markdown

from .options import read_plan
from .saying import say


@click.command("diff")
@click.argument("before")
@click.argument("after")
@click.option("--format", "form", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True)
def command(before: str, after: str, form: str) -> None:
    """Show what changes from one plan to another.

    Compares numerics, layout and cost, and says whether a checkpoint of BEFORE can be resumed with AFTER. Each is a
    spec, a plan.json, or the folder that holds one. `--format markdown` writes a comment for a pull request.
    """
    old, new = read_plan(before)[0], read_plan(after)[0]
    found = difference(old, new)
    if form == "json":
        text = to_text(found.to_json())
    else:
        text = as_markdown(old, new, found) if form == "markdown" else _text(found, Style.of(sys.stdout))
    say(text, nl=False)


def _text(found: Difference, style: Style) -> str:
    if found.same:
        return "The plans are the same.\n"
    lines: list[str] = []
    for kind, title in TITLES.items():
        changes = found.of(kind)
        if changes:
            width = max(len(change.what) for change in changes)
            lines += [style.strong(title), *(f"  {change.what:<{width}}  {change.values}" for change in changes), ""]
    if found.moved_ranks is not None:
        lines += [
            f"{found.moved_ranks} rank{'s' * (found.moved_ranks != 1)} change{'s' * (found.moved_ranks == 1)} position",
            "",
        ]
    for who, resumption in (("this runtime", found.runtime), ("DeepSpeed alone", found.deepspeed)):
        lines.append(style.strong(f"Checkpoint, by {who}: ") + resumption.resume.value)
        lines += [hanging("  ", reason, style.width) for reason in resumption.reasons]
    return "\n".join(lines) + "\n"
