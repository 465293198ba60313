"""One rank's part in a check: stages that all ranks go through together, and one report, however it ends.

A rank that waits in a collective for another that has died, hangs or gave up cannot be called back from there. So a
thread beside the check sends heartbeats, and sees that the check was called off, or that its time is over. It lets the
main thread end by itself if it can, and otherwise reports in its place and ends the process with exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parcompile.runtime.errors import LOST_PEER, RunError
from parcompile.runtime.liveness.monitor import say
from parcompile.runtime.liveness.watchdog import LOST, CalledOff, Heartbeat, StoreChannel, Watchdog
from parcompile.runtime.preflight.findings import Finding, Verdict, ranks_in_words
from parcompile.runtime.settings import HANDSHAKE_TIMEOUT

from .agreement import Arrived, LiveReport, nodes_of

BEAT_SECONDS = 0.5
BEATS_EACH_SECOND = 5000
"""What one store takes from all ranks together."""
GRACE_SECONDS = 3.0
"""For the main thread to notice by itself."""
SILENT_SECONDS = 30.0
"""Without a sign of life for so long, a rank is given up. Launchers notice the end of a process much sooner."""
LAST_SECONDS = 20.0
"""How long a rank that cannot go on waits for rank 0's report."""
TERMINATED = "the launcher ends the job"
PARTING_SECONDS = 5.0
REPORT_SECONDS = 60.0
"""For rank 0 to find out who is silent, and to report."""
_EXPECTED = (RunError, RuntimeError, OSError, ValueError)
"""Errors whose message says enough; of others the line is said too."""

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a check may take."""

    wait_seconds: float = field(default_factory=HANDSHAKE_TIMEOUT.seconds)
    """For all ranks to arrive."""
    measure_seconds: float = 10.0
    """To spend on links and matrix products."""
    whole_seconds: float = 900.0
    """For everything after arrival."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the check ended, on every rank; the report is rank 0's."""

    passed: bool
    reason: str
    report: LiveReport | None = None


