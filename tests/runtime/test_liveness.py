"""Contract: a rank that is killed, stopped or fails is named in one line, in bounded time, and every rank ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import watched_script
from launched import Ranks
from ranks import free_port
from training_runs import make_plan

from parcompile.backends.artefacts import to_text
from parcompile.plan import plan_tree

pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "deepspeed": lambda ranks, port: ["deepspeed", "--num_gpus", str(ranks), "--master_port", port],
    "torchrun": lambda ranks, port: ["torchrun", "--nproc-per-node", str(ranks), "--master-port", port],
}


class Job:
    """A launched job in a session of its own."""

    def __init__(self, folder: Path, ranks: int, *fault: str, launcher: str = "deepspeed", axis: str = "dp") -> None:
        self.folder, self.ranks = folder, ranks
        plan = write_plan(folder, ranks, axis)
        words = LAUNCHERS[launcher](ranks, str(free_port()))
        self.output = folder / "output"
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:], str(HERE / "watched_script.py"), str(plan), str(folder), *fault],
                env={
                    **os.environ,
                    "DS_ACCELERATOR": "cpu",
                    "OMP_NUM_THREADS": "1",
                    "PATH": f"{BIN}:{os.environ['PATH']}",
                },
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            assert self.process.poll() is None, self.text
            with contextlib.suppress(OSError, ValueError):
                if int((self.folder / "step-0").read_text()) >= step:
                    return
            time.sleep(0.05)
        raise AssertionError(f"no step {step}: {self.text}")

    def pid(self, rank: int) -> int:
        return int((self.folder / f"rank-{rank}").read_text())

    def end(self, timeout: float = 600) -> tuple[int, str]:
        code = self.process.wait(timeout)
        return code, self.text

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def said(self) -> list[str]:
        return [line for line in self.text.splitlines() if "parcompile:" in line]


def write_plan(folder: Path, ranks: int, axis: str = "dp") -> Path:
    """Of a small model, with a sample for each rank."""
    plan = make_plan(ranks, {axis: ranks}, training={"global_batch_size": ranks})
    (folder / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    return folder / "plan.json"


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Ranks of the same script without a launcher, where it has no part in what is tested: they begin at once."""
    jobs: list[Ranks] = []

    def make(*fault: str, axis: str = "dp", ranks: int = 2) -> Ranks:
        write_plan(tmp_path, ranks, axis)
        jobs.append(Ranks(tmp_path, ranks, watched_script.forked, *fault))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    jobs: list[Job] = []

    def make(ranks: int, *fault: str, **options: object) -> Job:
        jobs.append(Job(tmp_path, ranks, *fault, **options))  # type: ignore[arg-type]
        return jobs[-1]

    yield make
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def named(said: list[str], rank: int, process: int) -> None:
    """One line of one rank, with what it did."""
    (line,) = said
    assert f"rank {rank} on host {socket.gethostname()} (process {process})" in line
    assert "ended without a message" in line
    assert re.search(r"; \d+\.\d s before, it was at step \d+", line)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_is_named_once_with_what_it_did(forked, rank: int) -> None:
    job = forked(ranks=3)
    job.wait_for("step")
    time.sleep(4)  # longer than two heartbeats
    job.signal(rank, signal.SIGKILL)
    others = [one for one in range(3) if one != rank]
    assert job.end(*others, within=600) == [1, 1]
    named(job.said, rank, job.processes[rank].pid)
    text = "".join(map(job.text, others))
    assert 'watched_script.py", line' not in text
    assert "terminate called" not in text


def test_a_killed_rank_is_named_under_a_launcher_that_ends_the_others(start) -> None:
    job = start(2, launcher="torchrun")
    job.wait_for_step(50)
    os.kill(job.pid(1), signal.SIGKILL)
    code, text = job.end()
    assert code != 0
    named(job.said, 1, job.pid(1))
    assert 'watched_script.py", line' not in text


def test_a_rank_that_dies_between_the_handshake_and_the_first_group_is_named(forked) -> None:
    job = forked("early", "1", "0")
    assert job.end(within=600) == [1, -signal.SIGKILL]
    (line,) = job.said
    assert f"rank 1 on host {socket.gethostname()}" in line
    assert "ended without a message" in line


