"""Ends the wait for a store that answers nothing: the process that keeps it is stopped, hangs, or cannot be reached.

A request to torch's `TCPStore` then waits without limit, whatever its time-out, and nothing calls it back from C++. So
requests are entered here, and a thread that sends none itself sees for how long the oldest has gone unanswered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")

TICK_SECONDS = 0.5
"""Between two looks of the watchdog, unless the time-out is short."""


class Requests:
    """The requests of this process that a store has not answered yet. Threads may share it."""

    def __init__(self) -> None:
        self._under_way: dict[object, None] = {}

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Within it a request is under way."""
        request = object()
        self._under_way[request] = None
        try:
            yield
        finally:
            del self._under_way[request]

    def oldest(self) -> object | None:
        """The request that has been under way for longest."""
        return next(iter(list(self._under_way)), None)


class Watchdog:
    """Calls `expired` once when the store has left a request unanswered for too long.

    It counts only the time in which this process ran: one that was stopped itself gives the store its full time again.

    Args:
        requests: to watch.
        limit_seconds: after which a request counts as unanswered.
        expired: called in the watchdog's thread with the seconds that the request has waited.
    """

    def __init__(self, requests: Requests, limit_seconds: float, expired: Callable[[float], None]) -> None:
        self._requests, self._limit, self._expired = requests, limit_seconds, expired
        self._over, self._lock = threading.Event(), threading.Lock()
        self._seen = time.monotonic()
        self._pause: tuple[float, float] | None = None
        self._thread = threading.Thread(target=self._run, name="parcompile watchdog", daemon=True)

    def start(self) -> None:
        """From here on requests are watched."""
        self._seen = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Watches no longer."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def last_pause(self) -> tuple[float, float] | None:
        """When this process last ran again after it was stopped for long (`time.monotonic`), and for how many seconds.

        Long is half of the time-out: the others see the silence from the last heartbeat on, which was before.
        """
        self._look_at_clock()
        return self._pause

    def _look_at_clock(self) -> float:
        """Seconds since the last look of any thread; 0 where no thread of this process ran meanwhile."""
        with self._lock:
            now = time.monotonic()
            passed, self._seen = now - self._seen, now
            if passed <= self._limit / 2:
                return passed
            self._pause = now, passed
            return 0.0

    def _run(self) -> None:
        watched, since, pause = None, time.monotonic(), self._pause
        while not self._over.wait(min(TICK_SECONDS, self._limit / 8)):
            self._look_at_clock()
            request, now = self._requests.oldest(), time.monotonic()
            if request is not watched or pause != self._pause:
                watched, since, pause = request, now, self._pause
            elif request is not None and now - since > self._limit:
                self._expired(now - since)
                return


class TimedStore:
    """A store whose requests are entered: what it offers is what `store` offers."""

    def __init__(self, store: Any, requests: Requests) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def ask(*args: Any) -> Any:
            with self._requests.one():
                return method(*args)

        return ask


class Unanswered(Exception):  # noqa: N818 -- the caller says what it means
    """The store has left a request unanswered."""


def within(seconds: float, requests: Requests, work: Callable[[], T]) -> T:
    """What `work` returns, which sends requests to a store. It runs in a thread of its own.

    Raises:
        Unanswered: a request was under way for so long. The thread stays behind in the store's C++.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised in the thread that asked for the work
            _settle(outcome.set_exception, error)
        else:
            _settle(outcome.set_result, result)

    watchdog = Watchdog(requests, seconds, lambda _: _settle(outcome.set_exception, Unanswered()))
    watchdog.start()
    threading.Thread(target=run, name="parcompile requests", daemon=True).start()
    try:
        return outcome.result()
    finally:
        watchdog.stop()


def _settle(how: Callable[[Any], None], value: Any) -> None:
    """Unless the other thread was first."""
    with contextlib.suppress(InvalidStateError):
        how(value)
