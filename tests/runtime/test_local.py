"""Worlds on this machine: answers, failures, time-outs, processes that end, and a plan's slices on live ranks."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from closeness import assert_within
from ranks import forked_world
from training_runs import make_plan

from parcompile.cli import cli
from parcompile.plan import plan_tree
from parcompile.runtime import RunError
from parcompile.runtime.local import RankError, run_local
from parcompile.runtime.local.comparison import LocalRun, StepResult, run_and_compare, slice_table

pytestmark = pytest.mark.ranks


def add_up(rank: int, scale: float) -> tuple[int, int, torch.Tensor, bool]:
    total = torch.full((2,), rank * scale)
    dist.all_reduce(total)
    return os.getpid(), dist.get_world_size(), total, "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def misbehave(rank: int, how: str) -> int:
    if rank == 1:
        if how == "raise":
            raise ValueError("rank one is unhappy")
        if how == "exit":
            sys.exit(3)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    dist.barrier()
    return os.getpid()


def initialise_by_hand(rank: int) -> bool:
    before = dist.is_initialized()
    dist.init_process_group("gloo")  # env://
    return not before and dist.get_rank() == rank


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_answers_and_none_is_left() -> None:
    answers = run_local(3, add_up, 2.0, timeout=120)
    pids = [answer[0] for answer in answers]
    assert len({os.getpid(), *pids}) == 4
    for _, size, total, _ in answers:
        assert size == 3 and torch.equal(total, torch.full((2,), 6.0))
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"(?s)misbehave: rank 1 of 2 failed\nTraceback.*ValueError: rank one is unhappy"),
        ("exit", r"(?s)misbehave: rank 1 of 2 failed\nTraceback.*SystemExit: 3"),
        ("die", r"misbehave: rank 1 of 2 failed\nthe process ended with exit code -9"),
        ("sleep", r"misbehave: no answer from rank\(s\) \[0, 1\] of 2 within 2 s"),
    ],
)
def test_the_first_rank_that_fails_is_named_and_no_process_is_left(how: str, message: str) -> None:
    with forked_world(2) as world:
        pids = [answer[0] for answer in world.run(add_up, 1.0)]
        with pytest.raises(RankError, match=message):
            world.run(misbehave, how, timeout=2 if how == "sleep" else 60)
        assert not any(map(is_alive, pids))
        with pytest.raises(RankError, match="this world is closed"):
            world.run(add_up, 1.0)


def test_a_launchers_environment_is_enough_to_initialise_by_hand() -> None:
    with forked_world(2, process_group=False) as world:
        assert world.run(initialise_by_hand) == [True, True]


def test_more_ranks_than_a_machine_should_run_are_refused() -> None:
    with pytest.raises(ValueError, match="17 ranks on this machine: from 1 to 16 are possible"):
        run_local(17, add_up, 1.0)
    with pytest.raises(RunError, match=r"plan 'tiny' has 32 ranks; at most 16 are started on one machine"):
        run_and_compare(make_plan(32, {"tp": 2}, training={"global_batch_size": 16}))


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\n"
        "from parcompile.runtime.local import LocalWorld\n"
        "def pid(rank): return os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    world = LocalWorld(2)\n"
        "    print(*world.run(pid), flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 300
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "ranks outlive their parent"
        time.sleep(0.1)


def test_a_plan_runs_on_all_its_ranks_beside_one_process(tmp_path: Path) -> None:
    plan = make_plan(4, {"tp": 2, "cp": 2, "sequence_parallel": True}, training={"micro_batch_size": 2})
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_tree(plan)), encoding="utf-8")
    result = CliRunner().invoke(cli, ["local", str(path)])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "3 1 1 0 4..12" in lines
    assert "model.embed_tokens.weight 61 × 32, padded to 64 × 32 0 0..32 32..64" in lines
    assert "model.layers.{layer}.self_attn.o_proj.weight (× 2) 32 × 32 1 0..16 16..32" in lines
    assert "model.norm.weight 32 – whole whole" in lines
    assert "every rank holds these slices of the whole model's weights, bit for bit" in result.output
    loss, other = (float(number) for number in re.search(r"loss +(\S+) +(\S+)", result.output).groups())
    assert 0.5 * math.log(61) < loss < 3 * math.log(61) and abs(loss - other) / loss < 1e-5
    assert "equal within 1e-05" in result.output


def test_stages_run_beside_one_process_too() -> None:
    plan = make_plan(2, {"pp": 2}, model={"tie_word_embeddings": True}, training={"micro_batch_size": 1})
    found = run_and_compare(plan)
    assert not found.wrong_slices
    assert_within(max(found.differences), 1e-5)


def test_replicated_kv_heads_are_shown_with_every_rank_that_holds_them() -> None:
    row = next(line for line in slice_table(make_plan(4, {"tp": 4})).splitlines() if "k_proj" in line)
    assert row.split()[-4:] == ["0..8", "0..8", "8..16", "8..16"]


def test_ranks_that_do_not_answer_are_told_of_by_what_they_did() -> None:
    plan = make_plan(2, {"tp": 2})
    with pytest.raises(RankError, match=rf"^a step of plan '{plan.spec.name}': no answer from rank\(s\) \[0, 1\] of 2"):
        run_and_compare(plan, timeout=1e-6)


def test_a_view_that_differs_says_so() -> None:
    plan = make_plan(1, {})
    found = LocalRun(plan, StepResult(2.0, 1.0), StepResult(2.0, 1.001), ("rank 0: model.norm.weight is missing",))
    assert not found.equal
    assert "DIFFERENT within 1e-05" in found.text()
    assert "weights that are not the planned slices:\n  rank 0: model.norm.weight is missing" in found.text()


@pytest.mark.parametrize("value", ["soon", "1e20"])
def test_a_variable_that_is_no_number_is_told_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PARCOMPILE_HANDSHAKE_TIMEOUT", value)
    with pytest.raises(RunError, match=f"PARCOMPILE_HANDSHAKE_TIMEOUT is '{value}': write a number of seconds"):
        run_and_compare(make_plan(2, {"tp": 2}))
