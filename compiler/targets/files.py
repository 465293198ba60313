"""Writes artefacts so that a reader never sees half of them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parcompile.plan import Plan

from .deepspeed import ds_config
from .process_groups import process_groups


def artefacts(plan: Plan) -> dict[str, Any]:
    """File names and contents of everything a plan is written as."""
    return {
        "plan.json": plan.to_json(),
        "ds_config.json": ds_config(plan),
        "process_groups.json": process_groups(plan),
    }


def to_text(tree: object) -> str:
    """JSON as it is written: the same bytes on every machine."""
    return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write(contents: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes all files into `folder`, or none.

    Everything is written beside its destination first; files are then renamed into place, `plan.json` last, so that whoever finds a plan
    finds the files that belong to it.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".parcompile-", dir=folder))
    try:
        for name, text in contents.items():
            file = staging / name
            file.write_text(text, encoding="utf-8")
        names = sorted(contents, key=lambda name: name == "plan.json")
        for name in names:
            os.replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [folder / name for name in contents]
