"""Contract: no code of a checkpoint runs, no save loses what was saved, what one rank finds wrong all ranks say."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples

from parcompile.backends.artefacts import to_text
from parcompile.cli import cli
from parcompile.plan import Plan, plan_tree
from parcompile.plan.diff import file_layout
from parcompile.runtime import RunError
from parcompile.runtime.checkpoint import export, load, placing, read_note, save, verify, writing
from parcompile.runtime.checkpoint import placing as locking
from parcompile.runtime.checkpoint.adapting import convert
from parcompile.runtime.checkpoint.manifest import Note, digest_of, tensor_files
from parcompile.runtime.checkpoint.saving import Saver, _commit

pytestmark = pytest.mark.ranks

WEIGHTS, SHARD = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def a_plan() -> Plan:
    return make_plan(2, {"dp": 2})


def an_engine(plan: Plan) -> tuple[Any, Any]:
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    return engine, iter(loader)


def train(engine: Any, batches: Any) -> None:
    engine.backward(engine(**next(batches)).loss)
    engine.step()


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except RunError as error:
        assert error.everywhere
        return str(error)
    return ""


def save_once(rank: int, plan: Plan, folder: str) -> None:
    engine, batches = an_engine(plan)
    train(engine, batches)
    save(engine, folder, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_ranks(2, save_once, a_plan(), str(folder))
    return folder


class Harmful:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def listed(place: Path, *names: str) -> None:
    """Lets the note list these files as they are."""
    note = place / "parcompile.json"
    tree = json.loads(note.read_text())
    for name in names:
        size, digest = digest_of(place / name)
        tree["files"][name] = {"bytes": size, "sha256": digest}
    note.write_text(json.dumps(tree))


def a_stranger_that_a_glob_sorts_first(place: Path) -> str:
    torch.save({"module": Harmful(place.parent / "ran")}, place / "mp_rank_!_model_states.pt")
    return "mp_rank_!_model_states.pt is not of this checkpoint"


def a_stranger_that_the_note_lists(place: Path) -> str:
    a_stranger_that_a_glob_sorts_first(place)
    listed(place, "mp_rank_!_model_states.pt")
    return "it lists mp_rank_!_model_states.pt, which the plan does not require"


def a_note_without_a_shard(place: Path) -> str:
    note = place / "parcompile.json"
    tree = json.loads(note.read_text())
    del tree["files"][SHARD]
    note.write_text(json.dumps(tree))
    return f"it does not list {SHARD}, which the plan requires"


def a_note_that_leads_elsewhere(place: Path) -> str:
    note = place / "parcompile.json"
    tree = json.loads(note.read_text())
    tree["files"]["../../../dev/zero"] = {"bytes": 1, "sha256": ""}
    note.write_text(json.dumps(tree))
    return "it lists ../../../dev/zero"


def a_pipe(place: Path) -> str:
    (place / WEIGHTS).unlink()
    os.mkfifo(place / WEIGHTS)
    return f"{WEIGHTS} is not a file"


def code_in_a_file_of_the_plan(place: Path) -> str:
    torch.save({"module": Harmful(place.parent / "ran")}, place / WEIGHTS)
    listed(place, WEIGHTS)
    return f"{WEIGHTS} asks to load posix.mkdir"


def code_in_a_random_state(place: Path) -> str:
    torch.save(Harmful(place.parent / "ran"), place / "random_rank_00001.pt")
    listed(place, "random_rank_00001.pt")
    return "random_rank_00001.pt asks to load posix.mkdir"


def a_pickle_of_protocol_4(place: Path) -> str:
    (place / SHARD).write_bytes(pickle.dumps(Harmful(place.parent / "ran"), protocol=4))
    listed(place, SHARD)
    return f"{SHARD} cannot be read"


def protocol_4_in_the_form_of_torch(place: Path) -> str:
    torch.save({"optimizer_state_dict": Harmful(place.parent / "ran")}, place / SHARD, pickle_protocol=4)
    listed(place, SHARD)
    return SHARD


def a_truncated_file(place: Path) -> str:
    content = (place / SHARD).read_bytes()
    (place / SHARD).write_bytes(content[: len(content) // 2])
    listed(place, SHARD)
    return f"{SHARD} cannot be read"


def a_changed_byte(place: Path) -> str:
    content = bytearray((place / SHARD).read_bytes())
    content[len(content) // 2] ^= 1
    (place / SHARD).write_bytes(content)
    return f"{SHARD} is damaged"


DAMAGES = (
    *(a_stranger_that_a_glob_sorts_first, a_stranger_that_the_note_lists, a_note_without_a_shard),
    *(a_note_that_leads_elsewhere, a_pipe, code_in_a_file_of_the_plan, code_in_a_random_state),
    *(a_pickle_of_protocol_4, protocol_4_in_the_form_of_torch, a_truncated_file, a_changed_byte),
)


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Folders of checkpoints by what was done to them, with what is to be said of it."""
    found = {}
    for damage in DAMAGES:
        folder = Path(shutil.copytree(saved, tmp_path / damage.__name__))
        found[damage.__name__] = folder, damage(folder / "step-1")
    return found


