"""The option that names targets: the same in every command that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from parcompile.backends.target_names import ALL, chosen, names


def target_option(said: str) -> Callable[[Any], Any]:
    """`--target`, several times; `said` is its help, before the names."""
    known = f"{', '.join(names())}, or {ALL}"
    return click.option(
        "-t", "--target", "targets", multiple=True, help=f"{said}: {known}. Can be given several times."
    )


def no_estimate_option(said: str) -> Callable[[Any], Any]:
    """The option that leaves estimates out; `said` is its help."""
    return click.option("--no-estimate", is_flag=True, help=said)


def chosen_targets(given: Sequence[str]) -> tuple[str, ...]:
    """The targets that are meant.

    Raises:
        UsageError: there is no target of a name.
    """
    try:
        return chosen(given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