class Session:
    """Of one rank.

    Attributes:
        came: on rank 0 the ranks that came, once it knows them.
        findings: with `notes`, and by node what is `slow`: what it gathers on the way.

    Args:
        name: of the plan, for the report.
        channel: where ranks speak.
        limits: after which the check is called off.
        stages: names of all stages, in their order.
        speak: prints the report on rank 0 when the main thread cannot come back.
    """

    def __init__(
        self,
        name: str,
        channel: StoreChannel,
        limits: Limits,
        stages: Sequence[str],
        speak: Callable[[LiveReport], None],
    ) -> None:
        self.name, self.channel, self.limits = name, channel, limits
        self.came: Arrived | None = None
        self.findings, self.notes, self.slow = list[Finding](), list[str](), dict[str, list[str]]()
        self.is_first = channel.rank == 0  # judges and reports
        self._stages, self._speak = stages, speak
        self._most = limits.wait_seconds + limits.whole_seconds
        self._end_of_time = float("inf")
        self._stage = "start"
        self._period, self._beats = max(BEAT_SECONDS, channel.world_size / BEATS_EACH_SECOND), 0
        self._heard: dict[int, tuple[Heartbeat | None, float]] = {}
        self._next_look = 0.0
        self._ending, self._over, self._main_ends = threading.Lock(), threading.Event(), threading.Event()
        self._hears, self._tells = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="parcompile watch", daemon=True)
        self._watchdog = Watchdog(channel.requests, SILENT_SECONDS, self._store_is_silent)

    @property
    def arrived(self) -> Arrived:
        """The ranks that came, where they are known."""
        assert self.came is not None
        return self.came

    def run(self, go_through: Callable[[], None]) -> Outcome:
        """Goes through the stages and ends the check. It raises nothing: what stops one rank stops all."""
        self._end_of_time = time.monotonic() + self._most
        self._watchdog.start()
        self._thread.start()
        try:
            go_through()
        except CalledOff:
            pass
        except Exception as error:  # DistError, which a store raises, is one
            self._fail(error)
        return self._end()

    def stage(
        self,
        name: str,
        work: Callable[[], Any],
        judge: Callable[[Sequence[Any]], Answer],
        *,
        seconds: float | None = None,
    ) -> Answer:
        """Every rank works and says what it found; rank 0 judges, and all return its answer.

        Args:
            name: of the stage.
            work: what this rank does; its result travels as JSON.
            judge: on rank 0, from the results of all ranks; None stands for one that was silent for `seconds`.
            seconds: to wait for all; None: until the check is called off.

        Raises:
            CalledOff: some rank has ended the check.
        """
        self._stage = name
        self._beat()
        self.channel.send(name, work())
        # The thread calls the check off when its time is over: these waits only end a little later.
        most = self._most + PARTING_SECONDS
        if self.is_first:
            self.channel.reply(name, judge(self.channel.receive_all(name, most if seconds is None else seconds)))
        answer: Answer | None = self.channel.receive_reply(name, most)
        if answer is None:
            raise RunError("rank 0 has not answered")
        return answer

    def _fail(self, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        text = lines[0] if lines else type(error).__name__
        lost = any(sign in str(error) for sign in LOST_PEER)
        if not isinstance(error, _EXPECTED):
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})"
        with contextlib.suppress(*LOST):
            # One that lost its connection only says that another has ended: which, signs of life will tell.
            self.channel.call_off(text, about="" if lost else self._stage)

    def _end(self) -> Outcome:
        # When the thread has begun to report, it also ends the process: this lock is never had then.
        with self._ending:
            self._main_ends.set()
            try:
                if self.is_first:
                    report = self._report()
                    self._dismiss(report)
                    return Outcome(report.passed, report.conclusion, report)
                end = self.channel.receive_reply("end", REPORT_SECONDS, even_if_off=True)
                self.channel.send("parting", True)
                if end is not None:
                    return Outcome(*end)
                self._lost()
                return Outcome(False, "rank 0 has not reported")
            except LOST:
                self._lost()
                return Outcome(False, "rank 0 has ended before its report")
            finally:
                self._stop_watching()

    def _stop_watching(self) -> None:
        self._over.set()
        os.write(self._tells, b"\0")
        self._thread.join()
        self._watchdog.stop()
        os.close(self._hears)
        os.close(self._tells)

    def _report_from_thread(self) -> None:
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the main thread came back at the last moment: it reports and goes on
        report = self._report()
        self._speak(report)
        self._dismiss(report)

    def _dismiss(self, report: LiveReport) -> None:
        self.channel.reply("end", [report.passed, report.conclusion])
        present = self.channel.world_size if self.came is None else len(self.came.facts)
        self.channel.wait_for_departures(present - 1, PARTING_SECONDS)

    def _lost(self) -> None:
        # The first that is left speaks for all.
        if self.channel.rank == 1:
            say(f"rank 0 ended or stopped during {self._stage}, before its report: see what it wrote last")

    def _report(self) -> LiveReport:
        reason = ""
        if self.channel.is_off():
            reason = self.channel.reason()
            self.findings += self._culprits(reason)
        nodes = () if self.came is None else nodes_of(self.came, self.findings, self.slow)
        return LiveReport(self.name, self.channel.world_size, tuple(self.findings), nodes, tuple(self.notes), reason)

    def _culprits(self, reason: str) -> Iterator[Finding]:
        """The ranks on which it lies that the check ended early."""
        homes = {} if self.came is None else {one.rank: one.node for one in self.came.facts}
        failures = self.channel.failures()
        for rank, failure in failures.items():
            detail = f"node {homes.get(rank, 'not known')}: {failure['why']}"
            yield Finding(rank, failure["stage"], "done", "failed", Verdict.DIFFERS, detail)
        if failures:
            return
        silent = self._silent()
        for rank, last in silent.items():
            where = "nothing was heard of it" if last is None else f"silent since {last.stage}"
            detail = f"node {homes.get(rank, 'not known')}: {where}; its process has ended or is stopped"
            yield Finding(rank, "signs of life", "all the time", "none", Verdict.DIFFERS, detail)
        if silent or reason == TERMINATED:
            return
        stages = ["" if one is None else one.stage for one in self.channel.alive()]
        order = {name: index for index, name in enumerate(self._stages)}
        first = min(stages, key=lambda name: order.get(name, -1))
        behind = [rank for rank, stage in enumerate(stages) if stage == first]
        for rank in behind:
            detail = f"{ranks_in_words(behind)} did not come to the end of it"
            yield Finding(rank, first, "done", "not done", Verdict.DIFFERS, detail)

    @contextlib.contextmanager
    def catching_termination(self) -> Iterator[None]:
        """Within, SIGTERM calls the check off instead of ending the process: a launcher sends it when a rank has died.

        Python runs a handler only when the main thread comes back from wherever it waits; the number of the signal
        reaches the thread at once.
        """
        os.set_blocking(self._tells, False)
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        old = signal.set_wakeup_fd(self._tells, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            signal.signal(signal.SIGTERM, before)

    def _silent(self) -> dict[int, Heartbeat | None]:
        """Ranks that give no sign of life now, with their last one."""
        before = self.channel.alive()
        end = time.monotonic() + 3 * self._period + 0.5
        while time.monotonic() < end:
            time.sleep(self._period / 2)
            self._beat()
        after = self.channel.alive()
        return {
            rank: one
            for rank, (one, was) in enumerate(zip(after, before, strict=True))
            if one is None or (was is not None and one.beat == was.beat)
        }

    def _watch(self) -> None:
        off_since: float | None = None
        try:
            while off_since is None or time.monotonic() < off_since + GRACE_SECONDS:
                ready, _, _ = select.select([self._hears], [], [], self._period)
                heard = os.read(self._hears, 64) if ready else b""
                if self._over.is_set():
                    return
                self._beat()
                if self._main_ends.is_set():
                    off_since = None
                    continue
                if signal.SIGTERM in heard:
                    self.channel.call_off(TERMINATED)
                elif off_since is None and time.monotonic() > self._end_of_time:
                    self.channel.call_off(f"the check was not through within {self._most:.0f} s")
                elif off_since is None:
                    self._look()
                if off_since is None and self.channel.is_off():
                    off_since = time.monotonic()
            if self.is_first:
                self._report_from_thread()
            else:
                self._wait_for_report()
        except LOST:
            # Whoever keeps the store has ended: rank 0, or the launcher.
            if self._over.wait(GRACE_SECONDS) or self._main_ends.is_set():
                return
            self._lost()
        os._exit(1)

    def _store_is_silent(self, _: float) -> None:
        """The process that keeps the store is stopped: nothing else of this one would come back."""
        self._lost()
        os._exit(1)

    def _look(self) -> None:
        """Gives up ranks that came and have been silent for too long. Rank 0 looks at all, the others at rank 0."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + SILENT_SECONDS / 4
        for rank, one in enumerate(self.channel.alive(None if self.is_first else 1)):
            last, since = self._heard.get(rank, (None, now))
            if one is None or one != last:
                self._heard[rank] = one, now
            elif now - since > SILENT_SECONDS:
                self.channel.call_off(f"rank {rank} gives no sign of life")

    def _wait_for_report(self) -> None:
        end, heard = time.monotonic() + LAST_SECONDS, None
        while heard is None and time.monotonic() < end:
            self._beat()
            heard = self.channel.receive_reply("end", self._period, even_if_off=True)
        if heard is None:
            self._lost()
        self.channel.send("parting", True)

    def _beat(self) -> None:
        self._beats += 1
        self.channel.beat(self._beats, self._stage)
