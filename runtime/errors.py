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

    What every rank finds is printed by rank 0 alone; what one rank finds is printed by that rank. Other exceptions are
    faults of the program: the rank that raised shows its traceback, and ranks that only lose their connection to it say
    so in one line.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        yield
    except (RunError, PlanError) as error:
        everywhere = getattr(error, "everywhere", isinstance(error, PlanError))
        if rank == 0 or not everywhere:
            _say(f"error{'' if everywhere else f' (rank {rank})'}: {error}")
        sys.exit(1)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in LOST_PEER):
            raise
        _say(f"rank {rank} lost its connection to a rank that ended")
        sys.exit(1)


LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""What gloo and NCCL say when the other side is gone."""


def _say(text: str) -> None:
    print(f"parcompile: {text}", file=sys.stderr, flush=True)  # noqa: T201 -- it is for the user
