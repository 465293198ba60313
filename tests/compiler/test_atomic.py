"""What lies in a folder of a plan is not believed, and two writers and a reader never meet half way."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parcompile import atomic
from parcompile.atomic import is_inside, is_plain, locate, read_set, recover, write_set
from parcompile.backends.writing import stale_files

SET = {"plan.json": b"new plan", "launch/run.sh": b"new run"}
OUTSIDE = ("../victim.txt", "launch/../../victim.txt", "/victim.txt", "a\0b", "", ".", "..", "a//b", "C:\\victim", "a/")


def foreign(folder: Path) -> Path:
    """A folder that holds a plan, and something that is none of its files."""
    write_set({"plan.json": b"old plan", "launch/run.sh": b"old run"}, folder)
    (folder / "metrics.jsonl").write_text("{}")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def pending(folder: Path) -> Path:
    return folder / f".parcompile-new.{folder.stat().st_ino}"


def left(folder: Path, files: dict[str, bytes], listed: object) -> Path:
    """What a killed writer would leave in a folder, or somebody who knows how it would look."""
    waiting = pending(folder)
    waiting.mkdir()
    for name, content in files.items():
        (waiting / name).parent.mkdir(parents=True, exist_ok=True)
        (waiting / name).write_bytes(content)
    (waiting / ".complete").write_text(json.dumps(listed))
    return waiting


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim.txt"
    file.write_text("mine")
    return file


def test_the_pending_folder_of_a_cloned_repository_is_refused_by_name(tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "out"
    (out / ".parcompile-new").mkdir(parents=True)
    (out / ".parcompile-new" / ".complete").write_text("../victim.txt\n")
    with pytest.raises(OSError, match="not left by a compilation into this folder") as refused:
        write_set(SET, out)
    assert refused.value.filename == str(out / ".parcompile-new")
    assert victim.read_text() == "mine"
    assert sorted(one.name for one in out.iterdir()) == [".parcompile-new"]


@pytest.mark.parametrize("kind", ["files", "gone"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_list_that_leads_out_of_the_folder_is_refused(tmp_path: Path, victim: Path, kind: str, name: str) -> None:
    out = foreign(tmp_path / "out")
    digest = hashlib.sha256(victim.read_bytes()).hexdigest()
    name = name.replace("/victim.txt", str(victim)) if name.startswith("/") else name
    listed = {"files": [], "gone": {}, **({"files": [name]} if kind == "files" else {"gone": {name: digest}})}
    left(out, {}, listed)
    with pytest.raises(OSError, match="is damaged"):
        write_set(SET, out)
    assert victim.read_text() == "mine"
    assert (out / "plan.json").read_text() == "old plan"


@pytest.mark.parametrize(
    "text", ["", "[]", "../victim.txt\n", '{"files": 1, "gone": {}}', '{"files": [1], "gone": {}}']
)
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    out = foreign(tmp_path / "out")
    left(out, {}, {})
    (pending(out) / ".complete").write_text(text)
    with pytest.raises(OSError, match="is damaged"):
        recover(out)


def test_links_are_never_followed(tmp_path: Path, victim: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "run.sh").write_text("theirs")
    # A folder of the plan is a link.
    out = foreign(tmp_path / "a")
    (out / "launch" / "run.sh").unlink()
    (out / "launch").rmdir()
    (out / "launch").symlink_to(elsewhere)
    with pytest.raises(OSError, match="nothing is written through it"):
        write_set(SET, out)
    # The place of a file is a link: the link gives way.
    for name, alone in (("b", False), ("c", True)):
        out = tmp_path / name
        foreign(out)
        if alone:
            (out / "metrics.jsonl").unlink()
        (out / "plan.json").unlink()
        (out / "plan.json").symlink_to(victim)
        write_set(SET, out)
        assert (out / "plan.json").read_text() == "new plan"
        assert not (out / "plan.json").is_symlink()
    # What waits, the list of it, the lock or the whole pending folder is a link.
    out = foreign(tmp_path / "d")
    waiting = left(out, {}, {"files": ["plan.json", "launch/run.sh"], "gone": {}})
    (waiting / "plan.json").symlink_to(victim)
    (waiting / "launch").symlink_to(elsewhere)
    recover(out)
    assert (out / "plan.json").read_text() == "old plan"
    out = foreign(tmp_path / "e")
    waiting = left(out, {"plan.json": b"theirs"}, {})
    (waiting / ".complete").rename(elsewhere / "list")
    (waiting / ".complete").symlink_to(elsewhere / "list")
    assert locate(out, "plan.json") == out / "plan.json"
    out = foreign(tmp_path / "f")
    pending(out).symlink_to(elsewhere)
    with pytest.raises(OSError, match="not left by"):
        write_set(SET, out)
    out = foreign(tmp_path / "g")
    (out / ".parcompile-writing").symlink_to(victim)
    with pytest.raises(OSError, match=r"[Ll]inks"):
        write_set(SET, out)
    assert victim.read_text() == "mine"
    assert [one.name for one in elsewhere.iterdir()] in (["run.sh", "list"], ["list", "run.sh"])
    assert (elsewhere / "run.sh").read_text() == "theirs"


def test_a_lock_file_that_lists_files_behind_a_link_removes_none(tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "launch").symlink_to(tmp_path)
    digest = "sha256:" + hashlib.sha256(victim.read_bytes()).hexdigest()
    names = ["launch/victim.txt", "../victim.txt", str(victim), "a\0b"]
    (out / "parcompile.lock.json").write_text(json.dumps({"files": dict.fromkeys(names, digest)}))
    assert stale_files({}, out) == []
    write_set({"plan.json": b"new"}, out, gone=lambda: names)
    assert victim.read_text() == "mine"


def test_the_folder_itself_may_be_a_link_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    write_set(SET, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "plan.json").read_bytes() == SET["plan.json"]


def test_what_lies_beside_the_folder_is_removed_only_where_a_writer_of_it_left_it(tmp_path: Path) -> None:
    out = foreign(tmp_path / "out")
    (tmp_path / ".out.parcompile-7.abc").mkdir()
    (tmp_path / f".out.parcompile-{out.stat().st_ino}.abc").mkdir()
    write_set(SET, out)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".out.parcompile-7.abc", "out"]


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=30),
        st.lists(st.sampled_from(["..", ".", "a", "", "b\0", "\\", "C:", "~", "\x1b"])).map("/".join),
    )
)
@example("..")
@example("a/.parcompile-new.1/b")
def test_a_plain_name_stays_inside_on_every_machine(name: str) -> None:
    if is_plain(name):
        assert os.path.normpath(f"/r/{name}").startswith("/r/")
        assert not set(name) & set('\0\\:*?"<>|\x1b')
        assert ".." not in name.split("/")
    assert is_inside(Path("/nowhere"), name) is False


WRITER = """
import sys
from pathlib import Path
from parcompile.atomic import write_set

