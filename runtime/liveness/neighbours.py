"""Which ranks one rank watches over, and what each of them said last.

A rank watches those of its host, whose processes it sees, and rank 0. Rank 0 watches the first rank of each other host
as well. So what a rank asks of the launcher's store at a look is the same number of requests in a job of any size; an
answer of rank 0 has an entry for each host.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

from .watchdog import StoreChannel


class Heard(NamedTuple):
    """The last heartbeat of a rank."""

    number: int
    activity: str
    since: float
    """When it was first seen here (`time.monotonic`)."""


class Neighbours:
    """Those that this rank watches over. They show up as they enter.

    Args:
        rank: this one.
        world_size: number of ranks of the job.
        silent_seconds: after how long rank 0 misses those that have not entered.
        host: of this rank; None asks the system.
    """

    _channel: StoreChannel

    def __init__(self, rank: int, world_size: int, silent_seconds: float, host: str | None = None) -> None:
        self._rank, self._world_size, self._silent = rank, world_size, silent_seconds
        self.host = host or socket.gethostname()
        self._began = time.monotonic()
        self._are_complete = False
        self._processes: dict[int, tuple[str, int]] = {}
        self._mates: list[int] = []
        self._firsts: list[int] = []
        self._last: dict[int, Heard] = {}

    def enter(self, channel: StoreChannel) -> None:
        """Lets the others see this rank, through a channel between all ranks. Only then can it look."""
        self._channel = channel
        self._channel.post(f"process/{self._rank}", [self.host, os.getpid()])
        number = self._channel.count(f"host/{self.host}", 1)
        self._channel.post(f"host/{self.host}/{number}", self._rank)
        if number == 1:
            self._channel.post(f"first/{self._channel.count('first', 1)}", self._rank)
        self._channel.count("entered", 1)

    def look(self) -> Iterator[tuple[int, Heard]]:
        """The last heartbeats of those that are watched, and on rank 0 of those that never came."""
        self._mates += self._further(f"host/{self.host}", len(self._mates))
        if self._rank == 0:
            self._firsts += self._further("first", len(self._firsts))
        ranks = sorted({0, *self._mates, *self._firsts} - {self._rank})
        now = time.monotonic()
        for rank, said in zip(ranks, self._channel.posted_all([f"alive/{rank}" for rank in ranks]), strict=True):
            number, activity = (0, "starting") if said is None else (int(said[0]), str(said[1]))
            known = self._last.get(rank)
            if known is None or known.number != number:
                self._last[rank] = Heard(number, activity, now)
            yield rank, self._last[rank]
        if self._rank == 0 and not self._are_complete and now - self._began > self._silent:
            yield from self._missing()

    def _missing(self) -> Iterator[tuple[int, Heard]]:
        """Asked of every rank, once it is late."""
        self._are_complete = self._channel.count("entered") >= self._world_size
        if not self._are_complete:
            for rank in range(self._world_size):
                if rank != self._rank and not self.process(rank)[0]:
                    yield rank, Heard(0, "starting", self._began)

    def _further(self, name: str, known: int) -> list[int]:
        """The ranks of a list that have entered since. One that has its number and no entry yet comes the next time."""
        found = []
        for number in range(known + 1, self._channel.count(name) + 1):
            if (rank := self._channel.posted(f"{name}/{number}")) is None:
                break
            found.append(int(rank))
        return found

    def last(self, rank: int) -> Heard | None:
        """What is known of a rank without a request."""
        return self._last.get(rank)

    def forget(self) -> None:
        """All have their full time again."""
        self._last = {}
        self._began = time.monotonic()

    def process(self, rank: int) -> tuple[str, int]:
        """Host and process of a rank; an empty host until the rank has come. The store is asked once."""
        if rank not in self._processes:
            said = self._channel.posted(f"process/{rank}")
            if said is None:
                return "", 0
            self._processes[rank] = str(said[0]), int(said[1])
        return self._processes[rank]

    def known_process(self, rank: int) -> tuple[str, int]:
        """The same without a request; an empty host where it was not asked for before."""
        return self._processes.get(rank, ("", 0))

    def silent_beside(self, rank: int, seconds: float) -> list[int]:
        """The other ranks of a silent one's host that give no sign of life for so long, where all of a host is lost."""
        host, _ = self.process(rank)
        if host == self.host:
            return []
        others = [one for one in self._further(f"host/{host}", 0) if one != rank]
        names = [f"alive/{one}" for one in others]
        before = self._channel.posted_all(names)
        time.sleep(seconds)
        after = self._channel.posted_all(names)
        return [one for one, was, now in zip(others, before, after, strict=True) if was == now]
