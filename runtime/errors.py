"""Errors of a run, and how they reach the user: one clear message, whatever the number of ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from parcompile.plan import PlanError


class RunError(RuntimeError):
    """Why a run cannot start or go on; the message is meant for the user.

    `everywhere` says that every rank finds the same at the same time, so that one of them speaks for all.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turns a `RunError` or `PlanError` into one message on standard error and exit code 1, without a traceback.

    What every rank finds is printed by rank 0 alone; what one rank finds is printed by that rank. Other exceptions are not touched: they
    are faults of the program, and their traceback is wanted.
    """
    try:
        yield
    except (RunError, PlanError) as error:
        rank = int(os.environ.get("RANK", "0"))
        everywhere = getattr(error, "everywhere", isinstance(error, PlanError))
        if rank == 0 or not everywhere:
            who = "" if everywhere else f" (rank {rank})"
            print(f"parcompile: error{who}: {error}", file=sys.stderr, flush=True)  # noqa: T201 -- the message is for the user
        sys.exit(1)
