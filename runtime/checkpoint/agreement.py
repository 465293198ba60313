"""Work in which all ranks succeed, or all of them fail with one message."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from parcompile.runtime.errors import RunError, everywhere, first_line
from parcompile.runtime.liveness.watchdog import StoreChannel
from parcompile.runtime.transport.backend import gather_objects

T = TypeVar("T")

_NUMBERS = itertools.count()
SEEN_SECONDS = 30.0
"""How long a shared file system may take to show one rank what another has written; NFS caches that long."""


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """What `work` returns on every rank, in the order of ranks. What one of them finds wrong, every rank raises.

    Args:
        work: takes part in no collective.

    Raises:
        RunError: `work` raised a RunError or an OSError on some rank; the message says on which.
    """
    outcomes = gather_objects(_outcome(work))
    if told := _told([text for _, text in outcomes]):
        raise everywhere(told)
    return [result for result, _ in outcomes]


def on_rank_0(work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, on every rank.

    Raises:
        RunError: as `on_all_ranks`.
    """
    return cast(T, on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)[0])


class StoreMessages:
    """The same by messages through the launcher's store, for a thread beside training.

    It needs no process group, and so no connection between any two ranks. What goes through it is what JSON keeps.

    Args:
        channel: between all ranks.
        seconds: that one rank waits for the others.
    """

    def __init__(self, channel: StoreChannel, seconds: float) -> None:
        self._channel, self._seconds, self._numbers = channel, seconds, itertools.count()

    @classmethod
    def of_world(cls, seconds: float) -> StoreMessages:
        """Through the store of the default process group, for all its ranks, which make theirs in one order."""
        store, name = dist.distributed_c10d._get_default_store(), f"agreement-{next(_NUMBERS)}"
        return cls(StoreChannel(store, dist.get_rank(), dist.get_world_size(), name), seconds)

    def on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """As the function of this name; others than rank 0 get an empty list."""
        return [result for result, _ in self._exchanged(_outcome(work))[0]]

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """As the function of this name."""
        return cast(T, self._exchanged(_outcome(lambda: work() if self._channel.rank == 0 else None))[1])

    def _exchanged(self, mine: Any) -> tuple[list[Any], Any]:
        """All outcomes, on rank 0, and the result of rank 0. Each agreement takes the place of the one before it."""
        channel, number, outcomes = self._channel, next(self._numbers), list[Any]()
        channel.post(f"outcome/{channel.rank}", [number, *mine])
        wanted = channel.world_size * (number + 1)
        channel.count("outcomes", 1)
        if channel.rank == 0:
            channel.wait(lambda: channel.count("outcomes") >= wanted, self._seconds)
            for one in channel.posted_all([f"outcome/{rank}" for rank in range(channel.world_size)]):
                on_time = one is not None and one[0] == number
                outcomes.append(one[1:] if on_time else (None, f"wrote nothing within {self._seconds:.0f} s"))
            channel.post("answer", [number, _told([text for _, text in outcomes]), outcomes[0][0]])
        # Rank 0 itself waits for the others that long.
        if not channel.wait(lambda: (channel.posted("answer") or [-1])[0] == number, 2 * self._seconds):
            raise everywhere(f"rank 0 answered nothing within {2 * self._seconds:.0f} s")
        _, told, result = channel.posted("answer")
        if told:
            raise everywhere(told)
        return outcomes, result


def _outcome(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or what went wrong."""
    try:
        return work(), None
    except (RunError, OSError) as error:
        return None, one_line(error)


def one_line(error: Exception) -> str:
    """An error of the system names its file; others say what they say."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return first_line(error)


def await_seen(folder: Path, sizes: dict[str, int] | None = None) -> None:
    """Waits until this process sees a folder, and in it files of these sizes in bytes.

    Raises:
        RunError: it does not in time.
    """
    deadline, pause = time.monotonic() + SEEN_SECONDS, 0.01
    while missing := _unseen(folder, sizes or {}):
        if time.monotonic() > deadline:
            raise RunError(f"{missing} is not seen here: every rank needs the same folder, on a shared file system")
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _unseen(folder: Path, sizes: dict[str, int]) -> Path | None:
    if not folder.is_dir():
        return folder
    return next((folder / name for name, size in sizes.items() if not _has_size(folder / name, size)), None)


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False


def _told(texts: Sequence[str | None]) -> str:
    """What went wrong, by rank; empty where nothing did."""
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if len(failed) == len(texts) and len(set(failed.values())) == 1:
        return failed[0]
    said = [f"rank {rank}: {text}" for rank, text in failed.items()]
    more = f"; and {len(said) - 3} more ranks" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more
