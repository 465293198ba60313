"""Reads a plan from its file."""

from __future__ import annotations

import json
from pathlib import Path

from parcompile.atomic import locate, read_set
from parcompile.user_files import read_text

from .plan import Plan, PlanError
from .tree import plan_from_tree


def plan_file(path: str | Path) -> Path:
    """The file of a plan, which may be given as its folder.

    Raises:
        PlanError: the folder holds none.
    """
    file = Path(path)
    if file.is_dir():
        file = locate(file, "plan.json")
        if not file.exists():
            raise PlanError(f"{path} is a folder without a plan.json: name a file, or the folder of a compiled plan")
    elif file.name == "plan.json":
        file = locate(file.parent, file.name)
    return file


def load_plan(path: str | Path) -> Plan:
    """Reads `plan.json`, or the folder that holds it.

    Raises:
        PlanError: the file cannot be read, or is not a plan of this version.
    """
    file = plan_file(path)
    try:
        tree = json.loads(_content(Path(path), file))
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(tree, dict) or "plan_version" not in tree:
        raise PlanError(f"{file} is not a plan: compile a spec with `parcompile spec.json -o DIR`")
    try:
        return plan_from_tree(tree)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None


def _content(path: Path, file: Path) -> str:
    """The text of a plan; one that a compilation is moving at this moment is found where it is."""
    if file.name != "plan.json":
        return read_text(file)
    content = read_set(path if path.is_dir() else path.parent, ["plan.json"])["plan.json"]
    return read_text(file) if content is None else content.decode("utf-8")
