"""Reads what a command is given as a plan: a spec, a plan.json, or the folder that holds one."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from parcompile.diagnostics import Diagnostic
from parcompile.diagnostics.reporters import report
from parcompile.pipeline import compile_file
from parcompile.plan import Plan, PlanError, load_plan
from parcompile.text import SourceError

from .main import SPEC_HAS_ERRORS


def read_plan(path: str) -> tuple[Plan, tuple[Diagnostic, ...] | None]:
    """The plan of a file or folder, or the compiled one of a spec with its diagnostics (None of a plan).

    Raises:
        ClickException: it cannot be read.
        Exit: the spec has errors, which are printed.
    """
    file = Path(path)
    try:
        if file.is_dir() or file.name == "plan.json" or _is_plan(file):
            return load_plan(file), None
        plan, checked = compile_file(path)
    except (PlanError, SourceError) as error:
        raise click.ClickException(str(error)) from None
    if plan is None:
        errors = [one for one in checked.diagnostics if one.is_error]
        report(errors, [checked.text], "text", sys.stderr)
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)
    return plan, checked.diagnostics


def _is_plan(file: Path) -> bool:
    """Whether a file of another name begins as plans do."""
    try:
        return file.is_file() and '"plan_version"' in file.read_bytes()[:64].decode("utf-8", "replace")
    except (OSError, ValueError):
        return False
