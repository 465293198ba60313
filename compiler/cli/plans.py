"""Reads what a command is given as a plan: a spec, a plan.json, or the folder that holds one."""

from __future__ import annotations

import sys

import click

from parcompile.diagnostics import Diagnostic
from parcompile.diagnostics.reporters import report
from parcompile.pipeline import compile_file, is_plan
from parcompile.plan import Plan, PlanError, load_plan
from parcompile.text import SourceError

from .main import SPEC_HAS_ERRORS


def read_plan(path: str) -> tuple[Plan, tuple[Diagnostic, ...] | None]:
    """The plan of a file or folder, or the compiled one of a spec with its diagnostics (None of a plan).

    Raises:
        ClickException: it cannot be read.
        Exit: the spec has errors, which are printed.
    """
    try:
        if is_plan(path):
            return load_plan(path), None
        plan, checked = compile_file(path, must_fit=False)
    except (PlanError, SourceError) as error:
        raise click.ClickException(str(error)) from None
    if plan is None:
        errors = [one for one in checked.diagnostics if one.is_error]
        report(errors, [checked.text], "text", sys.stderr)
        raise click.exceptions.Exit(SPEC_HAS_ERRORS)
    return plan, checked.diagnostics
