"""`parcompile SPEC -o DIR`: diagnostics, artefacts, a short report."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parcompile.pipeline import Checked, compile_file
from parcompile.plan import Plan
from parcompile.report import summary
from parcompile.reporters import report
from parcompile.source import SourceError
from parcompile.targets.files import artefacts, to_text, write

from .main import SPEC_HAS_ERRORS


@click.command("compile")
@click.argument("spec")
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to; default: no files."
)
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(spec: str, output: Path | None, *, quiet: bool) -> None:
    """Compile SPEC: check it, then write plan.json, ds_config.json and process_groups.json to the output folder.

    Nothing is written when the spec has an error. SPEC may be - for standard input.
    """
    try:
        plan, checked = compile_file(spec)
    except SourceError as error:
        raise click.ClickException(str(error)) from None
    _print_diagnostics(checked, quiet=quiet)
    if plan is None:
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)
    written = _write(plan, output) if output else []
    if not quiet:
        click.echo(summary(plan))
        for file in written:
            click.echo(f"wrote {file}")
        if not output:
            click.echo("nothing written: add -o DIR to write the plan")


def _print_diagnostics(checked: Checked, *, quiet: bool) -> None:
    shown = [found for found in checked.diagnostics if found.is_error or not quiet]
    documents = [checked.document] if checked.document else []
    if shown:
        report(shown, documents, "text", sys.stderr)


def _write(plan: Plan, output: Path) -> list[Path]:
    contents = {name: to_text(tree) for name, tree in artefacts(plan).items()}
    try:
        return write(contents, output)
    except OSError as error:
        raise click.ClickException(f"{error.filename or output} cannot be written: {error.strerror}") from None
