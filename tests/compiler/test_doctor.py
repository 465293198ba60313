"""`parcompile doctor`: verdicts on records, dumps and logs, whole and damaged."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from layout_cases import compile_tree, spec_tree

from parcompile.cli import cli
from parcompile.doctor import Verdict, judge, read_all
from parcompile.doctor.records import FORMAT, HEAD_BYTES, MESSAGE, SLOT_BYTES, file_name
from parcompile.schema import validate

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "doctor"
PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
Row = tuple[str, str, int, int]
"""Axis, operator, size and layer of a message."""
STEP: list[Row] = [
    (axis, op, size + layer, layer)
    for layer in range(4)
    for axis, op, size in (("tp", "allreduce", 64), ("dp", "broadcast", 32))
]
GROUPS = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}


def write(
    folder: Path, rank: int, rows: list[tuple[int, Row]], *, events: tuple[str, ...] = (), open_last: bool = True
) -> None:
    """Records of a rank that posted these messages, each with its step."""
    mine = {axis: next(one for one in lists if rank in one) for axis, lists in GROUPS.items()}
    counts: dict[str, int] = {}
    messages = []
    for place, (step, (axis, op, size, layer)) in enumerate(rows):
        counts[axis] = counts.get(axis, 0) + 1
        name = f"{axis}{mine[axis][0]}"
        state = "open" if open_last and place == len(rows) - 1 else "done"
        root = 0 if op == "broadcast" else None
        row = (
            counts[axis],
            name,
            op,
            root,
            [size],
            "torch.float32",
            1000.0 + place,
            step,
            0,
            "in the forward pass",
            layer,
            state,
        )
        messages.append(dict(zip(MESSAGE, row, strict=True)))
    groups = {f"{axis}{ranks[0]}": {"axis": axis, "ranks": ranks} for axis, ranks in mine.items()}
    head = {
        "format": FORMAT,
        "rank": rank,
        "world_size": 4,
        "time": 2000.0,
        "events": list(events),
        "place": {},
        "groups": groups,
    }
    (folder / file_name(rank)).write_text(json.dumps({**head, "messages": messages, "steps": []}), encoding="utf-8")


def run_of(changed: list[Row], rank: int, folder: Path, step: list[Row] = STEP) -> Verdict:
    """Three steps of four ranks, one of which posts other messages in the third. All wait for the last one."""
    for one in range(4):
        steps = [step, step, changed if one == rank else step]
        write(folder, one, [(number, row) for number, rows in enumerate(steps, 1) for row in rows])
    return judge(read_all([folder]))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("cause", "changed"),
    [
        ("skipped", [*STEP[:4], *STEP[5:]]),
        ("swapped order", [*STEP[:4], STEP[5], STEP[4], *STEP[6:]]),
        ("wrong size", [*STEP[:4], ("tp", "allreduce", 9, 2), *STEP[5:]]),
        ("wrong group", [*STEP[:4], ("dp", "allreduce", 66, 2), *STEP[5:]]),
        ("skipped or swapped", [*STEP[:4], STEP[5]]),
    ],
)
def test_the_rank_that_posted_another_message_is_named(
    cause: str, changed: list[Row], rank: int, tmp_path: Path
) -> None:
    found = run_of(changed, rank, tmp_path)
    assert (found.kind, found.cause, found.ranks) == ("hang", cause, (rank,))
    assert (found.axis, found.step, found.layer) == ("tp", 3, 2)


NORM: list[Row] = [*STEP, ("tp", "allreduce", 1, 9), ("dp", "allreduce", 1, 9), ("tp", "broadcast", 1, 9)]
"""Two sums of one number follow each other, on two groups."""


@pytest.mark.parametrize(
    ("cause", "changed"),
    [("skipped", [*NORM[:-3], *NORM[-2:]]), ("wrong group", [*NORM[:-3], NORM[-2], *NORM[-2:]])],
)
def test_a_rank_that_skipped_a_message_used_no_wrong_group(cause: str, changed: list[Row], tmp_path: Path) -> None:
    found = run_of(changed, 1, tmp_path, NORM)
    assert (found.cause, found.ranks, found.axis) == (cause, (1,), "tp")


def test_a_rank_that_left_nothing_is_the_one_that_others_wait_for(tmp_path: Path) -> None:
    run_of(STEP, 0, tmp_path)
    (tmp_path / file_name(2)).unlink()
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.cause, found.ranks) == ("hang", "dead", (2,))


def test_a_rank_whose_data_ended_is_named(tmp_path: Path) -> None:
    run_of(STEP, 0, tmp_path)
    write(tmp_path, 1, [(number, row) for number in (1, 2) for row in STEP], events=("ended",), open_last=False)
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.cause, found.ranks) == ("hang", "ended early", (1,))


def test_a_running_job_is_not_accused(tmp_path: Path) -> None:
    for rank in range(4):  # each was asked a moment later than the one before
        write(tmp_path, rank, [(number, row) for number in (1, 2, 3) for row in STEP][: 20 + rank])
        tree = json.loads((tmp_path / file_name(rank)).read_text())
        (tmp_path / file_name(rank)).write_text(json.dumps({**tree, "time": 1000.3 + 19 + rank}))
    assert judge(read_all([tmp_path])).kind == "nothing"


def entry(
    number: int, op: str, size: int, line: int, *, retired: bool, group: str = "0", function: str = "step"
) -> dict[str, Any]:
    frame = {"name": function, "filename": "train.py", "line": line}
    at = {
        "process_group": (group, "default_pg" if group == "0" else f"mesh_{group}"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "time_created_ns": number * 10**9 + line,
    }
    sizes = {"input_sizes": [[size]], "output_sizes": [[size]], "input_dtypes": ["Float"], "state": "scheduled"}
    return {**at, **sizes, "frames": [frame], "profiling_name": f"nccl:{op}", "retired": retired, "is_p2p": False}


def dump(folder: Path, rank: int, entries: list[dict[str, Any]], ranks: str | None = "[0, 1, 2, 3]") -> None:
    config = {} if ranks is None else {"0": {"desc": "default_pg", "ranks": ranks}}
    tree = {"version": "2.10", "pg_config": config, "entries": entries}
    (folder / f"trace_{rank}").write_bytes(pickle.dumps(tree, 2))


def dumped(folder: Path, skipping: int) -> None:
    for rank in range(4):
        rows = [
            (op, size, line)
            for _ in range(4)
            for op, size, line in (("all_reduce", 8, 1), ("broadcast", 8, 2), ("all_gather", 16, 3))
        ]
        if rank == skipping:
            del rows[7]
        dump(folder, rank, [entry(number, *row, retired=number < 8) for number, row in enumerate(rows[:8], 1)])


def test_dumps_of_flight_recorder_name_the_rank_and_its_line(tmp_path: Path) -> None:
    dumped(tmp_path, 2)
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.ranks, found.axis) == ("hang", (2,), "world")
    assert found.collective is not None
    assert "train.py:2 step" in found.collective
    (tmp_path / "trace_2").unlink()
    dead = judge(read_all([tmp_path]))
    assert (dead.cause, dead.ranks) == ("dead", (2,))
    assert dead.collective is not None
    assert "train.py:2 step" in dead.collective  # the last that the others have posted
    dumped(tmp_path, 2)
    (tmp_path / "trace_3").unlink()
    for rank in range(3):  # as gloo writes them, without the ranks of groups
        tree = pickle.loads((tmp_path / f"trace_{rank}").read_bytes())
        gather = {"profiling_name": "gloo:all_gather", "input_sizes": [[4]], "output_sizes": [[16]]}
        entries = [{**one, **gather} if "all_gather" in one["profiling_name"] else one for one in tree["entries"]]
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps({**tree, "pg_config": {}, "entries": entries}))
    assert read_all([tmp_path]).world_size == 4


SUMS = [("all_reduce", 1, line) for line in (1, 1, 1, 1)]
GATHERS = [("all_gather", 8, 2), ("all_gather", 9, 3)]
PARTS = [*SUMS[:3], GATHERS[0], *SUMS, GATHERS[1]]


@pytest.mark.parametrize(
    ("others", "own", "due"),
    [
        # What came before the sums tells that their number is reached.
        ([*GATHERS, *SUMS] * 2 + GATHERS[:1], [*GATHERS, *SUMS] * 2 + GATHERS[1:], "train.py:2"),
        # A fourth sum is nothing new, but here all others gather, as this rank does one message too late elsewhere.
        (PARTS * 2 + PARTS[:4], PARTS * 2 + [*SUMS, ("all_gather", 8, 9)], "train.py:2"),
    ],
)
def test_the_collective_that_was_due_is_the_one_that_others_posted_there(
    others: list[tuple[str, int, int]], own: list[tuple[str, int, int]], due: str, tmp_path: Path
) -> None:
    for rank in range(4):
        rows = own if rank == 2 else others
        dump(tmp_path, rank, [entry(number, *row, retired=number < len(others)) for number, row in enumerate(rows, 1)])
    found = judge(read_all([tmp_path]))
    assert found.ranks == (2,)
    assert found.collective is not None
    assert due in found.collective


def test_a_rank_without_a_dump_is_in_the_group_that_lacks_one(tmp_path: Path) -> None:
    gather = {"profiling_name": "gloo:all_gather", "input_sizes": [[4]], "output_sizes": [[8]]}
    for rank, pair in ((0, "even"), (2, "even"), (1, "odd")):
        first = entry(1, "broadcast", 8, 1, retired=True)
        rest = [entry(2, "", 4, 2, retired=True, group=pair) | gather]
        rest.append(entry(3, "all_reduce", 4, 3, retired=True, group=pair, function="reduce_scatter_single"))
        dump(tmp_path, rank, [first, *rest], ranks=None)
    found = judge(read_all([tmp_path]))
    assert (found.cause, found.ranks, found.axis) == ("dead", (3,), "mesh_odd")
    assert str(found.collective).startswith("reduce_scatter")  # gloo sums, and keeps a part


def test_of_a_file_that_ends_too_early_its_messages_count_and_nothing_else(tmp_path: Path) -> None:
    dumped(tmp_path, 2)
    run = tmp_path / "run"
    run.mkdir()
    run_of([*STEP[:4], *STEP[5:]], 1, run)
    for folder, name, culprit in ((tmp_path, "trace_3", 2), (run, file_name(3), 1)):
        file = folder / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
        read = read_all([one for one in folder.iterdir() if one.is_file()])
        assert "ends too early" in read.unreadable[str(file)]
        assert 0 < len(read.ranks[3].messages) < len(read.ranks[0].messages)
        assert judge(read).ranks == (culprit,)
        for other in set(read.ranks) - {0, 3}:  # ranks 0 and 3 alone: rank 3 may have posted everything
            del read.ranks[other]
        assert 3 not in judge(read).ranks


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": Evil()}, 2))
    assert "nothing of it was run" in read_all([tmp_path]).unreadable["trace_0"]
    assert not (tmp_path / "ran").exists()


def test_a_rank_that_was_sent_sigterm_was_not_killed_by_the_system(tmp_path: Path) -> None:
    run_of(STEP, 0, tmp_path)
    write(tmp_path, 2, [(1, row) for row in STEP], events=("SIGTERM",), open_last=False)
    (tmp_path / "0.err").write_text("rank 2 on host a (process 7) ended without a message (killed by the system?)")
    found = judge(read_all([tmp_path]))
    assert (found.cause, found.ranks, found.summary) == ("dead", (2,), "rank 2 was sent SIGTERM")
    assert "who sends it" in found.advice[0]


def test_ranks_that_all_ended_of_one_that_gave_no_sign_of_life_are_no_healthy_run(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, [(1, row) for row in STEP], open_last=False, events=(SILENT,))
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.cause, found.ranks) == ("died", "stopped", (0,))


SILENT = "rank 0 on host a (process 7) has given no sign of life for 8 s; 8.5 s before, it was starting"


def test_damaged_files_give_partial_answers_and_no_traceback(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    run_of([*STEP[:4], *STEP[5:]], 1, whole)
    dumped(whole, 2)
    head = json.dumps(
        {"format": FORMAT, "rank": 3, "world_size": 4, "groups": {"tp2": {"axis": "tp", "ranks": [2, 3]}}}
    )
    row = (1, "tp2", "allreduce", None, (4,), "None", 1.0, 1, 0, "in the forward pass", 0)
    (whole / "rank-00003.ring").write_bytes(head.encode().ljust(HEAD_BYTES) + repr(row).encode().ljust(SLOT_BYTES))
    (whole / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n')
    for name, text in re.findall(r'```text title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL):
        (whole / name).write_text(text, encoding="utf-8")
    drawn = random.Random(0)
    for number in range(120):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        for file in folder.iterdir():
            content = bytearray(file.read_bytes())
            if drawn.random() < 0.3:
                del content[drawn.randrange(len(content)) :]
            for _ in range(drawn.choice((0, 1, 20))):
                if content:
                    content[drawn.randrange(len(content))] = drawn.randrange(256)
            file.write_bytes(content)
        assert validate(judge(read_all([folder])).to_json(), "doctor").diagnostics == ()
        shutil.rmtree(folder)


def test_texts_of_a_model_and_its_plans_stand_beside_the_metrics_and_are_none(tmp_path: Path) -> None:
    """The folder of a run with `--prompt`: samples.jsonl is read behind metrics.jsonl."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n')
    (tmp_path / "samples.jsonl").write_text('{"step": 2, "prompt": "The", "text": " end"}\n')
    (tmp_path / "run.json").write_text('{"format": 1, "plans": []}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    found = read_all([tmp_path])
    assert ([row["step"] for row in found.metrics], found.metrics_file) == ([1, 2], "metrics.jsonl")
    assert not found.unreadable
    assert judge(found).evidence == ["metrics.jsonl: step 2: loss nan"]


def sessions() -> list[tuple[str, str]]:
    return re.findall(r"```console\n\$ (parcompile doctor [^\n]*)\n```\n+```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files that the page shows."""
    shutil.copytree(SAMPLES, tmp_path, dirs_exist_ok=True)
    for name, text in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "torch_extensions" / "deepspeed_shm_comm").mkdir(parents=True)
    leave_lock(tmp_path / "torch_extensions" / "deepspeed_shm_comm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leave_lock(folder: Path) -> Path:
    """A lock that a process which has ended left two hours ago."""
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 7200,) * 2)
    return lock


