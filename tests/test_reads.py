"""No file that a user names is read without a bound: who reads another way is listed here with what it reads."""

from __future__ import annotations

import ast
import os
from collections import Counter
from pathlib import Path

import pytest

from parcompile.user_files import read_bytes, read_start

ROOT = Path(__file__).parents[1]
OWN = {
    "compiler/atomic.py": 4,
    "compiler/cli/__init__.py": 1,
    "compiler/doctor/records.py": 1,
    "compiler/entry_points.py": 1,
    "compiler/project/__init__.py": 2,
    "compiler/project/rows.py": 1,
    "compiler/show/page/render.py": 1,
    "compiler/text/__init__.py": 1,
    "compiler/user_files.py": 2,
    "compiler/version.py": 1,
    "runtime/checkpoint/placing.py": 5,
    "runtime/checkpoint/manifest.py": 2,
    "runtime/checkpoint/state_file.py": 1,
    "runtime/data/megatron_files.py": 1,
    "runtime/groups/rendezvous.py": 1,
    "runtime/liveness/monitor.py": 1,
    "runtime/liveness/recording.py": 3,
    "runtime/liveness/watchdog.py": 1,
    "runtime/preflight/cuda_host/__init__.py": 1,
    "runtime/preflight/live/facts.py": 4,
    "runtime/profiling/__init__.py": 1,
    "runtime/profiling/recorder.py": 1,
    "runtime/prove/ranks/cells.py": 1,
    "runtime/prove/ranks/engines/megatron_engine.py": 1,
    "runtime/prove/ranks/reference.py": 1,
    "runtime/prove/ranks/server.py": 7,
    "runtime/prove/certificate.py": 2,
    "runtime/run_log.py": 4,
}
"""How many such calls a file has. They read what is installed with the package, /proc, or pieces of a checkpoint or
data to train on, or they write; text/reading.py asks what a file is before it opens it, and reads so many bytes of it.
"""


def reads(file: Path) -> int:
    """Calls of open, read_text, read_bytes and get_data as methods, and of the built-in open."""
    calls = [node.func for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    methods = [one.attr for one in calls if isinstance(one, ast.Attribute)]
    names = [one.id for one in calls if isinstance(one, ast.Name)]
    return sum(one in ("open", "read_text", "read_bytes", "get_data") for one in methods) + names.count("open")


def test_every_file_of_a_user_is_read_by_the_one_reader() -> None:
    found = Counter[str]()
    for room in ("compiler", "runtime"):
        for file in (ROOT / room).rglob("*.py"):
            found[file.relative_to(ROOT).as_posix()] += reads(file)
    assert {name: count for name, count in sorted(found.items()) if count} == OWN


def test_what_is_no_regular_file_or_too_large_is_refused(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as stream:
        stream.truncate(1 << 40)
    for name, why in ((pipe, "no regular file"), ("/dev/zero", "no regular file"), (tmp_path, "a directory")):
        with pytest.raises(OSError, match=why):
            read_bytes(name)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes; at most 10 are read"):
        read_bytes(large, 10)
    with pytest.raises(OSError, match="no file can have this name"):
        read_bytes("a\0b")
    assert read_start(large, 3) == (bytes(3), 1 << 40)
