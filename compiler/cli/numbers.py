"""Numbers of the command line, as types of its options."""

from __future__ import annotations

import math

import click


def positive_number(text: str) -> float:
    """A number above 0 that is not infinite.

    Raises:
        BadParameter: it is none.
    """
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number") from None
    if not math.isfinite(number) or number <= 0:
        raise click.BadParameter(f"{text} is not a finite number above 0")
    return number
