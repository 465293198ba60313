"""SIGTERM and SIGUSR1 as schedulers send them before they take a node away: all ranks stop after the same step."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from types import FrameType

import torch.distributed as dist

from .job import current
from .watchdog import StoreChannel

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
