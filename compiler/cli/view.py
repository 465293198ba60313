"""What a person looks at: `parcompile view` of a plan, `report` of a run beside it, and `doctor` of one that failed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parcompile.api import compile as compiled
from parcompile.backends.artefacts import to_text
from parcompile.diagnostics.reporters import Style
from parcompile.doctor import judge, read_all
from parcompile.plan import Plan, PlanError
from parcompile.plan.sections import summary
from parcompile.show.page import read_search
from parcompile.show.page.render import page
from parcompile.show.page.run_page import run_page, short, text
from parcompile.show.pictures import WIDE, Subject
from parcompile.show.pictures.front import KINDS, as_markdown, as_text, picture
from parcompile.show.pictures.svg import PngError, png, svg
from parcompile.show.run import NoRunError, Run, figures, read_run

from . import save, say, told
from .options import form_option, output_file, read_plan
from .preflight import preflight_builder

SUFFIXES = {".html": "html", ".svg": "svg", ".png": "png", ".md": "md", ".txt": "text"}
FORMATS = ("text", "html", "svg", "png", "md")


@click.command("view")
@click.argument("plan")
@click.option("--picture", "name", type=click.Choice(list(KINDS)), help="One picture only.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Default: what the name of the output ends in.")
@click.option("-o", "--output", type=output_file(), metavar="FILE", help="File to write to.")
@click.option("--axis", help="What the grid is coloured by (tp, cp, dp, pp), or the only panel of splits (also zero).")
@click.option("--rank", type=int, help="Light up the groups of this rank in the grid.")
@click.option(
    "--search",
    "searched",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What `parcompile search SPEC --format json` printed: the page then says what was rejected and why.",
)
@click.option("--beside", "other", metavar="PLAN", help="A second plan to show beside the first one on the HTML page.")
@click.option("--width", type=click.IntRange(280, 4000), default=WIDE, show_default=True, help="Pixels of a picture.")
def command(
    plan: str,
    name: str | None,
    form: str | None,
    output: Path | None,
    axis: str | None,
    rank: int | None,
    searched: Path | None,
    other: str | None,
    width: int,
) -> None:
    """Show a plan in the terminal, as pictures or as a page.

    Shows the ranks on their nodes, what each rank holds, computes and sends, and the cost. `-o report.html` writes one
    page that opens without a network. `--picture NAME -o FILE.svg` (or .png, .md) writes one picture. Without an output
    a short form goes to the terminal. PLAN is a spec, a plan.json, or the folder that holds one.
    """
    form = _format(form, output, name)
    if name is None and (axis or rank is not None):
        raise click.UsageError("--axis and --rank need a picture: add --picture grid")
    if form in ("text", "md") and (axis or rank is not None):
        raise click.UsageError(f"--axis and --rank colour pictures, not {form}: add --format svg, or -o FILE.svg")
    if searched and form != "html":
        raise click.UsageError("--search needs the HTML page: add -o report.html")
    if other and form != "html":
        raise click.UsageError("--beside needs the HTML page: add -o report.html")
    compiled, diagnostics = read_plan(plan)
    subject = subject_of(compiled)
    second = subject_of(read_plan(other)[0]) if other else None
    with told(ValueError, PngError):
        content: str | bytes
        if form == "html":
            content = page(subject, diagnostics, read_search(searched) if searched else None, second)
        else:
            content = _content(subject, name, form, width=width, axis=axis, rank=rank)
    if output is None:
        assert isinstance(content, str)
        say(content, nl=False)
        return
    save(output, content, plan, searched, other)
    say(f"wrote {output}")


@told(ValueError)
def subject_of(plan: Plan) -> Subject:
    """A plan with its estimate.

    Raises:
        ClickException: it cannot be estimated.
    """
    return Subject.of(plan)


def _format(form: str | None, output: Path | None, name: str | None) -> str:
    """What to write, from the option and the output's name."""
    ending = None if output is None else SUFFIXES.get(output.suffix.lower())
    if form is None and output is not None and ending is None:
        raise click.UsageError(f"{output.name} does not end in {', '.join(SUFFIXES)}: add --format")
    found = form or ending or "text"
    if found in ("svg", "png") and name is None:
        raise click.UsageError(f"{found} holds one picture: add --picture {'|'.join(KINDS)}")
    if found == "html" and name is not None:
        raise click.UsageError("html is the whole report: remove --picture, or use the format svg, png or md")
    if found == "png" and output is None:
        raise click.UsageError("a terminal cannot show PNG: add -o FILE.png")
    return found


def _content(
    subject: Subject, name: str | None, form: str, *, width: float, axis: str | None, rank: int | None
) -> str | bytes:
    unicode = Style.of(sys.stdout).unicode
    if name is None:
        if form == "md":
            return "\n".join(as_markdown(one, subject) for one in KINDS)
        pictures = [as_text(one, subject, unicode=unicode) for one in KINDS]
        return "\n".join([summary(subject.plan, Style.of(sys.stdout).width) + "\n", *pictures])
    if form == "md":
        return as_markdown(name, subject)
    if form == "text":
        return as_text(name, subject, unicode=unicode)
    drawn = picture(name, subject, width=width, axis=axis, rank=rank)
    return png(drawn) if form == "png" else svg(drawn)


_BESIDE = ("plan.json", "plan/plan.json", "../plan.json", "../plan/plan.json")
"""Where the plan of a run is looked for, from its folder."""


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--plan", "plan", help="The plan or spec of the run. Default: the plan beside the run that it names.")
@form_option()
@click.option("--page", type=output_file(".html"), metavar="PATH", help="Write a page with pictures here (HTML).")
def report_command(run: Path, plan: str | None, form: str, page: Path | None) -> None:
    """Show how a run went beside its plan's predictions.

    RUN is the folder in which a run writes metrics.jsonl, or that file. Times, MFU and memory stand beside the
    estimate; loss, norm, rates, spikes, skipped steps, the slowest rank and evaluations follow. Lines that are damaged
    are named and left out.
    """
    with told(NoRunError):
        read = read_run(run)
        for number, said in read.damaged:
            say(f"{read.file}:{number} {said}; it is left out", err=True)
        subject, note = _given(read, plan) if plan is not None else _beside(read)
    if page is not None:
        save(page, run_page(read, subject, note))
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
@form_option()
@click.option("--page", type=output_file(".html"), metavar="PATH", help="Write the verdict here too (HTML).")
@click.pass_context
def doctor_command(
    context: click.Context, /, paths: tuple[str, ...], plan: str | None, counts: bool, form: str, page: Path | None
) -> None:
    """Say why a run hangs, died, is slow, or went wrong.

    PATHS are files and folders of any engine's run, in any state: records of the runtime, Flight Recorder dumps,
    output of ranks, launchers and Slurm, `py-spy` dumps, metrics.jsonl, nvidia-smi logs. A folder of a plan, or a
    plan.json, may be among them. The exit code is 0 when nothing is wrong, 1 when something is or the files do not say
    what (CANNOT TELL), and 2 when the command line is wrong or a file cannot be written.
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
        from parcompile.show.page.run_page import doctor_page

        save(page, doctor_page(verdict, found))
    say(to_text(verdict.to_json()) if form == "json" else verdict.text(), nl=form == "text")
    if verdict.kind != "nothing":
        context.exit(1)