def test_a_lock_of_a_build_is_left_only_where_no_process_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch_extensions" / "py311_cpu" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    lock = leave_lock(folder)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder.parents[1]))
    stack = tmp_path / "rank-3.txt"
    # torch's own code waits, as in `deepspeed.init_distributed("gloo")`, and faulthandler writes its stack.
    wait = "import faulthandler, runpy, sys;"
    wait += "faulthandler.dump_traceback_later(0.2, file=open(sys.argv[2], 'w'), exit=True);"
    wait += "runpy.run_path(sys.argv[1])['FileBaton'](sys.argv[3]).wait()"
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    baton = Path(torch.origin).with_name("utils") / "file_baton.py"
    subprocess.run([sys.executable, "-c", wait, str(baton), str(stack), str(lock)], check=False, timeout=60)
    found = judge(read_all([stack]))
    assert (found.kind, found.cause, found.ranks) == ("start", "build lock", (3,))
    assert found.advice == [f"rm {lock}, and start again"]
    with lock.open():
        assert judge(read_all([stack])).cause == "build"
        assert judge(read_all([folder])).kind == "unknown"
    lock.unlink()
    assert judge(read_all([stack])).cause == "build"


@pytest.mark.parametrize(
    ("number", "cause", "ranks"), [(-9, "dead", (5,)), (-11, "dead", (5,)), (-15, "error", ()), (1, "error", (5,))]
)
def test_the_summary_of_torchrun_names_the_rank(
    number: int, cause: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {
        rank: ProcessFailure(local_rank=rank % 4, pid=100, exitcode=code, error_file="none")
        for rank, code in ((4, -15), (5, number))
    }
    failures[4].timestamp = failures[5].timestamp + 1
    (tmp_path / "all.log").write_text(f"ChildFailedError: \n{ChildFailedError('train.py', failures)}")
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.cause, found.ranks) == ("died", cause, ranks)


