"""`parcompile report` and `doctor`: how a run went beside what its plan predicted, and why it failed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parcompile.api import compile as compiled
from parcompile.atomic import write_file
from parcompile.backends.artefacts import to_text
from parcompile.diagnostics.reporters import Style
from parcompile.doctor import judge, read_all
from parcompile.plan import PlanError
from parcompile.show.page.run_page import run_page, short, text
from parcompile.show.pictures import Subject
from parcompile.show.run import NoRunError, Run, figures, read_run

from . import say, told, writing
from .options import read_plan
from .preflight import preflight_builder
from .view import subject_of

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
    with told(NoRunError):
        read = read_run(run)
        for number, line in read.damaged:
            say(f"{read.file}:{number} is no row of metrics with a step, and is left out: {line!r}", err=True)
        subject, note = _given(read, plan) if plan is not None else _beside(read)
    if page is not None:
        with writing(page):
            write_file(page, run_page(read, subject, note))
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
    return subject_of(found), note


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
                return subject_of(found), ""
    return None, f"plan {short(last)} does not lie beside the run: name it with --plan"


@click.command("doctor")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--plan", "plan", help="The plan or spec of the run: says how far memory and time are from it.")
@click.option("--preflight", "counts", is_flag=True, help="Offer only changes that pass preflight; takes minutes.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write the verdict here too (HTML).")
@click.pass_context
def doctor_command(
    context: click.Context, /, paths: tuple[str, ...], plan: str | None, counts: bool, form: str, page: Path | None
) -> None:
    """Say why a run hangs, died, is slow, or went wrong.

    PATHS are files and folders of any engine's run, in any state: records of the runtime, Flight Recorder dumps,
    output of ranks, launchers and Slurm, `py-spy` dumps, metrics.jsonl, nvidia-smi logs. A folder of a plan, or a
    plan.json, may be among them. Exit code 1 when something is wrong, 0 when nothing is found.
    """
    given = [one for one in paths if Path(one).name == "plan.json" or Path(one, "plan.json").is_file()]
    if plan is None and given:
        plan = given[0]
    if counts and plan is None:
        raise click.UsageError("--preflight checks changes of a plan: name it with --plan")
    loaded = None if plan is None else read_plan(plan)[0]
    found = read_all(one for one in paths if Path(one).name != "plan.json")
    build = preflight_builder() if counts else None
    verdict = judge(found, loaded, None if build is None else lambda tree: build(compiled(tree)).agrees)
    if page is not None:
        from parcompile.show.page.doctor_page import doctor_page

        with writing(page):
            write_file(page, doctor_page(verdict, found))
    say(to_text(verdict.to_json()) if form == "json" else verdict.text(), nl=form == "text")
    if verdict.kind != "nothing":
        context.exit(1)
