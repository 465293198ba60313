"""Contract: a save in the background holds the state of its moment, becomes whole or nothing, and hides no error."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import RankError, run_ranks
from test_checkpoint_faults import an_engine, error_of, train
from training_runs import make_plan

from parcompile.plan import Plan
from parcompile.runtime.checkpoint import read_note, save, verify, wait_for_save

pytestmark = pytest.mark.ranks


def a_plan() -> Plan:
    return make_plan(2, {"tp": 2})


def delay_writing(until: Callable[[Path], object]) -> None:
    """Makes the disk of this rank slow: it is called with the path of what is to be written."""
    from parcompile.runtime.checkpoint.state_file import StateFile

    finish = StateFile.finish

    def late(file: StateFile) -> tuple[int, str]:
        until(file.path)
        return finish(file)

    StateFile.finish = late  # type: ignore[method-assign]


def save_both_ways(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    engine, batches = an_engine(plan)
    train(engine, batches)
    save(engine, f"{folder}/at-once", 1)

    def until_looked(file: Path) -> None:
        """Both ranks have looked whether that checkpoint is there."""
        step = file.parent.name.rpartition("-")[2]
        while not all(Path(folder, f"looked-{step}-{one}").exists() for one in range(2)):
            time.sleep(0.02)

    if rank == 1:
        delay_writing(until_looked)
    place = save(engine, f"{folder}/later", 1, wait=False)
    assert place is not None
    for _ in range(2):
        train(engine, batches)  # the state moves on while the old one is written
    early = place.exists()
    Path(folder, f"looked-1-{rank}").touch()
    second = save(engine, f"{folder}/later", 3, wait=False)
    assert second is not None
    first_is_there = place.exists(), second.exists()
    Path(folder, f"looked-3-{rank}").touch()
    wait_for_save(engine)
    return {"early": early, "first before second": first_is_there, "second": second.exists()}


def test_the_state_of_the_moment_is_saved_while_training_goes_on(tmp_path: Path) -> None:
    for found in run_ranks(2, save_both_ways, a_plan(), str(tmp_path)):
        assert found == {"early": False, "first before second": (True, False), "second": True}
    at_once, later = read_note(tmp_path / "at-once"), read_note(tmp_path / "later" / "step-1")
    assert at_once.files == later.files  # to the bit
    assert verify(tmp_path / "later" / "step-1") == []
    assert verify(tmp_path / "later") == []
    assert read_note(tmp_path / "later").step == 3


def fail_later(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    engine, batches = an_engine(plan)
    save(engine, folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    found: dict[str, Any] = {"begun": save(engine, folder, 2, wait=False) is not None, "steps": 0}
    deadline = time.monotonic() + 600
    while "error" not in found and time.monotonic() < deadline:
        engine.backward(engine(**next(batches)).loss)
        if error := error_of(engine.step):
            found["error"] = error
        found["steps"] += 1
    save(engine, folder, 2, wait=False, on_error="warn")
    found["next save"] = error_of(lambda: wait_for_save(engine))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save(engine, folder, 3, wait=False)
    wait_for_save(engine)
    return found


def test_what_goes_wrong_is_raised_by_a_later_step_on_every_rank_or_is_a_warning(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_later, a_plan(), str(tmp_path))
    assert first == second  # at the same step
    assert "step-2 was not saved: rank 1: " in first["error"]
    assert first["error"].endswith("File too large; the last checkpoint is step-1")
    assert first["next save"] == ""
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_dir()) == ["step-1", "step-3"]
    assert verify(tmp_path) == []
    assert read_note(tmp_path).step == 3


def die_later(rank: int, plan: Plan, folder: str) -> None:
    from parcompile.runtime.checkpoint.state_file import StateFile

    engine, batches = an_engine(plan)
    save(engine, folder, 1)
    if rank == 1:
        StateFile.finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    save(engine, folder, 2, wait=False)
    for _ in range(3):
        train(engine, batches)


def test_a_rank_killed_while_it_writes_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(2, die_later, a_plan(), str(tmp_path), timeout=120)
    assert time.monotonic() - started < 600
    assert read_note(tmp_path).step == 1
    assert verify(tmp_path) == []


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_checkpoint_background import delay_writing, time
from test_checkpoint_faults import an_engine
from training_runs import make_plan
from parcompile.runtime.checkpoint import save
engine, _ = an_engine(make_plan(1, {}))
delay_writing(lambda _: time.sleep(1))
save(engine, sys.argv[2], 1, wait=False)
"""


def test_a_script_that_ends_finishes_its_save(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    assert read_note(tmp_path).step == 1
    assert verify(tmp_path) == []