@pytest.mark.parametrize(
    ("accelerator", "cause", "phase"),
    [("cpu", "too little", None), ("h100-sxm", "longer than planned", "in the forward pass")],
)
def test_a_step_is_compared_with_the_plan_of_its_machine_only(
    accelerator: str, cause: str, phase: str | None, tmp_path: Path
) -> None:
    plan = compile_tree(spec_tree(gpus_per_node=4, cluster={"accelerator": accelerator}), tmp_path)
    tree = json.loads((SAMPLES / "slow" / "rank-00000.json").read_text())
    third = plan.estimate().time.step.seconds / 3
    # The backward pass takes longest, as planned, and the forward pass is longer than planned by most.
    phases = {"in the forward pass": 5 * third, "in the backward pass": 6 * third}
    for row in tree["steps"]:
        row |= {"seconds": 11 * third, "waiting_seconds": 3 * third, "phases": phases}
    (tmp_path / file_name(0)).write_text(json.dumps(tree))
    found = judge(read_all([tmp_path / file_name(0)]), plan)
    assert (found.cause, found.phase) == (cause, phase)
    if phase is not None:
        assert "most of the rest in the forward pass: " in found.summary
        assert "waits for messages in 27% of a step or more; the plan says 0%" in found.evidence[1]


@pytest.mark.parametrize(
    ("share", "together", "left", "cause"),
    [(0.6, True, 4, "exposed communication"), (0.4, True, 4, "none"), (0.6, False, 4, "none"), (0.6, True, 3, "none")],
)
def test_communication_is_exposed_where_ranks_wait_for_what_all_have_posted(
    share: float, together: bool, left: int, cause: str, tmp_path: Path
) -> None:
    trees = [json.loads((SAMPLES / "slow" / file_name(rank)).read_text()) for rank in range(4)]
    last: dict[object, float] = {}
    for one in (one for tree in trees for one in tree["messages"]):
        key = one["group"], one["number"]
        last[key] = max(last.get(key, 0.0), one["time"])
    for rank, tree in enumerate(trees[:left]):
        for row in tree["steps"]:
            row["waiting_seconds"] = share * row["seconds"]
        for one in tree["messages"] if together else ():
            one["time"] = last[one["group"], one["number"]]
        (tmp_path / file_name(rank)).write_text(json.dumps(tree))
    found = judge(read_all([tmp_path]))
    assert found.cause == (cause if left == 4 else "too little")