@pytest.mark.parametrize(
    ("fault", "message", "has_traceback"),
    [
        ("exception", "ValueError: this sample is broken", True),
        ("memory", "OutOfMemoryError: tried to allocate 2 GiB", False),
        ("disk", "No space left on device: 'samples.bin'", False),
    ],
)
def test_what_one_rank_raises_ends_all_with_its_message(forked, fault: str, message: str, has_traceback: bool) -> None:
    job = forked(fault, "1", "3")
    assert job.end(within=600) == [1, 1]
    text = job.text(0) + job.text(1)
    (line,) = job.said
    assert f"error (rank 1 on host {socket.gethostname()}, at step 3, between two passes)" in line
    assert message in line
    assert line.startswith("parcompile: ")
    assert text.count("Traceback") == int(has_traceback)


WRONG = "rank 1 on host {}, at step 3, in the forward pass"
LABEL = "label 1000000 is outside the vocabulary of 61"


@pytest.mark.parametrize("axis", ["cp"])
def test_a_launcher_takes_the_rank_that_failed_for_the_cause(start, axis: str) -> None:
    job = start(2, "label", "1", "3", launcher="torchrun", axis=axis)
    code, text = job.end()
    assert code == 1
    (line,) = job.said
    assert f"error ({WRONG.format(socket.gethostname())}): ValueError: {LABEL}" in line
    root = text[text.index("Root Cause") :]
    assert "rank      : 1" in root
    assert f"{WRONG.format(socket.gethostname())}: ValueError: {LABEL}" in root


@pytest.mark.parametrize("axis", ["cp", "dp"])
def test_a_script_that_catches_errors_finds_the_first_cause_on_every_rank(forked, axis: str) -> None:
    job = forked("caught", "1", "3", axis=axis)
    job.end(within=600)
    found = [line for rank in range(2) for line in job.text(rank).splitlines() if line.startswith("caught by")]
    assert len(found) == 2
    assert found[1].startswith(f"caught by rank 1: {LABEL}")
    assert found[0].startswith("caught by rank 0: this rank ends because another has failed: ")
    assert f"{WRONG.format(socket.gethostname())}: ValueError: {LABEL}" in found[0]


BUSY = """
import contextlib, datetime
import torch.distributed as dist
from parcompile.runtime.liveness.monitor import Monitor
store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
other = store.clone()
def slow():
    with contextlib.suppress(RuntimeError):
        other.wait(["never"], datetime.timedelta(seconds=0.5))
    return "slow"
monitor = Monitor(store, 0, 1, "job", 60)
monitor.start()
monitor.activity = slow
import time; time.sleep(0.8)
"""


def test_a_process_ends_well_while_its_heartbeat_talks_to_the_store() -> None:
    """Python stops threads at its end. A thread that is in the store's C++ then takes the process with it."""
    ended = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda one: one.name)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(start, forked, number: signal.Signals) -> None:
    if number == signal.SIGTERM:
        job = start(2, "stops")
        job.wait_for_step(2)
        os.kill(job.pid(1), number)
        assert job.end()[0] == 75
    else:
        job = forked("stops")
        job.wait_for("step")
        job.signal(1, number)
        assert job.end(within=600) == [75, 75]
    (line,) = job.said
    steps = {(job.folder / f"stopped-{rank}").read_text() for rank in range(2)}
    assert len(steps) == 1
    assert f"parcompile: stopped by {number.name} after step {steps.pop()}" in line


def test_sigterm_ends_a_script_that_does_not_ask_for_it(forked) -> None:
    job = forked()
    job.wait_for("step")
    job.signal(0, signal.SIGTERM)
    assert 0 not in job.end(within=600)


def test_a_loss_that_is_no_number_ends_the_run_with_one_message(forked) -> None:
    job = forked("nan", "1", "3")
    assert job.end(within=600) == [1, 1]
    (error,) = job.said
    assert "error: step 3: the gradient norm is not a finite number; the loss is not finite on rank 1." in error
    assert f"checkpoint of step 2 or before: {job.folder / 'checkpoints' / 'step-2'}" in error
    assert (job.folder / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == "step-2"
