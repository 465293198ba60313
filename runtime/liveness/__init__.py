"""Which ranks live, what each is doing, and how a job ends when one fails, is lost, or is asked to stop.

How errors of a run reach the user: one clear message, the first error, whatever the number of ranks.

An error of one rank, for the ranks whose collectives it breaks: each ends with the first cause, whoever catches it.

`report_errors` and uncaught errors end a job with one line. A program that catches errors itself would see only on one
rank what went wrong, and on the others that a connection was closed.

The monitor of this job, and SIGTERM and SIGUSR1 as schedulers send them: all ranks stop after the same step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parcompile.plan import PlanError
from parcompile.runtime.errors import RunError, lost_peer
from parcompile.runtime.settings import SILENT_TIMEOUT, heartbeats_wanted

from .monitor import Monitor, say
from .recording import doing, follow, now_doing, records, set_stage
from .watchdog import StoreChannel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_monitor: Monitor | None = None


def current() -> Monitor | None:
    """The monitor; None without other ranks, before `watch`, and where heartbeats are switched off."""
    return _monitor


def watch(store: Store, rank: int, world_size: int, name: str) -> None:
    """Starts the heartbeats of this rank. All ranks call it with the same name, a new one for each job of a process."""
    global _monitor
    if world_size == 1 or not heartbeats_wanted() or _monitor is not None:
        return
    _monitor = Monitor(store, rank, world_size, name, SILENT_TIMEOUT.seconds())
    _monitor.activity = now_doing
    _monitor.start()
    if sys.excepthook is not _report_uncaught:
        sys.excepthook = _report_uncaught


def has_failed() -> bool:
    """Whether the job ends because of a failure of this rank."""
    return _monitor is not None and _monitor.has_failed


def end_watch() -> None:
    """This rank leaves the job as it should."""
    global _monitor
    if _monitor is not None:
        _monitor.stop()
    _monitor = None


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For scripts that do not use `report_errors`: the rank that failed speaks, the others end without a traceback."""
    if _monitor is None or issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif lost_peer(error):
        records.write(f"{kind.__name__}: {error}")
        _monitor.wait_for_end()
        sys.__excepthook__(kind, error, trace)
    else:
        _monitor.fail(f"{kind.__name__}: {error}", error)


STOPPED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: start the job again, and it goes on."""

_NUMBERS = itertools.count()


class Stopped(Exception):  # noqa: N818 -- no error: the run was asked to stop, and did
    """A run has ended early because a signal asked for it. The message says where it goes on."""


class StopSignals:
    """Catches signals that ask a run to stop. Make it once, in the main thread, after `initialize`.

    A signal may reach one rank or all. The first rank to notice it announces the step after which all stop: the next
    one, since a step is over on no rank before every rank has taken part in it.

    Args:
        signals: which ones.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._heard: str | None = None
        self._last_step: int | None = None
        self._channel: StoreChannel | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            store, name = dist.distributed_c10d._get_default_store(), f"stop-{next(_NUMBERS)}"
            self._channel = StoreChannel(store, dist.get_rank(), dist.get_world_size(), name)
        self.signal = ""
        """The name of the signal, once `due` has returned True."""
        for one in signals:
            signal.signal(one, self._hear)
        if (monitor := current()) is not None:
            monitor.stops_itself = signal.SIGTERM in signals

    def due(self, step: int) -> bool:
        """Whether the run stops after this step, which has just been made. The same on all ranks that call it."""
        if self._channel is None:
            self.signal = self._heard or ""
            return self._heard is not None
        if self._last_step is None:
            said = self._channel.posted("after")
            if said is None and self._heard is not None:
                said = self._channel.post_first("after", [step + 1, self._heard])
            if said is not None:
                self._last_step, self.signal = int(said[0]), str(said[1])
        return self._last_step is not None and step >= self._last_step

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard = signal.Signals(number).name


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
        setattr(engine, name, share_errors()(getattr(engine, name)))


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
            if (monitor := current()) is not None:
                monitor.wait_for_end()
            records.write(f"{type(error).__name__}: {error}")
            say(f"rank {rank} lost its connection to a rank that ended")
        else:
            text = f"{type(error).__name__}: {error}"
            _fail(text, rank, None if isinstance(error, _WITHOUT_TRACEBACK) else error)
        sys.exit(1)


def _fail(why: str, rank: str, error: Exception | None) -> None:
    if (monitor := current()) is not None:
        monitor.fail(why, error)
        return
    records.write(why)
    if error is not None:
        traceback.print_exception(error)
    say(f"error (rank {rank}): {why}")