def load_all(rank: int, plan: Plan, folders: dict[str, str], only_rank_0: str) -> dict[str, str]:
    engine, _ = an_engine(plan)
    before = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    errors = {name: error_of(lambda folder=folder: load(engine, folder)) for name, folder in folders.items()}
    errors["only rank 0 sees it"] = error_of(lambda: load(engine, only_rank_0 if rank == 0 else only_rank_0 + "-not"))
    assert all(torch.equal(value, before[name]) for name, value in engine.module.named_parameters())
    return errors


def test_no_damaged_checkpoint_is_loaded_exported_or_converted_and_no_code_runs(
    damaged: dict[str, tuple[Path, str]], saved: Path, tmp_path: Path
) -> None:
    plan = a_plan()
    folders = {name: str(folder) for name, (folder, _) in damaged.items()}
    first, second = run_ranks(2, load_all, plan, folders, str(saved))
    assert first == second
    assert "rank 1: there is no checkpoint in" in first["only rank 0 sees it"]
    for name, (folder, said) in damaged.items():
        assert said in first[name], name
        assert len(first[name].splitlines()) == 1
        assert said in "; ".join(verify(folder))
        for work in (
            lambda folder=folder, name=name: export(folder, tmp_path / f"exported {name}"),
            lambda folder=folder, name=name: convert(folder, plan, tmp_path / f"converted {name}"),
        ):
            with pytest.raises(RunError, match="cannot be used") as raised:
                work()
            assert said in str(raised.value)
        assert not (folder / "ran").exists(), name
        assert not (tmp_path / f"exported {name}").exists()


def test_the_required_files_are_those_that_deepspeed_writes(saved: Path) -> None:
    note = read_note(saved)
    assert set(note.files) == tensor_files(note.plan) | {"random_rank_00000.pt", "random_rank_00001.pt"}
    assert {file.name for file in (saved / "step-1").iterdir()} == {*note.files, "parcompile.json"}


def save_again(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    engine, batches = an_engine(plan)
    load(engine, folder)
    place = Path(folder) / "step-1"
    save(engine, folder, 1)
    before = place.stat().st_ino
    save(engine, folder, 1)
    same = place.stat().st_ino == before  # another folder would have been made before this one was removed
    torch.distributed.barrier()
    if rank == 0:
        a_changed_byte(place)
    save(engine, folder, 1)
    mended, old = verify(folder) == [], read_note(place).files
    torch.distributed.barrier()
    train(engine, batches)
    save(engine, folder, 1)
    return {"same": same, "mended": mended, "other": read_note(place).files != old}


def test_a_step_that_is_saved_again_is_left_alone_or_replaced(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "again"))
    for found in run_ranks(2, save_again, a_plan(), str(folder)):
        assert found == {"same": True, "mended": True, "other": True}
    assert verify(folder) == []
    assert sorted(one.name for one in folder.iterdir()) == [".parcompile-lock", "latest", "step-1", "zero_to_fp32.py"]


