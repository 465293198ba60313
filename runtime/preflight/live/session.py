"""One rank's part in a check: stages that all ranks go through together, and one report, however it ends."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parcompile.runtime.errors import LOST_PEER, RunError
from parcompile.runtime.liveness.watchdog import LOST, CalledOff, StoreChannel
from parcompile.runtime.preflight.findings import Finding, Verdict, ranks_in_words
from parcompile.runtime.settings import HANDSHAKE_TIMEOUT

from .agreement import Arrived
from .report import LiveReport, nodes_of
from .watch import TERMINATED, Watch

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


@dataclass(slots=True)
class Found:
    """What rank 0 gathers on the way."""

    arrived: Arrived | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slow: dict[str, list[str]] = field(default_factory=dict)
    """By node."""


class Session:
    """Of one rank.

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
        self.name, self.channel, self.limits, self.found = name, channel, limits, Found()
        self._stages, self._speak = stages, speak
        self._most = limits.wait_seconds + limits.whole_seconds
        self.watch = Watch(channel, self._most, self._report_from_watch, self._lost)
        self._ending = threading.Lock()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which judges and reports."""
        return self.channel.rank == 0

    @property
    def arrived(self) -> Arrived:
        """The ranks that came, once rank 0 knows them."""
        assert self.found.arrived is not None
        return self.found.arrived

    def run(self, go_through: Callable[[], None]) -> Outcome:
        """Goes through the stages and ends the check. It raises nothing: what stops one rank stops all."""
        self.watch.start()
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
        self.watch.enter(name)
        self.channel.send(name, work())
        # The watch calls the check off when its time is over: these waits only end a little later.
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
            self.channel.call_off(text, about="" if lost else self.watch.stage)

    def _end(self) -> Outcome:
        # When the watch has begun to report, it also ends the process: this lock is never had then.
        with self._ending:
            self.watch.leave_end_to_main()
            try:
                if self.is_first:
                    report = self._report()
                    self._dismiss(report)
                    return Outcome(report.passed, report.conclusion, report)
                end = self.channel.receive_reply("end", REPORT_SECONDS, even_if_off=True)
                self.channel.send("parting", True)
                if end is not None:
                    return Outcome(*end)
                self._lost(self.watch.stage)
                return Outcome(False, "rank 0 has not reported")
            except LOST:
                self._lost(self.watch.stage)
                return Outcome(False, "rank 0 has ended before its report")
            finally:
                self.watch.stop()

    def _report_from_watch(self) -> None:
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the main thread came back at the last moment: it reports and goes on
        report = self._report()
        self._speak(report)
        self._dismiss(report)

    def _dismiss(self, report: LiveReport) -> None:
        self.channel.reply("end", [report.passed, report.conclusion])
        arrived = self.found.arrived
        present = self.channel.world_size if arrived is None else len(arrived.facts)
        self.channel.wait_for_departures(present - 1, PARTING_SECONDS)

    def _lost(self, stage: str) -> None:
        # The first that is left speaks for all.
        if self.channel.rank == 1:
            text = f"parcompile: rank 0 ended or stopped during {stage}, before its report: see what it wrote last"
            print(text, file=sys.stderr, flush=True)  # noqa: T201 -- it is for the user

    def _report(self) -> LiveReport:
        reason, found = "", self.found
        if self.channel.is_off():
            reason = self.channel.reason()
            found.findings += self._culprits(reason)
        nodes = () if found.arrived is None else nodes_of(found.arrived, found.findings, found.slow)
        return LiveReport(self.name, self.channel.world_size, tuple(found.findings), nodes, tuple(found.notes), reason)

    def _culprits(self, reason: str) -> Iterator[Finding]:
        """The ranks on which it lies that the check ended early."""
        arrived = self.found.arrived
        homes = {} if arrived is None else {one.rank: one.node for one in arrived.facts}
        failures = self.channel.failures()
        for rank, failure in failures.items():
            detail = f"node {homes.get(rank, 'not known')}: {failure['why']}"
            yield Finding(rank, failure["stage"], "done", "failed", Verdict.DIFFERS, detail)
        if failures:
            return
        silent = self.watch.silent()
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
