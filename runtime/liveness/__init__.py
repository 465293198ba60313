"""Which ranks live, what each is doing, and how a job ends when one fails, is lost, or is asked to stop.

How errors of a run reach the user: one clear message, the first error, whatever the number of ranks.

An error of one rank, for the ranks whose collectives it breaks: each ends with the first cause, whoever catches it.

`report_errors` and uncaught errors end a job with one line. A program that catches errors itself would see only on one
rank what went wrong, and on the others that a connection was closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parcompile.plan import PlanError
from parcompile.runtime.errors import RunError, lost_peer
from parcompile.runtime.liveness.recording import doing, follow, set_stage

from .monitor import say
from .recording import records
from .stopping import STOPPED_EXIT_CODE, Stopped, StopSignals, current, end_watch, has_failed, watch

_CALLS = ("forward", "backward", "step", "train_batch", "eval_batch")


class _Told:
    """Whether this rank has told the others of an error, which it may have survived."""

    here = False


@contextlib.contextmanager
def share_errors() -> Iterator[None]:
    """Within it, an error of this rank is told to the others, and one that follows from another rank's names that.

    Raises:
        RunError: the connection to a rank was lost that has told why.
    """
    try:
        yield
    except (StopIteration, Stopped):
        raise
    except Exception as error:
        monitor = current()
        if monitor is None or getattr(error, "follows", False):
            raise
        if not lost_peer(error):
            _Told.here = True
            monitor.tell_cause(str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")
            raise
        cause = monitor.told_cause()
        if cause is None:
            raise
        following = RunError(f"this rank ends because another has failed: {cause}")
        following.follows = True
        raise following from error
    if _Told.here and (monitor := current()) is not None:
        _Told.here = False
        monitor.tell_cause(None)


def share_errors_of(engine: Any) -> None:
    """Lets the calls of an engine's steps share their errors."""
    for name in _CALLS:
        setattr(engine, name, _sharing(getattr(engine, name)))


def _sharing(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def shared(*args: Any, **options: Any) -> Any:
        with share_errors():
            return call(*args, **options)

    return shared


# How errors of a run reach the user: one clear message, whatever the number of ranks.

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
        records.write(str(error))
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
            records.write(f"{type(error).__name__}: {error}")
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
    records.write(why)
    if error is not None:
        traceback.print_exception(error)
    say(f"error (rank {rank}): {why}")
