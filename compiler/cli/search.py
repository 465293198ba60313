"""`parcompile search SPEC`: the best layouts of a spec whose axes are open, and why the others lost."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from parcompile.cli.profile import read_set
from parcompile.cost.table import columns, headed, verdict
from parcompile.diagnostics.reporters import Style, hanging, wrapped
from parcompile.layout.groups import Axis
from parcompile.machines import is_preset_file
from parcompile.pipeline import folder_of
from parcompile.searching.ranking import Ranked, SearchResult, search
from parcompile.searching.space import VIRTUAL, Candidate, open_space
from parcompile.searching.variant import changed
from parcompile.spec.resolve import Resolution, Unavailable

from . import save, say
from .estimate import checked_spec, memory_cells, refuse, refuse_longer, time_cells
from .options import coefficients_option, document_length_option, form_option, output_file, seen_from


@click.command("search")
@click.argument("spec")
@click.option("--top", default=10, show_default=True, type=click.IntRange(1), help="Layouts to show.")
@click.option("--losers", is_flag=True, help="Show every other layout with the reason why it lost.")
@click.option("--any-target", is_flag=True, help="Also layouts that the runtime of this project refuses.")
@document_length_option()
@form_option()
@coefficients_option()
@click.option("-o", "--output", type=output_file(), metavar="FILE", help="Write the chosen spec here.")
def command(
    spec: str,
    top: int,
    document_length: int | None,
    form: str,
    coefficients: Path | None,
    output: Path | None,
    *,
    losers: bool,
    any_target: bool,
) -> None:
    """Find the fastest layouts that fit.

    Searches the values that SPEC leaves out: tp, cp, dp, pp, ep, micro-batch, recomputation, ZeRO stage, order,
    cp_implementation. Values that it gives stay. Ranks the layouts that fit with a probability of 90 % by predicted
    time. All layouts are enumerated; another ZeRO stage than 1, which is never faster, is tried where a layout does not
    fit at stage 1. docs/accuracy.md lists the errors of the predictions. SPEC is a spec, a plan.json, or the folder
    that holds one. The exit code is 1 when no layout fits, or SPEC has errors.
    """
    checked = checked_spec(spec, ignore_open=True, whole=True)
    assert checked.document is not None
    tree, folder = checked.document.tree, folder_of(spec)
    assert isinstance(tree, dict)
    try:
        resolution = Resolution(tree, (), folder)
        refuse_longer(document_length, resolution.sequence_length)
        space = open_space(resolution, executable=not any_target, document_length=document_length)
    except Unavailable:
        refuse(checked, [one for one in checked.diagnostics if one.is_error])
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    found = search(space, progress_bar, read_set(coefficients) if coefficients else None)
    chosen = None if found.best is None else changed(space.tree, found.best.candidate.changes)
    if form == "json":
        say(json.dumps(_json(found, chosen), indent=2))
    else:
        if space.assumes_accelerator:
            say(f"cluster.accelerator is not given: {space.tree['cluster']['accelerator']} is assumed", err=True)
        say(_text(found, top, Style.of(sys.stdout), losers=losers), nl=False)
    if found.best is None:
        raise click.exceptions.Exit(1)
    if output is not None and chosen is not None:
        save(output, json.dumps(_moved(chosen, folder, Path(os.path.realpath(output)).parent), indent=2) + "\n")
        if form == "text":
            say(f"wrote {output}")


def _moved(tree: dict[str, Any], old: Path, new: Path) -> dict[str, Any]:
    """A spec whose files are named from another folder than its own."""
    if Path(os.path.realpath(old)) == new:
        return tree
    for section, key in (("model", "hf_config"), ("cluster", "accelerator")):
        name = tree[section].get(key)
        is_file = isinstance(name, str) and (key == "hf_config" or is_preset_file(name))
        if is_file and not Path(name).is_absolute():
            tree[section][key] = seen_from(new, old / name)
    return tree


PROGRESS_SECONDS = 10
"""Between the lines that say how far a search is, where no terminal shows a bar."""


def progress_bar(settings: Iterable[dict[str, object]]) -> Iterable[dict[str, object]]:
    """The settings, counted on standard error: by a bar in a terminal, else by a line from time to time."""
    if not sys.stderr.isatty():
        listed, said = list(settings), time.monotonic()
        for count, one in enumerate(listed):
            if time.monotonic() - said >= PROGRESS_SECONDS:
                said = time.monotonic()
                say(f"predicted {count:,} of {len(listed):,} settings of the axes", err=True)
            yield one
        return
    with click.progressbar(list(settings), label="predicting", file=sys.stderr) as bar:
        yield from bar


_HEAD = ("", "layout", "step", "tok/s/GPU", "MFU", "memory", "fits")


def _text(found: SearchResult, top: int, style: Style, *, losers: bool) -> str:
    predicted = len(found.fitting) + len(found.too_large)
    first = next(iter((*found.fitting[:1], *found.too_large[:1])), None)
    lines = [] if first is None else [verdict(first.candidate.work, first.memory, first.time)]
    counts = (
        f"{predicted:,} layouts: {len(found.fitting):,} fit, {len(found.too_large):,} do not fit; rules refuse "
        f"{len(found.refused):,} settings of the axes"
    )
    if predicted == 1 and not found.refused:
        counts = 'the spec leaves one layout: a search tries the values of parallelism that are left out or "auto"'
    lines += wrapped(counts, style.width)
    if found.best is not None:
        shown = found.fitting[:top]
        lines += ["", *_table(((str(rank + 1), one) for rank, one in enumerate(shown)), style)]
        if len(shown) > 1:
            lines += ["", style.strong("why the next ones lost")]
            lines += [hanging(f"{rank + 2:>3}  ", one.reason or "", style.width) for rank, one in enumerate(shown[1:])]
        lines += _executions(found, top, style, losers=losers)
        lines += ["", style.strong("Pareto front: no other layout is both faster and smaller")]
        lines += _table((("", one) for one in found.front[:top]), style)
    elif found.too_large:
        nearest = found.too_large[0]
        lines += ["", *wrapped(f"no layout fits; the smallest is {nearest.candidate.name}", style.width)]
        lines.append(hanging("  ", nearest.reason or "", style.width))
        if found.remedies:
            lines.append("what would fit, on top of it:")
            lines += [hanging("  ", str(one), style.width) for one in found.remedies]
    codes = Counter(one.code for one in found.refused)
    if codes:
        counted = ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))
        lines += ["", hanging("refused: ", f"{counted} (parcompile explain CODE)", style.width)]
        # Where rules refuse every layout, what one of them says is what there is to change.
        said = {one.code: one.message for one in reversed(found.refused)} if predicted == 0 else {}
        lines += [hanging(f"  {code}  ", said[code], style.width) for code in sorted(said)]
    if losers:
        lines += ["", *_losers(found)]
    return "\n".join(lines) + "\n"


def _executions(found: SearchResult, top: int, style: Style, *, losers: bool) -> list[str]:
    """The chosen layout in other orders, and with other implementations of cp."""
    shown = found.other_executions if losers else found.other_executions[:top]
    if not shown:
        return []
    more = len(found.other_executions) - len(shown)
    wide = max(len(execution.name) for execution, _ in shown)
    rows = [hanging(f"{execution.name:<{wide}}  ", reason, style.width) for execution, reason in shown]
    heading = style.strong("the first one, run otherwise, and why that lost")
    return ["", heading, *rows, *([f"and {more} more (--losers)"] if more else [])]


_FIGURES = 50
"""Columns of everything but the layouts."""


def _table(ranked: Iterable[tuple[str, Ranked]], style: Style) -> list[str]:
    """The layouts with their figures, within the width of the terminal: a long name goes on below its row."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for rank, one in ranked:
        first, *rest = wrapped(_short(one.candidate.name), max(24, style.width - _FIGURES))
        row = (rank, first, *time_cells(one.time), *memory_cells(one.memory))
        rows += [row, *(("", f"  {line}", *[""] * (len(row) - 2)) for line in rest)]
    return headed(columns(rows), style)