@pytest.mark.parametrize(
    ("line", "kind", "cause", "ranks"),
    [
        ("\x1b[31mstep:  5  \x1b[32mloss:      nan  \x1b[36mmemory:  1.00GiB", "wrong", "not finite", ()),
        (
            "[rank2]: RuntimeError: iteration 5: Unexpected result nan (message=",
            "wrong",
            "not finite",
            (2,),
        ),
        (" iteration  5/ 100 | lm loss: NAN | loss scale: 1.0 | grad norm: nan |", "wrong", "not finite", ()),
        ("[rank1]:[E11] Process group watchdog thread terminated with exception: CUDA error", "died", "error", (1,)),
        ("srun: error: node1: task 3: Exited with exit code 1", "died", "error", (3,)),
        ("srun: error: node1: tasks 4,7-8: Killed", "died", "dead", (4, 7, 8)),
        ("0: Fatal Python error: Aborted", "died", "dead", (0,)),
        ("Segmentation fault (core dumped)", "died", "dead", ()),
        ("E1101 api.py:869] failed (exitcode: -9) local_rank: 3 (pid: 55) of binary: python", "died", "dead", ()),
        (
            "E1101 api.py:869] failed (exitcode: -15) local_rank: 3 (pid: 55) of",
            "unknown",
            "too little",
            (),
        ),
        ("srun: error: node1: tasks 0-3: Terminated", "unknown", "too little", ()),
    ],
)
def test_lines_of_other_engines_and_launchers(
    line: str, kind: str, cause: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "all.log").write_text(f"{line}\n")
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.cause, found.ranks) == (kind, cause, ranks)


