"""Folders of other projects at a version, out of their git repositories."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path


def repository(variable: str) -> Path | None:
    """The git directory that an environment variable names; None without one."""
    given = os.environ.get(variable)
    if given and (Path(given) / "objects").is_dir():
        return Path(given)
    if given and (Path(given) / ".git" / "objects").is_dir():
        return Path(given) / ".git"
    return None


def git(repository: Path, *arguments: str) -> bytes:
    """What git says of a repository."""
    return subprocess.run(
        ["git", f"--git-dir={repository}", *arguments], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout


def extract(repository: Path, revision: str, folder: Path, *names: str) -> Path:
    """Writes the files of a revision into a folder; only those under `names`, when any are given."""
    there = set(git(repository, "ls-tree", "--name-only", revision).decode().splitlines())
    wanted = [name for name in names if name in there] if names else []
    archive = git(repository, "archive", revision, *wanted)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder
