"""`parcompile SPEC -o DIR`: diagnostics, artefacts, a short report."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parcompile.backends.registry import losses, render
from parcompile.backends.writing import differences, locked_targets, write
from parcompile.diagnostics.reporters import Style, hanging, report
from parcompile.pipeline import Checked, compile_file, is_plan
from parcompile.plan import Plan, load_plan
from parcompile.plan.sections import summary
from parcompile.rules import rule_targets
from parcompile.text import SourceError

from . import SPEC_HAS_ERRORS, say, told, writing
from .options import chosen_targets, no_estimate_option, refuse_foreign, target_option


@click.command("compile")
@click.argument("spec")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write to. Without it nothing is written.",
)
@target_option("What to write. The default is deepspeed, torchrun and slurm. Choices")
@click.option(
    "--check", is_flag=True, help="Write nothing. Exit with 1 and a diff when the files in the folder are out of date."
)
@no_estimate_option("Do not estimate the peak of memory, and write plans that may not fit.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Print remarks in full, with their places.")
def command(
    spec: str,
    output: Path | None,
    targets: tuple[str, ...],
    *,
    check: bool,
    no_estimate: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Compile a spec into a plan and its launch files.

    SPEC is a spec file, a plan (to write it for other targets), or - for standard input. The spec is checked first.
    When it has an error, nothing is written; that its estimated peak of memory does not fit is one. --check compares
    the folder with the targets that were written before, unless --target names others.
    """
    if check and output is None:
        raise click.UsageError("--check needs the folder to compare with: add -o DIR")
    named = set(targets)  # "all" names none: it means those that can run the layout
    targets = chosen_targets(targets or (locked_targets(output) if check and output else ()))
    with told(SourceError):
        plan, checked = compile_file(spec, rule_targets(targets, estimate=not no_estimate))
        if plan is not None and is_plan(spec):
            # Compiled already: its identity stays.
            plan = load_plan(spec)
    if plan is None:
        refuse_foreign(checked)
    _print_diagnostics(checked, quiet=quiet, verbose=verbose)
    if plan is None:
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)
    if check:
        assert output is not None
        _compare(plan, output, targets, quiet=quiet)
        return
    written = _write(plan, output, targets) if output else []
    if not quiet:
        say(summary(plan, Style.of(sys.stdout).width, estimate=not no_estimate))
        _print_losses(plan, targets)
        for file in written:
            say(f"wrote {file}")
        if not output:
            say("nothing written: add -o DIR to write the plan")
    lost = losses(plan, targets).items()
    without = [name for name, found in lost if name in named and any(loss.fatal for loss in found)]
    if without:
        if quiet:
            say(f"Error: nothing is written for {', '.join(without)}: target_report.json says why", err=True)
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)


def _print_diagnostics(checked: Checked, *, quiet: bool, verbose: bool) -> None:
    shown = [found for found in checked.diagnostics if found.is_error or not quiet]
    if shown:
        report(shown, [checked.text], "text", sys.stderr, folded=not verbose)


def _print_losses(plan: Plan, targets: tuple[str, ...]) -> None:
    for name, found in losses(plan, targets).items():
        for loss in found:
            effect = "not written" if loss.fatal else loss.instead
            line = hanging(f"{name}: ", f"{loss.what}: {loss.why} ({effect})", Style.of(sys.stdout).width)
            say(line)


def _compare(plan: Plan, output: Path, targets: tuple[str, ...], *, quiet: bool) -> None:
    contents = render(plan, targets)
    with writing(output, "read", below=True):
        found = differences(contents, output)
    if found:
        say(found, nl=False)
        say(f"{output} is not what the spec compiles to: compile it again with -o {output}", err=True)
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)
    if not quiet:
        say(f"{output} is up to date: all {len(contents)} files are what the spec compiles to")


def _write(plan: Plan, output: Path, targets: tuple[str, ...]) -> list[Path]:
    contents = render(plan, targets)
    with writing(output, below=True):
        return write(contents, output)