def end_at(owner: Any, name: str, number: int) -> None:
    """Kills this process when it calls a function for the nth time."""
    work, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*arguments, **options)

    setattr(owner, name, counted)


def killed(work: Callable[[], None]) -> None:
    """Does it in a process of its own, which has to be killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def replace_and_end(folder: Path, what: str, number: int) -> None:
    place = folder / "step-1"
    note = read_note(place)
    new = placing.begin(place)
    for name in note.files:
        shutil.copy(place / name, new / name)
    owner, name = {
        "rename": (Path, "rename"),
        "sync": (placing, "sync_folder"),
        "write": (placing, "write_file"),
        "remove": (shutil, "rmtree"),
    }[what]
    end_at(owner, name, number)
    placing.put_in_place(replace(note, step=2), same=False)


@pytest.mark.parametrize(
    ("what", "number"), [("write", 1), ("rename", 1), ("rename", 2), ("sync", 2), ("write", 2), ("remove", 1)]
)
def test_a_writer_killed_while_it_replaces_leaves_the_old_checkpoint_or_the_new_one(
    saved: Path, tmp_path: Path, what: str, number: int
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "replaced"))
    killed(lambda: replace_and_end(folder, what, number))
    assert verify(folder) == []
    new = (what, number) in (("sync", 2), ("write", 2), ("remove", 1))
    assert read_note(folder).step == (2 if new else 1)
    placing.recover(folder)
    assert sorted(one.name for one in folder.iterdir() if one.is_dir()) == ["step-1"]
    assert read_note(folder).step == (2 if new else 1)
    assert verify(folder) == []


def convert_and_end(folder: Path, plan: Plan, output: Path, what: str, number: int) -> None:
    owner, name = {"state": (writing, "write_state"), "write": (placing, "write_file")}[what]
    end_at(owner, name, number)
    convert(folder, plan, output)


@pytest.mark.parametrize(("what", "number"), [("state", 3), ("write", 2)])
def test_a_killed_convert_begins_anew_also_for_another_layout(
    saved: Path, tmp_path: Path, what: str, number: int
) -> None:
    plans = {"plan": make_plan(4, {"tp": 2, "dp": 2}), "other": make_plan(2, {"tp": 2})}
    for name, plan in plans.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(to_text(plan_tree(plan)), encoding="utf-8")
    killed(lambda: convert_and_end(saved, plans["plan"], tmp_path / "out", what, number))
    # Killed before `latest` was written, it is begun anew for the same plan; before the note, for any.
    name = "other" if what == "state" else "plan"
    arguments = ["checkpoint", "convert", saved, "--to", tmp_path / name, "-o", tmp_path / "out"]
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    assert verify(tmp_path / "out") == []
    assert set(read_note(tmp_path / "out").files) == tensor_files(plans[name])
    assert [one.name for one in (tmp_path / "out").iterdir() if one.is_dir()] == ["step-1"]
    again = CliRunner().invoke(cli, list(map(str, arguments)))
    assert again.exit_code != 0
    assert "exists already" in again.output


def meet_faults(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    """Saves that cannot be written, on one rank or on all, and the saves after them."""
    from parcompile.runtime.checkpoint import agreement

    agreement.SEEN_SECONDS = 1.0
    engine, batches = an_engine(plan)
    save(engine, folder, 1)
    found: dict[str, Any] = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # "File too large", as a full disk says "No space left"
    found["too large"] = error_of(lambda: save(engine, folder, 2))
    found["warned"] = save(engine, folder, 2, on_error="warn")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found["after it"] = sorted(one.name for one in Path(folder).iterdir()), read_note(Path(folder)).step
    torch.distributed.barrier()
    train(engine, batches)
    save(engine, folder, 3)
    found["recovered"] = read_note(Path(folder)).step, verify(folder)
    found["read-only"] = error_of(lambda: save(engine, "/proc/checkpoints", 4))
    found["not shared"] = error_of(lambda: save(engine, folder if rank == 0 else folder + "-not", 4))
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    torch.distributed.barrier()
    save(engine, folder, 5)  # it is made again
    found["made again"] = read_note(Path(folder)).step, verify(folder)
    return found


def test_a_save_that_one_rank_cannot_write_is_one_line_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first, second = run_ranks(2, meet_faults, a_plan(), str(folder))
    seen = [found.pop("not shared") for found in (first, second)]
    assert all("-not/unfinished-step-4 is not seen here: every rank needs the same folder" in one for one in seen)
    assert first == second
    assert first["too large"].startswith(f"{folder}/step-2 was not saved: rank 1: {folder}/unfinished-step-2/")
    assert first["too large"].endswith("File too large; the last checkpoint is step-1")
    assert first["warned"] is None
    assert first["after it"] == ([".parcompile-lock", "latest", "step-1", "zero_to_fp32.py"], 1)
    assert first["recovered"] == (3, [])
    assert "/proc/checkpoints/step-4 was not saved: rank 0: /proc/checkpoints: " in first["read-only"]
    assert first["made again"] == (5, [])


HOLD = """
import sys, time
from pathlib import Path
from parcompile.runtime.checkpoint.placing import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