word, turns = sys.argv[2], int(sys.argv[3])
files = {f"f{index}.json": (word * 500).encode() for index in range(6)}
files |= {"plan.json": word.encode(), f"{word}.json": b""}
print("ready", flush=True)
sys.stdin.readline()
others = {"a": "b.json", "b": "a.json"}
for turn in range(turns):
    write_set(files, Path(sys.argv[1]), gone=lambda: [others[word]])
"""


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside checkpoints"])
def test_two_writers_leave_one_set_and_a_reader_sees_one_set(tmp_path: Path, alone: bool) -> None:
    out, names = tmp_path / "out", [*(f"f{index}.json" for index in range(6)), "plan.json"]
    out.mkdir()
    if not alone:
        (out / "metrics.jsonl").write_text("{}")
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(out), word, "15"], stdin=-1, stdout=-1) for word in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    seen, end = set(), time.monotonic() + 600
    while any(writer.poll() is None for writer in writers) and time.monotonic() < end:
        found = read_set(out, names)
        words = {content[:1] for content in found.values() if content is not None}
        assert len(words) <= 1
        assert len([one for one in found.values() if one is None]) in (0, len(names))
        seen |= words
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    last = (out / "plan.json").read_text()
    assert sorted(one.name for one in out.iterdir()) == sorted(
        [*names, f"{last}.json", *([] if alone else ["metrics.jsonl"])]
    )
    assert {(out / name).read_text()[:1] for name in names} == {last}
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_writer_that_stands_still_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "WAIT_SECONDS", 0.05)
    out = foreign(tmp_path / "out")
    with atomic._locked(out), pytest.raises(OSError, match="another compilation has been writing"):
        write_set(SET, out)
    write_set(SET, out)
    assert read_set(out, SET) == SET


def test_without_locks_a_second_writer_is_refused_and_a_first_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "fcntl", None)
    out = foreign(tmp_path / "out")
    write_set(SET, out)
    assert read_set(out, SET) == SET
    pending(out).mkdir()
    with pytest.raises(OSError, match="or is still at work"):
        write_set(SET, out)


def test_where_folders_cannot_change_places_files_are_moved_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    write_set({"plan.json": b"old", "gone.json": b"old"}, tmp_path / "out")
    write_set(SET, tmp_path / "out", gone=lambda: ["gone.json"])
    assert names_in(tmp_path / "out") == ["launch", "plan.json"]
    assert read_set(tmp_path / "out", SET) == SET
    assert names_in(tmp_path) == ["out"]


def test_what_is_put_into_a_folder_while_it_is_replaced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_set(SET, out)
    exchange, calls = atomic._exchange, []

    def late(one: Path, other: Path) -> bool:
        if not calls:
            (other / "log.txt").write_text("begun meanwhile")
        calls.append(one)
        return exchange(one, other)

    monkeypatch.setattr(atomic, "_exchange", late)
    write_set({**SET, "plan.json": b"newer"}, out)
    assert (out / "log.txt").read_text() == "begun meanwhile"
    assert (out / "plan.json").read_text() == "newer"
    assert names_in(tmp_path) == ["out"]


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="no regular file but a pipe or a device"):
            atomic.write_file(tmp_path / name, "x")
    with pytest.raises(IsADirectoryError, match="this is a directory"):
        atomic.write_file(tmp_path, "x")
    with pytest.raises(OSError, match="is a pipe or a device"):
        write_set({"pipe": b"x"}, tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        atomic.write_file(tmp_path / "loop", "x")
    assert pipe.is_fifo()
    assert (tmp_path / "loop").is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "loop", "pipe"]


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text("old")
    file.chmod(0o444)
    with pytest.raises(PermissionError, match="read-only"):
        atomic.write_file(file, "new")
    assert file.read_text() == "old"


def test_a_file_whose_folder_is_missing_is_named_itself(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        atomic.write_file(tmp_path / "none" / "spec.json", "new")
    assert error.value.filename == str(tmp_path / "none" / "spec.json")
