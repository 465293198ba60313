"""A set of files is replaced whole or not at all, also when the writer is killed or the disk is full."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from parcompile import atomic
from parcompile.atomic import locate, write_file, write_set
from parcompile.backends.writing import write

OLD = {"a.json": "old a", "launch/b.sh": "old b", "plan.json": "old plan"}
NEW = {"a.json": "new a", "launch/c.sh": "new c", "plan.json": "new plan"}
WRITER = """
import sys
from pathlib import Path
from parcompile.backends.writing import write

folder = Path(sys.argv[1])
sets = [{f"f{index}.json": word * 2000 for index in range(8)} for word in ("old", "new")]
print("ready", flush=True)
for turn in range(100000):
    write(sets[turn % 2], folder)
"""


def put(files: Mapping[str, str], folder: Path, gone: Collection[str] = ()) -> None:
    write_set({name: text.encode() for name, text in files.items()}, folder, gone=lambda: gone)


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_files_are_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    written = write({"plan.json": "1", "launch/run.sh": "#!/bin/sh\n"}, tmp_path / "out")
    assert contents(tmp_path / "out") == {"plan.json": "1", "launch/run.sh": "#!/bin/sh\n"}
    assert written == [tmp_path / "out" / "plan.json", tmp_path / "out" / "launch" / "run.sh"]
    assert (tmp_path / "out" / "launch" / "run.sh").stat().st_mode & 0o111
    assert not (tmp_path / "out" / "plan.json").stat().st_mode & 0o111
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("foreign", [True, False], ids=["beside checkpoints", "alone"])
def test_a_set_takes_the_place_of_another(tmp_path: Path, foreign: bool) -> None:
    folder = tmp_path / "out"
    write(OLD, folder)
    kept = {}
    if foreign:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "latest").write_text("step10")
        kept = {"checkpoints/latest": "step10"}
    put(NEW, folder, gone=["launch/b.sh"])
    assert contents(folder) == {**NEW, **kept}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("foreign", [True, False], ids=["beside checkpoints", "alone"])
def test_a_full_disk_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: bool) -> None:
    folder = tmp_path / "out"
    write(OLD, folder)
    if foreign:
        (folder / "metrics.jsonl").write_text("{}")
    before = contents(folder)
    sync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(NEW, folder)
    assert contents(folder) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_folder_in_the_place_of_a_file_is_named_before_anything_changes(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError, match="is a folder"):
        write({"a.json": "new", "plan.json": "new"}, tmp_path)
    assert contents(tmp_path) == {}


def test_line_ends_are_the_same_on_every_machine(tmp_path: Path) -> None:
    write({"a.txt": "one\ntwo\n"}, tmp_path)
    assert (tmp_path / "a.txt").read_bytes() == b"one\ntwo\n"


def test_a_move_that_was_interrupted_is_read_as_the_new_set_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(OLD, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}")
    monkeypatch.setattr(atomic, "recover", lambda _folder, **_options: None)  # the writer dies before it moves anything
    put(NEW, tmp_path, gone=["launch/b.sh"])
    monkeypatch.undo()
    assert {name: locate(tmp_path, name).read_text() for name in NEW} == NEW
    write({**NEW, "a.json": "newer"}, tmp_path)
    assert contents(tmp_path) == {**NEW, "a.json": "newer", "metrics.jsonl": "{}"}


@pytest.mark.parametrize("foreign", [True, False], ids=["beside checkpoints", "alone"])
def test_a_killed_writer_leaves_one_whole_set(tmp_path: Path, foreign: bool) -> None:
    folder, draw = tmp_path / "out", random.Random(7)
    names = [f"f{index}.json" for index in range(8)]
    for _ in range(8):
        if foreign:
            folder.mkdir(exist_ok=True)
            (folder / "metrics.jsonl").write_text("{}")
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.15))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        if locate(folder, names[0]).exists():
            assert len({locate(folder, name).read_text() for name in names}) == 1
    put(OLD, folder, gone=names)
    assert contents(folder) == ({**OLD, "metrics.jsonl": "{}"} if foreign else OLD)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_one_file_is_written_through_a_link_and_keeps_its_permissions(tmp_path: Path) -> None:
    file, link = tmp_path / "spec.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_file(link, "new")
    assert (file.read_text(), link.is_symlink(), file.stat().st_mode & 0o777) == ("new", True, 0o640)
    with pytest.raises(OSError, match="No such file"):
        write_file(tmp_path / "missing" / "spec.json", "new")
