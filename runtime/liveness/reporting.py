"""How errors of a run reach the user: one clear message, whatever the number of ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import torch

from parcompile.plan import PlanError
from parcompile.runtime.errors import RunError, lost_peer

from .job import current
from .monitor import say
from .stopping import STOPPED_EXIT_CODE, Stopped

_WITHOUT_TRACEBACK = (RunError, OSError, MemoryError, torch.OutOfMemoryError)
"""Their message says all: what is wrong is not in the program."""


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turns errors into one message on standard error and exit code 1, and ends the other ranks.

    What every rank finds is printed by rank 0 alone; what one rank finds is printed by that rank, with its number,
    host, step and phase. `RunError`, `PlanError`, errors of the operating system and a lack of memory come without a
    traceback; other exceptions are faults of the program, and the rank that raised first shows its own. `Stopped` ends
    the process with `STOPPED_EXIT_CODE`.
    """
    rank = os.environ.get("RANK", "0")
    try:
        yield
    except Stopped as stopped:
        if rank == "0":
            say(str(stopped))
        sys.exit(STOPPED_EXIT_CODE)
    except (RunError, PlanError) as error:
        if not getattr(error, "everywhere", isinstance(error, PlanError)):
            _fail(str(error), rank, None)
        elif rank in ("0", "") or not rank.isdigit():
            say(f"error: {error}")
        sys.exit(1)
    except Exception as error:
        if lost_peer(error):
            monitor = current()
            if monitor is not None:
                monitor.wait_for_end()
            say(f"rank {rank} lost its connection to a rank that ended")
        else:
            text = f"{type(error).__name__}: {error}"
            _fail(text, rank, None if isinstance(error, _WITHOUT_TRACEBACK) else error)
        sys.exit(1)


def _fail(why: str, rank: str, error: Exception | None) -> None:
    monitor = current()
    if monitor is not None:
        monitor.fail(why, error)
        return
    if error is not None:
        traceback.print_exception(error)
    say(f"error (rank {rank}): {why}")