def _short(name: str) -> str:
    """A layout's name without the axes of one rank, and without what follows."""
    name = re.sub(r"\b(?:tp|cp|ep|pp|dp)1 ", "", name)
    return re.sub(r"full on stages? ([\d-]+), none on stages? [\d-]+", r"full on \1", name)


def _losers(found: SearchResult) -> list[str]:
    rows = [(one.candidate.name, one.reason or "") for one in (*found.fitting[1:], *found.too_large)]
    for one in found.refused:
        named = _named(one.changes).items()
        settings = " ".join(f"{name}{value}" for name, value in named if not isinstance(value, bool))
        rows.append((settings, f"[{one.code}] {one.message}"))
    return columns([("every other layout", "why it lost"), *rows])


def _named(changes: Mapping[str, object]) -> dict[str, object]:
    """The values of a layout under names that need no section beside them."""
    return {"zero_stage" if name == "stage" else name: value for name, value in changes.items()}


def _layout(one: Candidate) -> dict[str, Any]:
    """What it sets, and what follows from that or stands in the spec."""
    virtual = {VIRTUAL: one.work.virtual_stages} if one.work.virtual_stages > 1 else {}
    return {**_named(one.changes), **virtual, Axis.DP.value: one.work.dp}


def _json(found: SearchResult, chosen: Any) -> dict[str, Any]:
    def one(ranked: Ranked) -> dict[str, Any]:
        return {
            "layout": _layout(ranked.candidate),
            "step_seconds": ranked.seconds,
            "interval_90_seconds": list(ranked.time.interval_seconds),
            "tokens_per_second_per_gpu": ranked.time.tokens_per_second_per_gpu,
            "model_flops_utilisation": ranked.time.utilisation,
            "peak_bytes": round(ranked.peak_bytes),
            "probability_to_fit": ranked.memory.probability,
            "reason": ranked.reason,
        }

    return {
        "enumerated": found.enumerated,
        "best": None if found.best is None else one(found.best),
        "spec": chosen,
        "fitting": [one(each) for each in found.fitting],
        "other_executions": [
            {
                "order": "-".join(execution.work.order),
                "cp_implementation": execution.work.cp_implementation if execution.work.cp > 1 else None,
                "hierarchical_cp_sizes": execution.work.cp_sizes,
                "step_seconds": execution.step.seconds,
                "reason": reason,
            }
            for execution, reason in found.other_executions
        ],
        "pareto_front": [one(each) for each in found.front],
        "too_large": [one(each) for each in found.too_large],
        "remedies": [
            {
                "settings": dict(each.change.settings),
                "step_seconds": each.change.seconds,
                "peak_bytes": round(each.change.memory.peak.total_bytes),
                "probability_to_fit": each.change.memory.probability,
            }
            for each in found.remedies
        ],
        "refused": [
            {"layout": _named(each.changes), "code": each.code, "message": each.message} for each in found.refused
        ],
    }
