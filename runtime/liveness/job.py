"""The monitor of the job that this process takes part in."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from parcompile.runtime.errors import lost_peer
from parcompile.runtime.settings import SILENT_TIMEOUT, heartbeats_wanted

from .activity import now_doing
from .monitor import Monitor
from .recording import records

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