def test_a_second_job_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=rf"process {other.pid} on \S+ saves into {tmp_path}: end that job"):
            locking.hold(tmp_path)
        other.send_signal(signal.SIGSTOP)  # a job that stands still is not dead
        with pytest.raises(RunError, match="saves into"):
            locking.hold(tmp_path)
    finally:
        other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    locking.hold(tmp_path)  # killed, and not yet waited for by its parent
    locking.hold(tmp_path)
    other.wait()
    locking.release(tmp_path)
    assert (tmp_path / locking.LOCK).read_text() == ""


def test_a_refused_second_job_leaves_the_first_job_s_save_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        written = tmp_path / "unfinished-step-3" / WEIGHTS
        written.parent.mkdir()
        written.write_bytes(b"half of it")
        plan = a_plan()
        note = Note(tmp_path / "step-3", 3, plan, file_layout(plan), {})
        with pytest.raises(RunError, match=rf"was not saved: .*process {other.pid} on \S+ saves into"):
            Saver().save(SimpleNamespace(module=torch.nn.Linear(1, 1)), note, keep=None, wait=True, on_error="raise")
        assert written.read_bytes() == b"half of it"
    finally:
        torch.distributed.destroy_process_group()
        other.kill()
        other.wait()
    locking.hold(tmp_path)
    (tmp_path / locking.LOCK).write_text('{"host": "elsewhere", "pid": 1, "machine": "", "started": ""}')
    assert not locking.holds(tmp_path)  # taken while this process stood still
    with pytest.raises(RunError, match="another job has taken"):
        _commit(note, None, same=False)
    locking.release(tmp_path)


def test_a_job_on_another_machine_keeps_the_folder_as_long_as_its_heart_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "DEAD_SECONDS", 6.0)
    lock = tmp_path / locking.LOCK
    lock.write_text('{"host": "elsewhere", "pid": 1, "machine": "another", "started": "1"}')
    beat = subprocess.Popen(
        [sys.executable, "-c", "import os,sys,time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.3)", str(lock)]
    )
    try:
        began = lock.stat().st_mtime_ns
        while lock.stat().st_mtime_ns == began:
            assert beat.poll() is None
            time.sleep(0.05)
        with pytest.raises(RunError, match="process 1 on elsewhere saves into"):
            locking.hold(tmp_path)
    finally:
        beat.kill()
        beat.wait()
    locking.hold(tmp_path)
    locking.release(tmp_path)
