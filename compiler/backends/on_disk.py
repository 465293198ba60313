"""Whether a folder holds what a spec compiles to: CI's guard against artefacts that were edited or forgotten."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parcompile.atomic import is_inside, read_set
from parcompile.user_files import read_bytes

from .registry import LOCK

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
        tree = json.loads(read_set(folder, [LOCK])[LOCK] or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(tree, dict) or not isinstance(tree.get("files", {}), dict):
        return {}
    return tree
