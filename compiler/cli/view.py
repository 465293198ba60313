"""`parcompile view PLAN`: the report of a plan, as a page, as pictures, or short in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parcompile.atomic import write_file
from parcompile.diagnostics.reporters import Style
from parcompile.plan import Plan
from parcompile.plan.sections import summary
from parcompile.show.page import read_search
from parcompile.show.page.render import page
from parcompile.show.pictures import WIDE, Subject
from parcompile.show.pictures.front import KINDS, as_markdown, as_text, picture
from parcompile.show.pictures.svg import PngError, png, svg

from . import say, told, writing
from .options import read_plan

SUFFIXES = {".html": "html", ".svg": "svg", ".png": "png", ".md": "md", ".txt": "text"}
FORMATS = ("text", "html", "svg", "png", "md")


@click.command("view")
@click.argument("plan")
@click.option("--picture", "name", type=click.Choice(list(KINDS)), help="One picture only.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Default: what the name of the output ends in.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write to.")
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
    with writing(output):
        write_file(output, content)
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
