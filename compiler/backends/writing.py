"""Writes artefacts so that a reader never sees half of them, and says whether a folder holds them."""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parcompile.atomic import is_inside, read_set, write_set
from parcompile.user_files import MAX_INDEX_BYTES, parse_json, read_bytes

from .registry import LOCK

# Whether a folder holds what a spec compiles to: CI's guard against artefacts that were edited or forgotten.

DIFF_LINES = 40
"""Lines of difference that are shown of one file."""


def locked_targets(folder: Path) -> tuple[str, ...]:
    """The targets that were written into a folder before; none when it has no lock file."""
    named = _lock(folder).get("targets", [])
    return tuple(map(str, named)) if isinstance(named, list) else ()


def stale_files(contents: Mapping[str, str], folder: Path) -> list[str]:
    """Names of files that an earlier compilation wrote and that are no longer among the artefacts.

    A file that was edited since is nobody's to remove, and is not among them.
    """
    found = []
    for name, digest in sorted(_lock(folder).get("files", {}).items()):
        if name in contents or not is_inside(folder, name):
            continue
        with contextlib.suppress(OSError):
            if "sha256:" + hashlib.sha256(read_bytes(folder / name, follow=False)).hexdigest() == digest:
                found.append(name)
    return found


def differences(contents: Mapping[str, str], folder: Path) -> str:
    """A unified diff from the files of a folder to the artefacts; empty when they are equal.

    Raises:
        OSError: a file is there but cannot be read.
    """
    lines: list[str] = []
    for name, old in read_set(folder, contents).items():
        lines += _difference(name, folder / name, old, contents[name])
    lines += [f"Only in {folder}: {name}" for name in stale_files(contents, folder)]
    return "".join(f"{line}\n" for line in lines)


def _difference(name: str, file: Path, content: bytes | None, text: str) -> Iterator[str]:
    if content is None:
        yield f"Missing: {file}"
        return
    old = content.decode("utf-8", errors="replace")
    if old == text:
        return
    diff = list(
        difflib.unified_diff(old.split("\n"), text.split("\n"), f"{name} (on disk)", f"{name} (compiled)", lineterm="")
    )
    yield from diff[:DIFF_LINES]
    if len(diff) > DIFF_LINES:
        yield f"… and {len(diff) - DIFF_LINES} more lines of {name}"


def _lock(folder: Path) -> dict[str, Any]:
    """The lock file of a folder; empty when there is none that can be understood."""
    try:
        tree = parse_json(read_set(folder, [LOCK])[LOCK] or b"{}")
    except (OSError, ValueError):
        return {}
    if not isinstance(tree, dict) or not isinstance(tree.get("files", {}), dict):
        return {}
    return tree


# Writes artefacts so that a reader never sees half of them.

EXECUTABLE = (".sh", ".sbatch")
"""Files that are written with permission to execute."""


def write(contents: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes all files into `folder` and removes those of an earlier compilation that are none now, or changes nothing.

    Raises:
        OSError: the folder cannot be made or written, or has a file of another origin by one of these names.
    """
    # Bytes: line ends are the same on every machine.
    files = {name: text.encode("utf-8") for name, text in contents.items()}
    scripts = [name for name in files if name.endswith(EXECUTABLE)]

    def gone() -> list[str]:
        known = _lock(folder).get("files", {})
        for name in sorted(files.keys() - {LOCK, *known}) if LOCK in files else ():
            if is_inside(folder, name) and read_bytes(folder / name, MAX_INDEX_BYTES) != files[name]:
                said = f"{LOCK} of its folder does not list it, and it would be lost: move it, or name another folder"
                raise FileExistsError(errno.EEXIST, said, str(folder / name))
        return stale_files(contents, folder)

    write_set(files, folder, executable=scripts, gone=gone)
    return [folder / name for name in contents]
