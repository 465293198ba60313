"""The one way in which commands print: what users and their files name cannot speak to the terminal."""

from __future__ import annotations

import sys

import click

from parcompile.diagnostics.reporters.dispatch import printable, writable


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text to standard output or error. JSON stays the same JSON: what is not printable becomes its escape."""
    click.echo(writable(sys.stderr if err else sys.stdout, printable(text)), err=err, nl=nl)