@pytest.mark.parametrize(
    "damage",
    [
        {"plan": {"a": [1]}},
        {"nonfinite": 3},
        {"nonfinite": {"layer": "x", "phase": 1}},
        {"links": {"left": []}},
        {"steps": [{"step": 3, "seconds": "x", "bytes": [], "waiting_seconds": {}, "phases": None}] * 9},
        {"steps": [{"step": 3, "seconds": 1e308, "bytes": float("nan"), "waiting_seconds": float("inf")}] * 9},
    ],
)
def test_values_that_no_runtime_writes_are_damage(damage: dict[str, object], tmp_path: Path) -> None:
    for rank in range(4):
        tree = json.loads((SAMPLES / "nan" / file_name(rank)).read_text())
        (tmp_path / file_name(rank)).write_text(json.dumps(tree | damage if rank == 1 else tree))
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.step) == ("wrong", 6)
    assert found.text()


def test_a_pickle_that_asks_for_all_memory_is_damage(tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(b"\x80\x04Nr\xff\xff\xff\x0f.")  # keep this as number 2**28 of what was seen
    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert "MemoryError" in read_all([tmp_path]).unreadable["trace_0"]
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize("sent", range(12, 20))
def test_a_rank_that_died_did_so_before_the_message_that_was_due(sent: int, tmp_path: Path) -> None:
    for rank in range(4):
        tree = json.loads((SAMPLES / "slow" / file_name(rank)).read_text())
        if rank == 2:
            due = tree["messages"][sent]
            del tree["messages"][sent:]
        tree["events"] = [] if rank == 2 else ["rank 2 on host a (process 7) ended without a message (killed?)"]
        (tmp_path / file_name(rank)).write_text(json.dumps(tree))
    found = judge(read_all([tmp_path]))
    assert (found.cause, found.ranks) == ("dead", (2,))
    assert (found.step, found.micro_batch, found.layer, found.phase) == tuple(
        due[name] for name in ("step", "micro_batch", "layer", "phase")
    )


@pytest.mark.parametrize(
    ("event", "cause", "ranks"),
    [("step 8: the gradient norm is not a finite number", "swapped order", (2,)), ("ended", "none", ())],
)
def test_messages_that_changed_places_are_blamed_for_what_is_not_finite(
    event: str, cause: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    for rank in range(4):
        tree = json.loads((SAMPLES / "slow" / file_name(rank)).read_text())
        rows = tree["messages"]
        if rank == 2:
            rows[16], rows[17] = rows[17], rows[16]
        for row in tree["steps"]:
            row["waiting_seconds"] = 0.5 * row["seconds"]
        tree["events"] = [event, "ended"]
        (tmp_path / file_name(rank)).write_text(json.dumps(tree))
    found = judge(read_all([tmp_path]))
    assert (found.kind, found.cause, found.ranks) == ("wrong" if ranks else "nothing", cause, ranks)


@pytest.mark.parametrize(("left", "ranks"), [((9, 2, 2, 8), (1,)), ((9, None, 2, 8), (0, 1, 2, 3))])
def test_the_rank_whose_connections_broke_has_lost_them_all_first(
    left: tuple[int | None, ...], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    for rank, count in enumerate(left):
        tree = json.loads((SAMPLES / "slow" / file_name(rank)).read_text())
        tree["events"] = ["RuntimeError: Connection closed by peer [127.0.0.1]:4711"]
        tree["messages"][-1]["state"] = "failed"
        if count is not None:
            tree["links"] = {"left": count, "of": 12, "seconds": 100.0 + rank}
        (tmp_path / file_name(rank)).write_text(json.dumps(tree))
    found = judge(read_all([tmp_path]))
    assert (found.cause, found.ranks) == ("network", ranks)


@pytest.mark.parametrize(
    ("own", "starved", "steps", "cause"),
    [
        (0.2, 0.0, 1, "straggler"),
        (0.2, 0.0, 3, "none"),  # in two steps of three
        (0.2, 0.2, 1, "none"),  # the system let it wait for a processor
        (0.03, 0.0, 1, "none"),
    ],
)
def test_a_straggler_takes_longer_for_work_of_its_own_in_nearly_every_step(
    own: float, starved: float, steps: int, cause: str, tmp_path: Path
) -> None:
    for rank in range(4):
        tree = json.loads((SAMPLES / "slow" / file_name(rank)).read_text())
        for row in tree["steps"]:
            row |= {"seconds": 1.0, "waiting_seconds": 0.4, "starved_seconds": 0.1}
            if rank == 2 and (steps == 1 or row["step"] % steps):
                row |= {"waiting_seconds": 0.4 - own, "starved_seconds": 0.1 + starved}
        (tmp_path / file_name(rank)).write_text(json.dumps(tree))
    found = judge(read_all([tmp_path]))
    assert (found.cause, found.ranks) == (cause, (2,) if cause == "straggler" else ())


def test_changes_that_the_rules_or_preflight_refuse_are_not_offered(tmp_path: Path) -> None:
    tree = {
        "version": 1,
        "name": "full",
        "model": {"preset": "mixtral-8x7b"},
        "cluster": {"nodes": 2, "gpus_per_node": 8, "accelerator": "h100-sxm"},
        "parallelism": {"tp": 2, "pp": 2, "dp": "auto"},
        "training": {"sequence_length": 8192, "global_batch_size": 64, "micro_batch_size": 2, "precision": "bf16"},
        "zero": {"stage": 1},
    }
    plan = compile_tree(tree, tmp_path)
    (tmp_path / "oom.log").write_text(
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    read, asked = read_all([tmp_path / "oom.log"]), []
    offered = judge(read, plan).advice
    assert offered
    assert not any("stage to 3" in one for one in offered)  # Z001: not beside stages of a pipeline

    def second(tree: Mapping[str, Any]) -> bool:
        asked.append(tree["parallelism"] | tree["training"] | tree["zero"])
        return len(asked) == 2

    (passed,) = judge(read, plan, second).advice
    assert passed.startswith(offered[1].partition(";")[0])
    assert passed.endswith("it passes preflight")
    unchanged = {"tp": 2, "pp": 2, **tree["training"], "stage": 1}
    assert all({**unchanged, **one} != unchanged for one in asked)


@pytest.mark.parametrize(("last", "step"), [(6.7, 4), (6.4, None)])
def test_a_loss_above_that_of_a_guess_is_wrong(last: float, step: int | None, tmp_path: Path) -> None:
    plan = compile_tree(spec_tree(), tmp_path)  # of 256 tokens: a guess has 5.5
    losses = [5.6, 5.5, 5.4, last, last, last]
    rows = [json.dumps({"step": number, "loss": loss}) for number, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    found = judge(read_all([tmp_path / "metrics.jsonl"]), plan)
    assert found.step == step
    assert found.kind == ("nothing" if step is None else "wrong")


@pytest.mark.parametrize(("times", "cause"), [(3, "idle GPU"), (1, "too little")])
def test_a_gpu_that_is_idle_while_all_others_wait_for_it_is_named(times: int, cause: str, tmp_path: Path) -> None:
    rows = [f"{index}, {0 if index == 2 else 100} %, 70000 MiB, 81559 MiB" for _ in range(times) for index in range(4)]
    rows += ["4, 0 %, 400 MiB, 81559 MiB"] * times  # no job runs there
    head = "index, utilization.gpu [%], memory.used [MiB], memory.total [MiB]"
    (tmp_path / "smi.csv").write_text("\n".join([head, *rows]))
    found = judge(read_all([tmp_path / "smi.csv"]))
    assert found.cause == cause
    assert ("GPU 2 does nothing" in found.summary) == (times == 3)


def test_the_pass_in_which_memory_ran_out_is_read_from_a_labelled_traceback(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(
        "[rank5]: Traceback (most recent call last):\n"
        '[rank5]:   File "engine.py", line 7, in backward\n'
        "[rank5]:     loss.backward()\n"
        '[rank4]:   File "modeling_llama.py", line 9, in forward\n'
        "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    found = judge(read_all([tmp_path / "job.out"]))
    assert (found.kind, found.ranks, found.phase) == ("memory", (5,), "in the backward pass")
    (tmp_path / "job.out").write_text(
        "slurmstepd: error: Detected 1 oom_kill event\nsrun: error: n2: task 5: Out Of Memory"
    )
    found = judge(read_all([tmp_path / "job.out"]))
    assert (found.kind, found.cause, found.ranks) == ("memory", "host memory", (5,))


def test_a_gradient_that_is_not_finite_is_of_what_comes_after_the_layer(tmp_path: Path) -> None:
    for file in (SAMPLES / "nan").iterdir():
        tree = json.loads(file.read_text())
        tree["nonfinite"] = tree["nonfinite"] and {**tree["nonfinite"], "phase": "in the backward pass", "layer": 3}
        (tmp_path / file.name).write_text(json.dumps(tree))
    assert "the gradient of layer 3's output is the first" in judge(read_all([tmp_path])).summary


@pytest.mark.usefixtures("page_files")
def test_the_page_says_what_the_terminal_does(tmp_path: Path) -> None:
    found = CliRunner().invoke(cli, ["doctor", "skip", "--page", "why.html"])
    html = (tmp_path / "why.html").read_text()
    assert found.exit_code == 1
    for said in ("all_reduce of 1 on dp", "skipped or swapped", "look at what this rank does", "rank-00002.json"):
        assert said in html
    assert (
        "--preflight checks changes of a plan: name it with --plan"
        in CliRunner().invoke(cli, ["doctor", "skip", "--preflight"]).output
    )
    assert (
        "no/page.html cannot be written" in CliRunner().invoke(cli, ["doctor", "skip", "--page", "no/page.html"]).output
    )


def test_help_says_every_exit_code(tmp_path: Path) -> None:
    said = " ".join(CliRunner().invoke(cli, ["doctor", "--help"]).output.split())
    nothing = CliRunner().invoke(cli, ["doctor", str(tmp_path)])
    assert (nothing.exit_code, nothing.output.split(" · ")[0]) == (1, "CANNOT TELL")
    assert "0 when nothing is wrong, 1 when something is or the files do not say what (CANNOT TELL), and 2" in said
    whole = " ".join(CliRunner().invoke(cli, ["--help"]).output.split())
    assert "Exit codes: 0 all is well; 1 a spec has errors" in whole
    assert "130 after Ctrl-C; 141 where the reader of the output has left" in whole


@pytest.mark.usefixtures("page_files")
def test_every_session_of_the_page_is_what_the_command_prints() -> None:
    shown = sessions()
    assert {text.split(" · ")[0] for _, text in shown} == {
        "HANG",
        "DIED",
        "OUT OF MEMORY",
        "SLOW",
        "WRONG NUMBERS",
        "DOES NOT START",
        "CANNOT TELL",
    }
    for line, text in shown:
        found = CliRunner().invoke(cli, shlex.split(line)[1:])
        assert found.output == text, line
        assert found.exit_code == 1
        asked = CliRunner().invoke(cli, [*shlex.split(line)[1:], "--format", "json"])
        assert validate(json.loads(asked.output), "doctor").diagnostics == ()
