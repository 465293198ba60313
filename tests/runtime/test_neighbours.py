"""Contract: what a rank asks of the store does not grow with the job, and nobody is missed for it."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from parcompile.runtime.checkpoint.agreement import StoreMessages
from parcompile.runtime.errors import RunError
from parcompile.runtime.liveness.neighbours import Neighbours
from parcompile.runtime.liveness.watchdog import StoreChannel


class CountingStore:
    """A store that counts its requests."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def clone(self) -> CountingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def ask(*args: Any) -> Any:
            self.requests += 1
            return method(*args)

        return ask


class Hosts:
    """A job of several hosts in one process: each rank as its monitor sees the others."""

    def __init__(self, hosts: int, ranks_each: int, silent_seconds: float = 60.0, absent: tuple[int, ...] = ()) -> None:
        self.store, size = CountingStore(dist.HashStore()), hosts * ranks_each
        self.channels = [StoreChannel(self.store, rank, size, "job") for rank in range(size)]
        self.ranks = [Neighbours(rank, size, silent_seconds, f"host-{rank // ranks_each}") for rank in range(size)]
        self.present = [rank for rank in range(size) if rank not in absent]
        for rank in self.present:
            self.ranks[rank].enter(self.channels[rank])
            self.channels[rank].beat(1, f"at work {rank}")

    def look(self, rank: int) -> dict[int, str]:
        return {one: heard.activity for one, heard in self.ranks[rank].look()}

    def requests_of_look(self, rank: int) -> int:
        """Of one after the first, in which it meets the others."""
        self.look(rank)
        before = self.store.requests
        self.look(rank)
        return self.store.requests - before


def test_each_rank_watches_its_host_and_rank_0_one_rank_of_each_host() -> None:
    job = Hosts(4, 3)
    assert set(job.look(0)) == {1, 2, 3, 6, 9}
    assert job.look(7) == {0: "at work 0", 6: "at work 6", 8: "at work 8"}
    watched = Counter(one for rank in job.present for one in job.look(rank))
    assert all(watched[rank] >= 2 for rank in job.present), "a rank is watched by nobody else"


@pytest.mark.parametrize("rank", [0, 5, 8])
def test_the_requests_of_a_look_are_the_same_in_a_larger_job(rank: int) -> None:
    small, large = Hosts(4, 4).requests_of_look(rank), Hosts(64, 4).requests_of_look(rank)
    assert small == large <= 5


def test_what_a_rank_asks_at_its_start_is_the_same_in_a_larger_job() -> None:
    def requests(hosts: int) -> int:
        job = Hosts(hosts, 4, absent=(5,))
        before = job.store.requests
        job.ranks[5].enter(job.channels[5])
        for one, _ in job.ranks[5].look():
            job.ranks[5].process(one)
        return job.store.requests - before

    assert requests(4) == requests(64)


def test_a_heartbeat_that_stands_still_keeps_the_time_of_its_first_sight() -> None:
    job = Hosts(2, 2)
    first = dict(job.ranks[0].look())
    job.channels[1].beat(2, "further")
    second = dict(job.ranks[0].look())
    assert second[2] == first[2]
    assert (second[1].number, second[1].activity) == (2, "further")
    assert second[1].since > first[1].since


def test_rank_0_misses_a_rank_that_never_entered_and_no_other_before_its_time() -> None:
    job = Hosts(2, 3, silent_seconds=0.2, absent=(4,))
    assert set(job.look(0)) == {1, 2, 3}
    time.sleep(0.3)
    assert job.look(0)[4] == "starting"
    assert 4 not in job.look(3)
    job.ranks[4].enter(job.channels[4])
    assert set(job.look(0)) == {1, 2, 3}


def test_of_a_host_that_is_lost_every_silent_rank_is_found() -> None:
    job = Hosts(3, 4)
    job.look(0)

    def beats(_: float) -> None:
        job.channels[6].beat(2, "alive")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", beats)
        assert job.ranks[0].silent_beside(4, 1.0) == [5, 7]
    assert job.ranks[0].silent_beside(1, 0.0) == []


def test_a_job_without_a_host_name_asks_the_system() -> None:
    assert Neighbours(0, 1, 60).host == socket.gethostname()


def agree_everywhere(store: Any, size: int, rounds: int, work: Callable[[int, int], Any], seconds: float = 60) -> Any:
    """What each rank got or raised, round by round; the ranks are threads."""

    def on_rank(rank: int) -> list[Any]:
        agreement, found = StoreMessages(StoreChannel(store, rank, size, "agreement"), seconds), []
        for number in range(rounds):
            try:
                found.append((agreement.on_all_ranks(partial(work, rank, number)), agreement.on_rank_0(lambda: rank)))
            except RunError as error:
                found.append(str(error))
        return found

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))


def test_all_ranks_agree_through_the_store_and_leave_no_more_keys_each_time() -> None:
    counts = []
    for rounds in (1, 5):
        store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        found = agree_everywhere(store, 3, rounds, lambda rank, number: [rank, number])
        assert found[0] == [([[rank, number] for rank in range(3)], 0) for number in range(rounds)]
        assert found[1] == found[2] == [([], 0)] * rounds
        counts.append(store.num_keys())
    assert counts[0] == counts[1]


def test_what_goes_wrong_on_one_rank_goes_wrong_on_all_and_the_next_time_is_new() -> None:
    def work(rank: int, number: int) -> int:
        if rank == 2 and number == 0:
            raise RunError("its disk is full")
        return rank

    for found in agree_everywhere(dist.HashStore(), 3, 2, work):
        assert found[0] == "rank 2: its disk is full"
        assert found[1][1] == 0


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_writes_too_long_is_named(late: int) -> None:
    """The second time, what it wrote the first time is still there."""

    def work(rank: int, number: int) -> None:
        time.sleep(2 * rank * (number == late))

    found, _ = agree_everywhere(dist.HashStore(), 2, late + 1, work, seconds=0.5)
    assert found[late] == "rank 1: wrote nothing within 0 s"
