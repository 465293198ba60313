"""Messages between ranks through the launcher's store, and the end of the wait for one that answers nothing.

A request to torch's `TCPStore` then waits without limit, whatever its time-out, and nothing calls it back from C++. So
requests are entered here, and a thread that sends none itself sees for how long the oldest has gone unanswered.

Messages between ranks without a process group, through keys of the launcher's store. Every wait has a time-out.

In each stage every rank sends one message to rank 0, which replies to all. Any rank can call the job off. Every rank
also sends a heartbeat with the stage that it is in.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def is_running(pid: int) -> bool:
    """Whether a process lives. One that has ended and that its launcher has not collected yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    fields = process_fields(pid)
    return not fields or fields[0] not in ("Z", "X")  # a system may have no /proc


def process_fields(pid: int) -> list[str]:
    """What Linux says of a process in /proc/PID/stat, from its state on; nothing where there is none."""
    try:
        # The state stands behind the name, which may hold any character: "123 (name) S 1 …".
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


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


LOST = (RuntimeError, dist.DistError)
"""What a store raises when the process that keeps it has ended."""
POLL_SECONDS = (0.01, 0.5)
"""The first wait between two looks at the store, and the longest of a small job."""
REQUESTS_EACH_SECOND = 2000
"""What one store takes from all ranks together, beside its other work."""


class CalledOff(Exception):  # noqa: N818 -- no error of its own: the reason is in the store
    """Some rank has called the check off."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    beat: int
    stage: str


class StoreChannel:
    """This rank's end of the messages between all ranks. Threads may share it: no call on the store waits for a rank.

    It opens another connection to the store. Process groups that are being created wait for other ranks on theirs,
    which takes no other request meanwhile.

    Args:
        store: shared by all ranks.
        rank: of this process.
        world_size: number of ranks that the launcher has announced.
        name: prefix of the keys; the same on all ranks, and another one for each check of a process.
        requests: where those of this channel are entered; a watchdog over them notices a store that does not answer.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str, requests: Requests | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.requests = Requests() if requests is None else requests
        self._store, self._name = TimedStore(TimedStore(store, self.requests).clone(), self.requests), name

    def send(self, stage: str, value: Any) -> None:
        """Send this rank's message of a stage to rank 0."""
        self.post(f"{stage}/{self.rank}", value)
        self._store.add(self._key(f"{stage}/count"), 1)

    def receive_all(self, stage: str, seconds: float) -> list[Any]:
        """The messages of all ranks, on rank 0; None for those that have sent none in time.

        Raises:
            CalledOff: a rank has called the check off meanwhile.
        """
        self.wait(lambda: self._store.add(self._key(f"{stage}/count"), 0) >= self.world_size, seconds)
        return self.posted_all([f"{stage}/{rank}" for rank in range(self.world_size)])

    def reply(self, stage: str, value: Any) -> None:
        """Rank 0's reply to all."""
        self.post(f"{stage}/answer", value)

    def receive_reply(self, stage: str, seconds: float, *, even_if_off: bool = False) -> Any:
        """Rank 0's reply, or None when it does not come in time.

        Raises:
            CalledOff: a rank has called the check off meanwhile, and `even_if_off` is not set.
        """
        self.wait(lambda: self._has(f"{stage}/answer"), seconds, even_if_off=even_if_off)
        return self.posted(f"{stage}/answer")

    def call_off(self, why: str, *, about: str = "") -> None:
        """Ends the check on all ranks. `about` names the stage in which this rank failed; empty if it did not fail."""
        if about:
            self.post(f"failed/{self.rank}", {"stage": about, "why": why})
        self.post("off", why)

    def call_off_first(self, why: str) -> bool:
        """Like `call_off`; returns False where another rank was first: then its reason stands."""
        mine = json.dumps([self.rank, why])
        return bool(self._store.compare_set(self._key("off"), "", mine).decode() == mine)

    def is_off(self) -> bool:
        """Whether the check was called off."""
        return self._has("off")

    def failures(self) -> dict[int, dict[str, str]]:
        """Stage and reason of each rank that has failed."""
        found = {rank: self.posted(f"failed/{rank}") for rank in range(self.world_size)}
        return {rank: one for rank, one in found.items() if one is not None}

    def beat(self, number: int, stage: str) -> None:
        """Send a heartbeat."""
        self.post(f"alive/{self.rank}", [number, stage])

    def alive(self, count: int | None = None) -> list[Heartbeat | None]:
        """The last heartbeat of every rank, or of the first `count`."""
        found = (self.posted(f"alive/{rank}") for rank in range(self.world_size if count is None else count))
        return [None if one is None else Heartbeat(*one) for one in found]

    def post(self, name: str, value: Any) -> None:
        """Leave a value for all ranks, in place of the one of that name."""
        self._store.set(self._key(name), json.dumps(value))

    def post_first(self, name: str, value: Any) -> Any:
        """Leave a value for all ranks unless there is one; returns the one that stands."""
        return json.loads(self._store.compare_set(self._key(name), "", json.dumps(value)))

    def posted(self, name: str) -> Any:
        """What was left under a name; None: nothing."""
        return json.loads(self._store.get(self._key(name))) if self._has(name) else None

    def posted_all(self, names: Sequence[str]) -> list[Any]:
        """What was left under each name: two requests, once there is something under all of them."""
        keys = [self._key(name) for name in names]
        if keys and self._store.has_extended_api() and self._store.check(keys):
            return [json.loads(one) for one in self._store.multi_get(keys)]
        return [self.posted(name) for name in names]

    def count(self, name: str, by: int = 0) -> int:
        """Adds to a counter that all ranks share, and returns it."""
        return int(self._store.add(self._key(f"count/{name}"), by))

    def reason(self) -> str:
        """Why it was called off."""
        return str(self.posted("off"))

    def wait_for_departures(self, others: int, seconds: float) -> None:
        """Rank 0, in whose process the store may live, waits until so many others have announced that they leave."""
        self.wait(lambda: self._store.add(self._key("parting/count"), 0) >= others, seconds, even_if_off=True)

    def wait(self, ready: Callable[[], bool], seconds: float, *, even_if_off: bool = False) -> bool:
        """Whether `ready` turns true in time. In a large job looks at the store are further apart.

        Raises:
            CalledOff: a rank has called the check off meanwhile, and `even_if_off` is not set.
        """
        end, pause = time.monotonic() + seconds, POLL_SECONDS[0]
        longest = max(POLL_SECONDS[1], self.world_size / REQUESTS_EACH_SECOND)
        while not ready():
            if not even_if_off and self.is_off():
                raise CalledOff
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        return True

    def _key(self, key: str) -> str:
        return f"parcompile/{self._name}/{key}"

    def _has(self, key: str) -> bool:
        return bool(self._store.check([self._key(key)]))
