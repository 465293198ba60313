"""The monitor of this job, and SIGTERM and SIGUSR1 as schedulers send them: all ranks stop after the same step."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

from parcompile.runtime.errors import lost_peer
from parcompile.runtime.liveness.recording import now_doing
from parcompile.runtime.settings import SILENT_TIMEOUT, heartbeats_wanted

from .monitor import Monitor
from .recording import records
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
        monitor = current()
        if monitor is not None:
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
