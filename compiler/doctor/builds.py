"""Builds of torch's extensions, and the lock that a build which was killed leaves behind.

`torch.utils.cpp_extension` makes an empty file `lock` in the folder of a build, and keeps it open until it removes it.
Every other process that needs the extension waits until the file is gone: for ever, where nobody will remove it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WAITING = "file_baton.py"
"""The file of torch whose frame is the last of a process that waits for a build."""
YOUNG_SECONDS = 60.0
"""A lock that is younger may belong to a build on another host of a shared file system."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock of a build. `builder` is the process of this host that has it open; None where none is seen."""

    path: str
    age_seconds: float
    builder: int | None

    @property
    def is_left(self) -> bool:
        """Whether nobody is going to remove it."""
        return self.builder is None and self.age_seconds > YOUNG_SECONDS

    def __str__(self) -> str:
        who = f"process {self.builder} has" if self.builder else "no process of this host that can be seen has"
        return f"{self.path}: {self.age_seconds / 60:,.0f} minutes old, {who} it open"


def read_lock(path: Path) -> Lock | None:
    """The lock in a folder of a build; None: the file is another one."""
    if path.name != "lock" or not ("torch_extensions" in path.parts or (path.parent / "build.ninja").is_file()):
        return None
    there = path.stat()
    return Lock(str(path), max(time.time() - there.st_mtime, 0.0), _builder(there))


def locks_below(roots: Iterable[Path]) -> list[Lock]:
    """Those of the builds in torch's folders of extensions; no roots: the folders that torch takes by itself."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folders = list(roots) or [Path(named) if named else Path(cache, "torch_extensions")]
    files = {file for folder in folders for pattern in ("*/lock", "*/*/lock") for file in folder.glob(pattern)}
    return [lock for file in sorted(files) if (lock := read_lock(file)) is not None]


def _builder(file: os.stat_result) -> int | None:
    """The process of this host that has a file open."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # a process of another user, or one that has ended
            for name in os.scandir(folder):
                there = name.stat()
                if (there.st_dev, there.st_ino) == (file.st_dev, file.st_ino):
                    return int(folder.parent.name)
    return None
