"""Contract: whichever rank is stopped, and whenever, every other one ends in time and it is named once.

Ranks are started without a launcher, which would end the others as soon as one has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Ranks, leave
from ranks import free_port
from training_runs import make_plan, samples

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

SILENT = 8
"""Seconds of PARCOMPILE_SILENT_TIMEOUT, and of the handshake where it is to fail: many heartbeats on a busy machine."""
BOUND = 300
"""Seconds after which a rank counts as one that hangs. Nothing else would end it for half an hour."""


def train(folder: Path, plan: Plan, saves: bool) -> None:
    """Trains without end."""
    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import save

    engine, _, loader, _ = initialize(plan=plan, training_data=samples(plan) * 1000, measurements=False)
    batches = iter(loader)
    for step in itertools.count(1):
        engine.train_batch(batches)
        if saves:
            leave(folder, "saving")
            save(engine, folder / "checkpoints", step, keep=2)
        else:
            leave(folder, f"step-{step}")


def train_on_two_hosts(folder: Path, plan: Plan) -> None:
    """Two ranks on each: no rank sees the processes of the other host."""
    host = f"host-{int(os.environ['RANK']) // 2}"
    socket.gethostname = lambda: host
    train(folder, plan, False)


def join_and_stop(folder: Path, plan: Plan, where: str) -> None:
    """Rank 0 stops where joining has come to a function of it. Both begin together."""
    from parcompile.runtime import groups, join

    leave(folder, "ready")
    while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.02)
    if os.environ["RANK"] == "0":

        def stop(*_: Any) -> None:
            leave(folder, "stopped")
            os.kill(os.getpid(), signal.SIGSTOP)

        setattr(groups, where, stop)
    join(plan)


def join_and_hear_late(folder: Path, plan: Plan, first: int) -> None:
    """Rank `first` of 0 and 1 names who is lost; rank 3 goes on only when rank 0 may have ended with its store."""
    from parcompile.runtime import join
    from parcompile.runtime.liveness.monitor import Monitor
    from parcompile.runtime.liveness.watchdog import StoreChannel, is_running

    rank, count, is_off, lost = int(os.environ["RANK"]), StoreChannel.count, StoreChannel.is_off, Monitor._lost
    (folder / f"process-{rank}").write_text(str(os.getpid()))

    def until_rank_0_ends() -> None:
        end = time.monotonic() + 1.0  # it waits for six
        while is_running(int((folder / "process-0").read_text())) and time.monotonic() < end:
            time.sleep(0.02)

    def counted_late(channel: StoreChannel, name: str, by: int = 0) -> int:
        found = count(channel, name, by)
        if name == "heard" and by:
            until_rank_0_ends()
        return found

    def heard_late(channel: StoreChannel) -> bool:
        if count(channel, "heard"):
            until_rank_0_ends()
            return is_off(channel)
        return False

    def second(monitor: Monitor) -> dict[int, str]:
        return lost(monitor) if is_off(monitor._channel) else {}

    if rank != first:
        Monitor._lost = second if rank == 0 else lambda _: {}  # type: ignore[method-assign]
        StoreChannel.is_off = lambda _: False  # type: ignore[method-assign]
    if rank == 3:
        StoreChannel.count = counted_late  # type: ignore[method-assign]
        StoreChannel.is_off = heard_late if first else is_off  # type: ignore[method-assign]
    elif rank == 1 and first == 0:
        StoreChannel.is_off = is_off  # type: ignore[method-assign]
    join(plan)
    leave(folder, "ready")
    time.sleep(BOUND)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    jobs: list[Ranks] = []

    def make(*args: Any, **more: Any) -> Ranks:
        jobs.append(Ranks(tmp_path / str(len(jobs)), *args, **{"PARCOMPILE_SILENT_TIMEOUT": str(SILENT), **more}))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


def others_end(job: Ranks, rank: int) -> str:
    """The one line that the others say when a rank is stopped; then it is continued, ends too, and adds nothing."""
    others = [one for one in range(job.size) if one != rank]
    assert job.end(*others, within=BOUND) == [1] * len(others)
    said = job.said
    job.signal(rank, signal.SIGCONT)
    assert job.end(rank, within=BOUND) == [1]
    assert job.said == said
    assert len(said) == 1, "\n".join(said)
    return said[0]


@pytest.mark.parametrize(("rank", "saves"), [(0, False), (1, False), (0, True)])
def test_a_rank_that_is_stopped_while_it_trains_or_saves_ends_the_job(start, rank: int, saves: bool) -> None:
    plan = make_plan(3, {}, training={"global_batch_size": 3})
    job = start(3, train, plan, saves)
    job.wait_for("saving" if saves else "step-3")
    job.signal(rank, signal.SIGSTOP)
    line = others_end(job, rank)
    named = f"rank {rank} on host {socket.gethostname()} (process {job.processes[rank].pid})"
    # Who was stopped before the others had read its entry is known by its store alone.
    assert named in line or (rank == 0 and "rank 0, which keeps the store at 127.0.0.1:" in line)
    assert ("has answered nothing for" if rank == 0 else f"has given no sign of life for {SILENT} s") in line


def test_all_ranks_of_a_host_that_is_lost_are_named(start) -> None:
    job = start(4, train_on_two_hosts, make_plan(4, {}, training={"global_batch_size": 4}))
    job.wait_for("step-3")
    for rank in (2, 3):
        job.signal(rank, signal.SIGKILL)
    assert job.end(0, 1, within=BOUND) == [1, 1]
    (line,) = job.said
    # The first of the host to enter speaks for it.
    first = 2 if "rank 3 on host host-1 is silent, too" in line else 3
    assert f"rank {first} on host host-1 (process {job.processes[first].pid}) has given no sign of life" in line
    assert f"rank {5 - first} on host host-1 is silent, too" in line


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_hears_late_of_the_loss_blames_no_other(start, first: int) -> None:
    job = start(4, join_and_hear_late, make_plan(4, {}, training={"global_batch_size": 4}), first)
    job.wait_for("ready")
    job.signal(2, signal.SIGKILL)
    assert job.end(0, 1, 3, within=BOUND) == [1, 1, 1]
    said = job.said
    assert len(said) == 1, "\n".join(said)
    assert f"rank 2 on host {socket.gethostname()} (process {job.processes[2].pid}) ended without a message" in said[0]


def test_a_rank_whose_network_is_cut_ends_as_all_others_do(start) -> None:
    job = start(3, train, make_plan(3, {}, training={"global_batch_size": 3}), False, behind_proxy=[2])
    job.wait_for("step-3")
    os.kill(job.proxies[2].pid, signal.SIGSTOP)  # packets go nowhere; nothing says so
    assert job.end(within=BOUND) == [1, 1, 1]
    said = "\n".join(job.said)
    assert f"rank 2 on host {socket.gethostname()} (process {job.processes[2].pid}) has given no sign of life" in said
    assert "Traceback" not in "".join(job.text(rank) for rank in range(3))


@pytest.mark.parametrize("where", ["agree", "watch", "start_world"])
def test_a_first_rank_that_is_stopped_while_all_join_ends_the_others(start, where: str) -> None:
    seconds = {"PARCOMPILE_HANDSHAKE_TIMEOUT": str(SILENT)} if where == "agree" else {}
    job = start(2, join_and_stop, make_plan(2, {"tp": 2}), where, **seconds)
    assert job.end(1, within=BOUND) == [1]
    with contextlib.suppress(ProcessLookupError):
        job.signal(0, signal.SIGKILL)
    (line,) = job.said
    assert "rank 0" in line
    assert f"127.0.0.1:{job.port}" in line or f"(process {job.processes[0].pid})" in line
    assert "Traceback" not in job.text(1)


def last_step(job: Ranks) -> int:
    """Of the slowest rank."""
    steps = [[int(one.name.split("-")[1]) for one in job.folder.glob(f"step-*-{rank}")] for rank in range(job.size)]
    return min(max(one, default=0) for one in steps)


def join_only(_: Path, plan: Plan) -> None:
    """What every job does first."""
    from parcompile.runtime import join

    join(plan)


def test_ranks_of_another_job_on_the_port_are_refused_and_the_first_job_goes_on(start) -> None:
    plan = make_plan(2, {"tp": 2})
    first = start(2, train, plan, False)
    first.wait_for("step-3")
    for other, ranks in ((make_plan(2, {"cp": 2}), 2), (plan, 2), (make_plan(4, {"tp": 2}), 4)):
        second = start(ranks, join_only, other, port=first.port)
        assert second.end(within=BOUND) == [1] * ranks
        assert f"port {first.port} of this host is taken" in second.text(0)
        assert len(second.said) == ranks
        before = f"rank 1 has come to the store at 127.0.0.1:{first.port} before, as process {first.processes[1].pid} "
        other_size = f"of a job of 4 ranks (WORLD_SIZE), the store at 127.0.0.1:{first.port} belongs to one of 2"
        for rank in range(1, ranks):
            assert (before if ranks == 2 else other_size) in second.text(rank)
    first.wait_for(f"step-{last_step(first) + 5}")
    assert not first.said


def test_a_rank_with_another_id_of_its_job_is_refused_before_the_right_one_comes(start) -> None:
    plan, port = make_plan(2, {"tp": 2}), free_port()
    both = {"port": port, "WORLD_SIZE": "2"}
    alone = start(1, join_only, plan, SLURM_JOB_ID="7", **both)
    stranger = start(1, join_only, plan, SLURM_JOB_ID="8", RANK="1", **both)
    assert stranger.end(within=BOUND) == [1]
    assert "SLURM_JOB_ID is 8 here and 7 there" in stranger.text(1)
    right = start(1, join_only, plan, SLURM_JOB_ID="7", RANK="1", **both)
    assert right.end(within=BOUND) == [0]
    assert alone.end(within=BOUND) == [0]
