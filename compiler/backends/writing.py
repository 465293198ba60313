"""Writes artefacts so that a reader never sees half of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile.atomic import write_set
from parcompile.plan import Plan, plan_tree
from parcompile.plan.process_groups import process_groups

from .deepspeed.write import ds_config
from .json_text import to_text

__all__ = ["artefacts", "to_text", "write"]

EXECUTABLE = (".sh", ".sbatch")
"""Files that are written with permission to execute."""


def artefacts(plan: Plan) -> dict[str, Any]:
    """File names and contents of what every plan is written as."""
    return {
        "plan.json": plan_tree(plan),
        "ds_config.json": ds_config(plan),
        "process_groups.json": process_groups(plan),
    }


def write(contents: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes all files into `folder` and removes those of an earlier compilation that are none now, or changes nothing.

    Raises:
        OSError: the folder cannot be made or written.
    """
    from .on_disk import stale_files  # it needs every target; who only prints a tree does without them

    # Bytes: line ends are the same on every machine.
    files = {name: text.encode("utf-8") for name, text in contents.items()}
    scripts = [name for name in files if name.endswith(EXECUTABLE)]
    write_set(files, folder, executable=scripts, gone=lambda: stale_files(contents, folder))
    return [folder / name for name in contents]
