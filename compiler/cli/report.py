"""`parcompile report RUN`: how a run went beside what its plan predicted."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parcompile.atomic import write_file
from parcompile.backends.artefacts import to_text
from parcompile.diagnostics.reporters import Style
from parcompile.plan import Plan, PlanError
from parcompile.show.page.run_page import run_page, short, text
from parcompile.show.pictures import Subject
from parcompile.show.run import NoRunError, Run, figures, read_run

from . import say
from .options import read_plan

_BESIDE = ("plan.json", "plan/plan.json", "../plan.json", "../plan/plan.json")
"""Where the plan of a run is looked for, from its folder."""


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--plan", "plan", help="The plan or spec of the run. Default: the plan beside the run that it names.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures here (HTML).")
def command(run: Path, plan: str | None, form: str, page: Path | None) -> None:
    """Show how a run went beside its plan's predictions.

    RUN is the folder in which a run writes metrics.jsonl, or that file. Times, MFU and memory stand beside the
    estimate; loss, norm, rates, spikes, skipped steps, the slowest rank and evaluations follow. Lines that are damaged
    are named and left out.
    """
    try:
        read = read_run(run)
        for number, line in read.damaged:
            say(f"{read.file}:{number} is no row of metrics with a step, and is left out: {line!r}", err=True)
        subject, note = _given(read, plan) if plan is not None else _beside(read)
    except NoRunError as error:
        raise click.ClickException(str(error)) from None
    if page is not None:
        try:
            write_file(page, run_page(read, subject, note))
        except OSError as error:
            raise click.ClickException(f"{page} cannot be written: {error.strerror}") from None
    if form == "json":
        say(to_text(figures(read, subject)), nl=False)
        return
    say(text(read, subject, note, Style.of(sys.stdout)), nl=False)
    if page is not None:
        say(f"wrote {page}")


def _given(run: Run, plan: str) -> tuple[Subject, str]:
    """The plan that the user names.

    Raises:
        NoRunError: it is not that of the run.
        ClickException: it cannot be read.
    """
    found = read_plan(plan)[0]
    names = [name for _, name in run.plans]
    if names and found.plan_hash not in names:
        ran = ", ".join(dict.fromkeys(map(short, names)))
        raise NoRunError(f"{plan} is plan {short(found.plan_hash)}, and {run.file} is of plan {ran}: name that one")
    if names and not run.of_plan(found.plan_hash):
        raise NoRunError(f"{run.file} holds no step of plan {short(found.plan_hash)}")
    note = "" if names else "that this is the plan of the run is not known: there is no run.json"
    return _subject(found), note


def _beside(run: Run) -> tuple[Subject | None, str]:
    """The last plan of the run, where it lies beside it; and why there is none."""
    if not run.plans:
        return None, "not known: there is no run.json; name the plan with --plan"
    last = run.plans[-1][1]
    for name in _BESIDE:
        file = run.file.parent / name
        if file.is_file():
            try:
                found = read_plan(str(file))[0]
            except (click.ClickException, PlanError):
                continue
            if found.plan_hash == last and run.of_plan(last):
                return _subject(found), ""
    return None, f"plan {short(last)} does not lie beside the run: name it with --plan"


def _subject(plan: Plan) -> Subject:
    try:
        return Subject.of(plan)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
