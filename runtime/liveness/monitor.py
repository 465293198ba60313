"""A thread beside training that says that this rank is alive, and ends the process when another rank is lost.

A rank that waits in a collective for one that has died cannot be called back from there. So every rank sends heartbeats
through the launcher's store with what it is doing. Each looks at rank 0 and at the ranks of its own machine, the end of
whose processes is seen at once; rank 0 looks at one rank of every machine. A watchdog sees that the store itself
answers nothing, whose keeper is stopped or cut off. Whoever is first to see that a rank is lost says so in one line;
then every rank ends with exit code 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

from parcompile.runtime.liveness.neighbours import Neighbours
from parcompile.runtime.liveness.recording import is_training, records
from parcompile.runtime.liveness.watchdog import (
    LOST,
    REQUESTS_EACH_SECOND,
    Requests,
    StoreChannel,
    Watchdog,
    is_running,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_SECONDS = 0.5
PARTING_SECONDS = 6.0
"""How long the rank that may keep the store waits until the others know why the job ends."""
MARK_SECONDS = 60.0
"""For how long the ranks of a machine leave it to the first of them to say that the store is lost."""
NAMED = 4
"""Ranks that a message lists; of more it says how many."""
FAILED, TERMINATED = 1, 128 + signal.SIGTERM


class Monitor:
    """Watches over the ranks of one job. At most one of a process runs at a time.

    Args:
        store: the launcher's, shared by all ranks.
        rank: of this process.
        world_size: number of ranks.
        name: of this job in the store; the same on all ranks, and another one for each job of a process.
        silent_seconds: after how long without a heartbeat a rank counts as lost.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str, silent_seconds: float) -> None:
        self.rank, self.world_size = rank, world_size
        self.activity: Callable[[], str] = lambda: "starting"
        self.stops_itself = False
        """Whether the training loop acts on SIGTERM; otherwise the signal ends the process."""
        self._unsaid: tuple[str, str] | None = None
        self._mark = Path(tempfile.gettempdir()) / f"parcompile-{os.environ.get('MASTER_PORT', '0')}-{os.getppid()}"
        self._silent = silent_seconds
        self._agent_keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._period = max(BEAT_SECONDS, world_size / REQUESTS_EACH_SECOND)
        # The watchdog is there first: opening the channel is a request too.
        requests, self._neighbours = Requests(), Neighbours(rank, world_size, silent_seconds)
        self._watchdog = Watchdog(requests, silent_seconds, self._store_is_silent)
        self._watchdog.start()
        self._channel = StoreChannel(store, rank, world_size, name, requests)
        self._beats = 0
        self._is_over, self._may_lose_store = threading.Event(), False
        self._leaves_store = False
        """Whether rank 0 may end with its store at any moment: a request would fail with a page of frames of C++."""
        self.has_failed = False
        self._hears, self._tells = os.pipe()
        os.set_blocking(self._tells, False)
        self._thread = threading.Thread(target=self._run, name="parcompile heartbeat", daemon=True)
        self._finalizer = util.Finalize(None, self.stop, exitpriority=100)

    def start(self) -> None:
        """Sends the first heartbeat; from here on the end of this process is noticed."""
        self._neighbours.enter(self._channel)
        self._beat()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # Python runs a handler only when the main thread comes back from wherever it waits; the number of the
            # signal reaches the thread at once.
            signal.signal(signal.SIGTERM, _do_nothing)
            signal.set_wakeup_fd(self._tells, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_forget_signals)
            if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
                signal.signal(signal.SIGUSR1, _do_nothing)
        self._thread.start()

    def stop(self) -> None:
        """This rank ends, or leaves the job, as it should. Rank 0 waits a moment until the others know."""
        self._finalizer.cancel()
        self._end_thread()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == _do_nothing:
            _forget_signals()
        with contextlib.suppress(*LOST):
            self._channel.post(f"ended/{self.rank}", True)
            if not self._may_lose_store:
                self._channel.count("ended", 1)
            if self.rank == 0:
                self._wait_for_others("ended")
        self._watchdog.stop()

    def fail(self, why: str, error: BaseException | None = None) -> None:
        """Ends the job because of a failure of this rank, and says so, with the traceback of `error` if there is one.

        Another rank may have been first: then this one is silent, since its failure follows from the other's.
        """
        self._is_over.set()
        self.has_failed = True
        records.write(why)
        where = f"rank {self.rank} on host {socket.gethostname()}, {self.activity()}"
        trace = "" if error is None else "".join(traceback.format_exception(error))
        self._unsaid = f"error ({where}): {why}", trace
        try:
            is_first = self._channel.call_off_first(f"{where}: {why}")
        except LOST:
            is_first = True
        if is_first:
            self._say_failure()
            _tell_agent(f"{where}: {why}")
        self._unsaid = None
        with contextlib.suppress(*LOST):
            if not is_first:
                self._channel.count("heard", 1)
            if is_first or self.rank == 0:
                self._wait_for_others("heard")

    def _say_failure(self) -> None:
        """What this rank has failed of, and the traceback, unless it was said."""
        if self._unsaid is not None:
            (text, trace), self._unsaid = self._unsaid, None
            sys.stderr.write(trace)
            say(text)

    def tell_cause(self, why: str | None) -> None:
        """Leaves word of an error of this rank, which goes on or ends as its program wants; None: it went on."""
        where = f"rank {self.rank} on host {socket.gethostname()}, {self.activity()}"
        with contextlib.suppress(*LOST):
            self._channel.post("cause", None if why is None else [self.rank, f"{where}: {why}"])

    def told_cause(self) -> str | None:
        """What another rank has told of an error, for one that has lost its connection; it waits some seconds."""
        end = time.monotonic() + PARTING_SECONDS
        with contextlib.suppress(*LOST):
            while not self._leaves_store and time.monotonic() < end:
                said = self._channel.posted("cause")
                if said is not None and said[0] != self.rank:
                    return str(said[1])
                time.sleep(0.05)
        if self._leaves_store:
            self.wait_for_end()
        return None

    def wait_for_end(self) -> None:
        """For the main thread, whose collective has failed: waits until the thread ends the process.

        It returns after some seconds when no rank turns out to be lost.
        """
        self._is_over.wait(PARTING_SECONDS + 4 * self._period)

    def _end_thread(self) -> None:
        """A thread that is in the store's C++ when Python ends aborts the process."""
        self._is_over.set()
        with contextlib.suppress(BlockingIOError):
            os.write(self._tells, b"\0")
        if self._thread.is_alive():
            self._thread.join(PARTING_SECONDS)

    def _run(self) -> None:
        known_pause = None
        try:
            while True:
                ready, _, _ = select.select([self._hears], [], [], self._period)
                signals = os.read(self._hears, 64) if ready else b""
                for one in {signal.SIGTERM, signal.SIGUSR1} & set(signals):
                    records.write(signal.Signals(one).name)
                if self._is_over.is_set():
                    return
                records.look_for_standstill(self._silent / 2)
                pause = self._watchdog.last_pause()
                if pause is not None and pause != known_pause:
                    # While this rank was stopped it heard nobody: the others have their full time again.
                    known_pause = pause
                    self._neighbours.forget()
                if self._keeper_has_ended():
                    # A request to its store would fail with a page of frames of C++.
                    self._store_is_gone()
                    return
                self._beat()
                if self._channel.is_off():
                    with contextlib.suppress(*LOST):  # rank 0 has ended with its store: the reason was said
                        self._let_first_end()
                    _end(FAILED)
                lost = self._lost()
                if lost and self._was_stopped():
                    _end(FAILED)
                if lost:
                    self._name(lost)
                if signal.SIGTERM in signals and not self.stops_itself:
                    self._look_until(time.monotonic() + 2 * self._period)
                    _end(TERMINATED)
        except LOST:
            if not self._is_over.is_set() and not self._may_lose_store:
                self._store_is_gone()

    def _keeper_has_ended(self) -> bool:
        """Whether rank 0 is on this machine, has ended without a word, and took the store with it."""
        if self.rank == 0 or self._may_lose_store or self._agent_keeps_store:
            return False
        host, pid = self._neighbours.known_process(0)
        return host == socket.gethostname() and not is_running(pid)

    def _let_first_end(self, *, lost: int = 0) -> None:
        """A launcher names the process that ends first as the cause: that of the rank that has failed, on its machine.

        The others of that machine wait some seconds for it, and rank 0 until all have heard but so many that are lost.
        Once all have counted up, the store may be gone.
        """
        first, why = self._channel.posted("off")
        host, pid = self._neighbours.process(int(first))
        records.write(str(why))
        self._leaves_store = True
        self._channel.count("heard", 1)
        if self.rank == 0:
            self._wait_for_others("heard", without=lost)
        end = time.monotonic() + PARTING_SECONDS
        if host == socket.gethostname():
            while is_running(pid) and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(2 * BEAT_SECONDS)  # a launcher has looked, and orders ends by seconds

    def _look_until(self, end: float) -> None:
        """A launcher sends SIGTERM because a rank has died: it may be seen only a moment later."""
        while time.monotonic() < end and not self._channel.is_off():
            if lost := self._lost():
                self._name(lost)
            time.sleep(self._period / 5)

    def _lost(self) -> dict[int, str]:
        """Ranks that have ended without a word or have fallen silent, with what is known of each."""
        here, watched, found = self._neighbours.host, list(self._neighbours.look()), dict[int, str]()
        now = time.monotonic()
        for rank, heard in watched:
            host, pid = self._neighbours.process(rank)
            is_silent = now - heard.since > self._silent
            if host == here and not is_running(pid):
                what = "ended without a message (killed by the system, or out of memory?)"
            elif is_silent:
                what = f"has given no sign of life for {self._silent:.0f} s"
            else:
                continue
            # What a rank says last stands in the store before its process ends.
            if not self._has_ended(rank):
                who = f"rank {rank} on host {host} (process {pid})" if host else f"rank {rank} of {self.world_size}"
                found[rank] = f"{who} {what}; {now - heard.since:.1f} s before, it was {heard.activity}"
                if is_silent and host:
                    for other in self._neighbours.silent_beside(rank, 2 * self._period):
                        if not self._has_ended(other):
                            found[other] = f"rank {other} on host {host} is silent, too"
        return found

    def _has_ended(self, rank: int) -> bool:
        if self._channel.posted(f"ended/{rank}") is None:
            return False
        if rank == 0 and not self._may_lose_store:
            self._may_lose_store = True
            self._channel.count("ended", 1)
        return True

    def _name(self, lost: Mapping[int, str]) -> None:
        """Ends the job with one line, unless another rank says it."""
        lines = list(lost.values())
        more = [f"and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
        pause = self._watchdog.last_pause()
        if pause is not None and time.monotonic() - pause[0] < 2 * self._silent:
            more.append(f"rank {self.rank} itself was stopped for {pause[1]:.0f} s before")
        text = "; ".join([*lines[:NAMED], *more])
        records.write(text)
        if self._channel.call_off_first(text):
            say(f"error: {text}{records.pointer()}")
            self._wait_for_others("heard", without=len(lost))
        else:
            with contextlib.suppress(*LOST):
                self._let_first_end(lost=len(lost))
        _end(FAILED)

    def _was_stopped(self) -> bool:
        """Whether this process was stopped until a moment ago, for so long that the others have named it and ended."""
        pause = self._watchdog.last_pause()
        return pause is not None and time.monotonic() - pause[0] < PARTING_SECONDS + 4 * self._period

    def _store_is_gone(self) -> None:
        """Rank 0, or the launcher's agent, has ended. Each machine says so once."""
        if self._is_over.wait(self._period):
            return  # the main thread ends by itself
        if self._was_stopped():
            _end(FAILED)
        host, pid = self._neighbours.known_process(0)
        if self._agent_keeps_store:
            what = "has ended"
        elif host != socket.gethostname():
            what = "has ended without a message, or cannot be reached"
        elif is_running(pid):
            what = "has closed its store"
        else:
            what = "has ended without a message (killed by the system, or out of memory?)"
        self._say_once(f"error: {self._keeper()} {what}{self._last_activity()}")
        _end(FAILED)

    def _store_is_silent(self, seconds: float) -> None:
        """The watchdog calls this: whatever else this process does waits for the store, or will."""
        self._say_failure()
        what = f"has answered nothing for {seconds:.0f} s: it is stopped, hangs, or cannot be reached"
        self._say_once(f"error: {self._keeper()} {what}{self._last_activity()}")
        _end(FAILED)

    def _keeper(self) -> str:
        """Who keeps the store."""
        place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        if self._agent_keeps_store:
            return f"the launcher's process that keeps the store at {place}"
        host, pid = self._neighbours.known_process(0)
        if not host:
            return f"rank 0, which keeps the store at {place},"
        return f"rank 0 on host {host} (process {pid})"

    def _last_activity(self) -> str:
        """What rank 0 said last, and how long ago: heartbeats are behind what it did at its end."""
        heard = self._neighbours.last(0)
        if heard is None or self._agent_keeps_store:
            return ""
        return f"; {time.monotonic() - heard.since:.1f} s before, it was {heard.activity}"

    def _say_once(self, text: str) -> None:
        """On this machine: the others find the mark of the first."""
        records.write(text)
        text += records.pointer()
        with contextlib.suppress(OSError):
            if time.time() - self._mark.stat().st_mtime > MARK_SECONDS:
                self._mark.unlink()  # of a process that was killed before it could
        try:
            os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        except OSError:
            say(text)
            return
        say(text)
        # The others notice it within that time.
        time.sleep(2 * self._period + 1)
        with contextlib.suppress(OSError):
            self._mark.unlink()

    def _wait_for_others(self, name: str, *, without: int = 0) -> None:
        """Until all other ranks have counted up `name`, or some seconds have passed."""
        wanted = self.world_size - without - (0 if name == "ended" else 1)
        end = time.monotonic() + max(PARTING_SECONDS, 4 * self._period)
        while self._channel.count(name) < wanted and time.monotonic() < end:
            time.sleep(0.02)

    def _beat(self) -> None:
        self._beats += 1
        self._channel.beat(self._beats, self.activity())
        if self.rank and not self._may_lose_store:
            self._has_ended(0)


def _tell_agent(text: str) -> None:
    """Lets torchrun's last words name this rank and its error, as its workers do that are marked with `record`.

    Source: torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception.
    """
    if not (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def say(text: str) -> None:
    """Prints one line for the user. While steps are made, a progress bar of any rank may stand where it would begin."""
    start = "\n" if is_training() else ""
    print(f"{start}parcompile: {text}", file=sys.stderr, flush=True)  # noqa: T201 -- it is for the user


def _end(code: int) -> None:
    """Ends the process from any thread, whatever its main thread waits for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _do_nothing(*_: object) -> None:
    """The monitor's thread acts on the signal."""


def _forget_signals() -> None:
    """Also in processes that this one forks, such as a loader's workers: they end on SIGTERM, and tell nobody."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGUSR1) == _do_nothing:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
