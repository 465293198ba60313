"""The option that names targets: the same in every command that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click

from parcompile.backends.target_names import ALL, chosen, names
from parcompile.diagnostics import Diagnostic, Severity
from parcompile.pipeline import Checked
from parcompile.rules.registry import INEXPRESSIBLE
from parcompile.searching.variant import SECTIONS


def target_option(said: str) -> Callable[[Any], Any]:
    """`--target`, several times; `said` is its help, before the names."""
    known = f"{', '.join(names())}, or {ALL}"
    return click.option(
        "-t", "--target", "targets", multiple=True, help=f"{said}: {known}. Can be given several times."
    )


def no_estimate_option(said: str) -> Callable[[Any], Any]:
    """The option that leaves estimates out; `said` is its help."""
    return click.option("--no-estimate", is_flag=True, help=said)


def with_inexpressible(checked: Checked, names: Sequence[str]) -> Checked:
    """A spec that is right, with an error for everything that one of these targets cannot express."""
    if not checked.valid or checked.resolution is None or checked.document is None:
        return checked
    from parcompile.backends.registry import losses
    from parcompile.plan import compile_plan

    document = checked.document
    plan = compile_plan(checked.resolution.spec(), checked.resolution.tree, [])
    found = [
        document.locate(
            Diagnostic(
                INEXPRESSIBLE, Severity.ERROR, f"{name} cannot express {one.what}: {one.why}", path, help=one.instead
            )
        )
        for name, lost in losses(plan, names).items()
        for one in lost
        if one.fatal
        for path in [_place(one.what)]
    ]
    return replace(checked, diagnostics=(*found, *checked.diagnostics))


def _place(what: str) -> tuple[str, ...]:
    """The value that the first word of a loss names; empty where it is none."""
    key = what.split()[0]
    return (SECTIONS[key], key) if key in SECTIONS else ()


def chosen_targets(given: Sequence[str]) -> tuple[str, ...]:
    """The targets that are meant.

    Raises:
        UsageError: there is no target of a name.
    """
    try:
        return chosen(given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
