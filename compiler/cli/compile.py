"""`parcompile SPEC -o DIR`: diagnostics, artefacts, a short report."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parcompile.backends.on_disk import differences, locked_targets, stale_files
from parcompile.backends.registry import losses, render
from parcompile.backends.writing import write
from parcompile.diagnostics.reporters import report
from parcompile.pipeline import Checked, compile_file
from parcompile.plan import Plan
from parcompile.plan.summary import summary
from parcompile.rules import rule_targets
from parcompile.text import SourceError

from .main import SPEC_HAS_ERRORS
from .targets import chosen_targets, target_option


@click.command("compile")
@click.argument("spec")
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to; default: no files."
)
@target_option("What to write (default: deepspeed, torchrun and slurm)")
@click.option("--check", is_flag=True, help="Write nothing: exit 1 with a diff when the files in DIR are out of date.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def command(spec: str, output: Path | None, targets: tuple[str, ...], *, check: bool, quiet: bool) -> None:
    """Compile SPEC: check it, then write plan.json and the files of each target to the output folder.

    Nothing is written when the spec has an error. SPEC may be - for standard input. --check takes the targets that were
    written before unless some are named.
    """
    if check and output is None:
        raise click.UsageError("--check needs the folder to compare with: add -o DIR")
    targets = chosen_targets(targets or (locked_targets(output) if check and output else ()))
    try:
        plan, checked = compile_file(spec, rule_targets(targets))
    except SourceError as error:
        raise click.ClickException(str(error)) from None
    _print_diagnostics(checked, quiet=quiet)
    if plan is None:
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)
    if check:
        assert output is not None
        _compare(plan, output, targets)
        return
    written = _write(plan, output, targets) if output else []
    if not quiet:
        click.echo(summary(plan))
        _print_losses(plan, targets)
        for file in written:
            click.echo(f"wrote {file}")
        if not output:
            click.echo("nothing written: add -o DIR to write the plan")


def _print_diagnostics(checked: Checked, *, quiet: bool) -> None:
    shown = [found for found in checked.diagnostics if found.is_error or not quiet]
    if shown:
        report(shown, [checked.text], "text", sys.stderr)


def _print_losses(plan: Plan, targets: tuple[str, ...]) -> None:
    for name, found in losses(plan, targets).items():
        for loss in found:
            effect = "not written" if loss.fatal else loss.instead
            click.echo(f"{name}: {loss.what}: {loss.why} ({effect})")


def _compare(plan: Plan, output: Path, targets: tuple[str, ...]) -> None:
    try:
        found = differences(render(plan, targets), output)
    except OSError as error:
        raise click.ClickException(f"{error.filename or output} cannot be read: {error.strerror}") from None
    if found:
        click.echo(found, nl=False)
        click.echo(f"{output} is not what the spec compiles to: compile it again with -o {output}", err=True)
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)


def _write(plan: Plan, output: Path, targets: tuple[str, ...]) -> list[Path]:
    contents = render(plan, targets)
    try:
        return write(contents, output, stale_files(contents, output))
    except OSError as error:
        raise click.ClickException(f"{error.filename or output} cannot be written: {error.strerror}") from None
