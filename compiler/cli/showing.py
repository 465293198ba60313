"""`parcompile diff A B`: what changes from one plan to another; `parcompile groups PLAN`: who is with a rank."""

from __future__ import annotations

import csv
import io
import itertools
import sys
from typing import Any

import click

from parcompile.backends.artefacts import to_text
from parcompile.cost.table import columns, headed
from parcompile.diagnostics.reporters import Style, hanging
from parcompile.plan.diff import TITLES, Difference, difference
from parcompile.plan.sections import rank_groups
from parcompile.show.markdown import as_markdown

from . import say, told
from .options import form_option, read_plan


@click.command("diff")
@click.argument("before")
@click.argument("after")
@form_option("text", "json", "markdown")
def diff_command(before: str, after: str, form: str) -> None:
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


@click.command("groups")
@click.argument("plan")
@click.option("--rank", type=int, default=0, show_default=True, help="The rank whose groups to show.")
@click.option("--axis", "names", multiple=True, help="Only the group of this axis or name (tp, dp-cp, embedding, …).")
@form_option("table", "json", "csv")
@click.option("--table", "form", flag_value="table", help="Short for --format table.")
def groups_command(plan: str, rank: int, names: tuple[str, ...], form: str) -> None:
    """Show the process groups of a rank and their nodes.

    PLAN is a spec, a plan.json, or the folder that holds one. Groups are computed: the answer takes as long for a
    million ranks as for eight.
    """
    loaded = read_plan(plan)[0]
    with told(ValueError):
        found = rank_groups(loaded, rank, names)
    style = Style.of(sys.stdout)
    if form == "csv":
        text = _csv(found, loaded.spec.cluster.gpus_per_node)
    else:
        text = _table(found, style) if form == "table" else to_text(found)
    say(text, nl=False)


def _csv(found: dict[str, Any], per_node: int) -> str:
    """One line for each member of each group."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rank", "group", "index", "member", "node"])
    for name, group in found["groups"].items():
        for index, member in enumerate(group["ranks"]):
            writer.writerow([found["rank"], name, index, member, member // per_node])
    return text.getvalue()


def _table(found: dict[str, Any], style: Style) -> str:
    """Coordinates, then a line for each group; runs of ranks and nodes are shortened."""
    rows = [("group", "size", "ranks", "nodes")]
    for name, group in found["groups"].items():
        rows.append((name, str(len(group["ranks"])), runs(group["ranks"]), runs(group["nodes"])))
    coordinates = ", ".join(f"{axis} {index}" for axis, index in found["coordinates"].items())
    return "\n".join([f"rank {found['rank']}: {coordinates}", *headed(columns(rows), style)]) + "\n"


def runs(numbers: list[int]) -> str:
    """`0-7` for consecutive numbers, `1-25:8` for steps of 8; the middle of a long irregular list is left out."""
    if len(numbers) > 2:
        steps = {after - before for before, after in itertools.pairwise(numbers)}
        if len(steps) == 1:
            step = steps.pop()
            return f"{numbers[0]}-{numbers[-1]}" + (f":{step}" if step > 1 else "")
    if len(numbers) > 12:
        shown = ", ".join(map(str, numbers[:6]))
        return f"{shown}, …, {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "-"
