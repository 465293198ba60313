"""Ends all stages of a pipeline when one fails, in bounded time and with its name.

A rank that waits for a stage which is gone may wait for long: gloo notices a closed connection, NCCL does not, and
neither notices a process that is stopped. So whoever fails leaves a note in the store around which the ranks have met,
every rank gives signs of life there, and a thread beside each looks for both while a step runs. What has happened is
said by the first that notices; the others repeat it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import torch.distributed as dist

from parcompile.runtime.errors import LOST_PEER, RunError
from parcompile.runtime.groups import Mesh, store_of_world
from parcompile.runtime.settings import STAGE_TIMEOUT

BEAT_SECONDS = 1.0
BEATS_EACH_SECOND = 2000
"""What one store takes from all ranks together."""
GRACE_SECONDS = 5.0
"""For the main thread to notice by itself, and for another rank to say what it knows."""

_FAILED = "failed"


class LostStageError(RuntimeError):
    """The connection to a neighbouring stage is gone."""

    def __init__(self, pp_rank: int, reason: str) -> None:
        super().__init__(reason)
        self.pp_rank = pp_rank


@contextlib.contextmanager
def talking_to(pp_rank: int) -> Iterator[None]:
    """Within it, a lost connection is one to that stage.

    Raises:
        LostStageError: it is lost.
    """
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in LOST_PEER):
            raise LostStageError(pp_rank, str(error)) from error
        raise


class StageWatch:
    """Watches over the steps of one rank."""

    def __init__(self, mesh: Mesh) -> None:
        store = store_of_world()
        assert store is not None
        # Of its own: a thread that waits in the store keeps others out of the same connection.
        self._store = dist.PrefixStore("parcompile/stages", store.clone())  # type: ignore[attr-defined]
        self._rank, self._stage = mesh.rank, mesh.index("pp")
        self._ranks = mesh.plan.groups.of_rank("pp", mesh.rank)
        self._period = max(BEAT_SECONDS, mesh.plan.world_size / BEATS_EACH_SECOND)
        self._silent_seconds = STAGE_TIMEOUT.seconds()
        self._running = threading.Event()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._beats = 0
        self._since: float | None = None
        self._reason: str | None = None
        target = functools.partial(_run, weakref.ref(self), self._period)
        threading.Thread(target=target, name="parcompile stages", daemon=True).start()

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Within it this rank waits for others.

        Raises:
            RunError: another rank has failed; which is said.
        """
        self._heard.clear()
        self._running.set()
        try:
            yield
        except RunError as error:
            if not error.everywhere:
                self._leave_note(f"{self._name(self._stage)}: {error}")
            raise
        except Exception as error:
            lost = isinstance(error, LostStageError) or any(sign in str(error) for sign in LOST_PEER)
            if lost:
                raise RunError(self._why_lost(error)) from error
            self._leave_note(f"{self._name(self._stage)} failed: {type(error).__name__}: {_first_line(error)}")
            raise
        finally:
            self._running.clear()

    def _name(self, pp_rank: int) -> str:
        return f"stage {pp_rank} (rank {self._ranks[pp_rank]})"

    def _why_lost(self, error: Exception) -> str:
        """What another rank says, or in the end what this one knows."""
        own = f"a rank that {self._name(self._stage)} works with has ended"
        if isinstance(error, LostStageError):
            own = f"{self._name(error.pp_rank)} has ended"
        end = time.monotonic() + (0.5 if isinstance(error, LostStageError) else GRACE_SECONDS)
        while (note := self._reason or self._note()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return note or self._leave_note(own)

    def _note(self) -> str | None:
        try:
            return self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else None
        except (RuntimeError, dist.DistError):
            return None

    def _leave_note(self, text: str) -> str:
        """The first note stays."""
        try:
            found: bytes = self._store.compare_set(_FAILED, "", text)
        except (RuntimeError, dist.DistError):
            return text
        return found.decode() or text

    def tick(self) -> None:
        """Gives a sign of life; ends the process when the step cannot go on and the main thread does not come back."""
        reason = self._look()
        if reason is None or not self._running.is_set():
            self._since = self._reason = None
            return
        # The first: when the rank with the store has ended too, nobody can look there any more.
        self._reason = self._reason or reason
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > GRACE_SECONDS:
            # The main thread waits where nothing can call it back.
            print(f"parcompile: error (rank {self._rank}): {self._reason}", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)

    def _look(self) -> str | None:
        """Why the step cannot go on, as far as others say or fail to say."""
        self._beats += 1
        try:
            self._store.set(f"beat/{self._rank}", str(self._beats))
            if not self._running.is_set():
                return None
            if (note := self._note()) is not None:
                return note
            for pp_rank in {self._stage - 1, self._stage + 1} & set(range(len(self._ranks))):
                if self._is_silent(pp_rank):
                    return self._leave_note(f"{self._name(pp_rank)} gives no sign of life")
        except (RuntimeError, dist.DistError):
            return "the rank that keeps the job's store has ended"
        return None

    def _is_silent(self, pp_rank: int) -> bool:
        key, now = f"beat/{self._ranks[pp_rank]}", time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        last, since = self._heard.get(pp_rank, (b"", now))
        if beat != last or pp_rank not in self._heard:
            self._heard[pp_rank] = beat, now
            return False
        return now - since > self._silent_seconds


def _run(watch: weakref.ref[StageWatch], period: float) -> None:
    """As long as somebody has the watch."""
    while (found := watch()) is not None:
        found.tick()
        del found
        time.sleep(period)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
