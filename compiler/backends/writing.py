"""Writes artefacts so that a reader never sees half of them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile.plan import Plan
from parcompile.plan.process_groups import process_groups

from .deepspeed.write import ds_config
from .json_text import to_text

__all__ = ["artefacts", "to_text", "write"]

EXECUTABLE = (".sh", ".sbatch")
"""Files that are written with permission to execute."""


def artefacts(plan: Plan) -> dict[str, Any]:
    """File names and contents of what every plan is written as."""
    return {
        "plan.json": plan.to_json(),
        "ds_config.json": ds_config(plan),
        "process_groups.json": process_groups(plan),
    }


def write(contents: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes all files into `folder`, or none: when one cannot be written, those before it get their old contents back.

    Everything is written beside its destination first; files are then renamed into place, `plan.json` last, so that
    whoever finds a plan finds the files that belong to it.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".parcompile-", dir=folder))
    try:
        for name, text in contents.items():
            file = staging / "new" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            # Bytes: line ends are the same on every machine.
            file.write_bytes(text.encode("utf-8"))
            if file.suffix in EXECUTABLE:
                file.chmod(0o755)
        names = sorted(contents, key=lambda name: (name == "plan.json", name))
        with contextlib.ExitStack() as undo:
            for name in names:
                _replace(staging, name, folder / name, undo)
            undo.pop_all()
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [folder / name for name in contents]


def _replace(staging: Path, name: str, target: Path, undo: contextlib.ExitStack) -> None:
    """Renames a staged file into place; `undo` learns how to bring back what was there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    old = staging / "old" / name
    existed = target.is_file()
    if existed:
        old.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(target, old)
    (staging / "new" / name).replace(target)
    if existed:
        undo.callback(old.replace, target)
    else:
        undo.callback(target.unlink)
