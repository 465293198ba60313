"""A thread beside the check that sends heartbeats, and ends the process when the check cannot end by itself.

A rank that waits in a collective for another that has died, hangs or gave up cannot be called back from there. The
thread sees that the check was called off, or that its time is over, lets the main thread end by itself if it can, and
otherwise reports in its place and ends the process with exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

from parcompile.runtime.liveness.watchdog import LOST, Heartbeat, StoreChannel, Watchdog

BEAT_SECONDS = 0.5
BEATS_EACH_SECOND = 5000
"""What one store takes from all ranks together."""
GRACE_SECONDS = 3.0
"""For the main thread to notice by itself."""
SILENT_SECONDS = 30.0
"""Without a sign of life for so long, a rank is given up. Launchers notice the end of a process much sooner."""
PARTING_SECONDS = 20.0
"""How long a rank that cannot go on waits for rank 0's report."""
TERMINATED = "the launcher ends the job"


class Watch:
    """Watches over one check.

    Args:
        channel: where this rank speaks.
        limit_seconds: for the whole check.
        report: called on rank 0, in the watch's thread, when the main thread cannot: it prints what is known.
        lost: called on the other ranks when rank 0's store is gone.
    """

    def __init__(
        self, channel: StoreChannel, limit_seconds: float, report: Callable[[], None], lost: Callable[[str], None]
    ) -> None:
        self.stage = "start"
        self._channel, self._report, self._lost = channel, report, lost
        self._limit = limit_seconds
        self._end = float("inf")
        self._period = max(BEAT_SECONDS, channel.world_size / BEATS_EACH_SECOND)
        self._beats = 0
        self._heard: dict[int, tuple[Heartbeat | None, float]] = {}
        self._next_look = 0.0
        self._over, self._main_ends = threading.Event(), threading.Event()
        self._hears, self._tells = os.pipe()
        self._thread = threading.Thread(target=self._run, name="parcompile watch", daemon=True)
        self._watchdog = Watchdog(channel.requests, SILENT_SECONDS, self._store_is_silent)

    def start(self) -> None:
        """From here on the limit counts."""
        self._end = time.monotonic() + self._limit
        self._watchdog.start()
        self._thread.start()

    def enter(self, stage: str) -> None:
        """This rank has come to that stage."""
        self.stage = stage
        self._beat()

    def leave_end_to_main(self) -> None:
        """The main thread ends the check: the watch only goes on saying that this rank is alive."""
        self._main_ends.set()

    def stop(self) -> None:
        """The check is over."""
        self._over.set()
        os.write(self._tells, b"\0")
        self._thread.join()
        self._watchdog.stop()
        os.close(self._hears)
        os.close(self._tells)

    @contextlib.contextmanager
    def of_termination(self) -> Iterator[None]:
        """Within, SIGTERM calls the check off instead of ending the process: a launcher sends it when a rank has died.

        Python runs a handler only when the main thread comes back from wherever it waits; the number of the signal
        reaches the watch at once.
        """
        os.set_blocking(self._tells, False)
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        old = signal.set_wakeup_fd(self._tells, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            signal.signal(signal.SIGTERM, before)

    def silent(self) -> dict[int, Heartbeat | None]:
        """Ranks that give no sign of life now, with their last one."""
        before = self._channel.alive()
        end = time.monotonic() + 3 * self._period + 0.5
        while time.monotonic() < end:
            time.sleep(self._period / 2)
            self._beat()
        after = self._channel.alive()
        return {
            rank: one
            for rank, (one, was) in enumerate(zip(after, before, strict=True))
            if one is None or (was is not None and one.beat == was.beat)
        }

    def _run(self) -> None:
        off_since: float | None = None
        try:
            while off_since is None or time.monotonic() < off_since + GRACE_SECONDS:
                heard = self._wait()
                if self._over.is_set():
                    return
                self._beat()
                if self._main_ends.is_set():
                    off_since = None
                    continue
                if signal.SIGTERM in heard:
                    self._channel.call_off(TERMINATED)
                elif off_since is None and time.monotonic() > self._end:
                    self._channel.call_off(f"the check was not through within {self._limit:.0f} s")
                elif off_since is None:
                    self._look()
                if off_since is None and self._channel.is_off():
                    off_since = time.monotonic()
            if self._channel.rank == 0:
                self._report()
            else:
                self._wait_for_report()
        except LOST:
            # Whoever keeps the store has ended: rank 0, or the launcher.
            if self._over.wait(GRACE_SECONDS) or self._main_ends.is_set():
                return
            self._lost(self.stage)
        os._exit(1)

    def _store_is_silent(self, _: float) -> None:
        """The process that keeps the store is stopped: nothing else of this one would come back."""
        self._lost(self.stage)
        os._exit(1)

    def _look(self) -> None:
        """Gives up ranks that came and have been silent for too long. Rank 0 looks at all, the others at rank 0."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + SILENT_SECONDS / 4
        for rank, one in enumerate(self._channel.alive(None if self._channel.rank == 0 else 1)):
            last, since = self._heard.get(rank, (None, now))
            if one is None or one != last:
                self._heard[rank] = one, now
            elif now - since > SILENT_SECONDS:
                self._channel.call_off(f"rank {rank} gives no sign of life")

    def _wait(self) -> bytes:
        ready, _, _ = select.select([self._hears], [], [], self._period)
        return os.read(self._hears, 64) if ready else b""

    def _wait_for_report(self) -> None:
        end, heard = time.monotonic() + PARTING_SECONDS, None
        while heard is None and time.monotonic() < end:
            self._beat()
            heard = self._channel.receive_reply("end", self._period, even_if_off=True)
        if heard is None:
            self._lost(self.stage)
        self._channel.send("parting", True)

    def _beat(self) -> None:
        self._beats += 1
        self._channel.beat(self._beats, self.stage)
