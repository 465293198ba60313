"""DeepSpeed configurations that another tool's file names: they are checked with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .kinds import ACCELERATE, AXOLOTL, LLAMA_FACTORY, TRAINER


def named_files(kind: str, tree: Any, file: Path) -> list[str]:
    """The DeepSpeed configurations that a file of this kind names, those of them that are there.

    accelerate names one at deepspeed_config.deepspeed_config_file, the trainers at deepspeed. Such a path is relative
    to the folder in which the tool is started, mostly that of the repository; here it is looked for from the folder of
    the file upwards.
    """
    return [found for name in _names(kind, tree) if (found := _found(name, file)) is not None]


def _names(kind: str, tree: Any) -> Iterator[str]:
    if not isinstance(tree, dict):
        return
    if kind == ACCELERATE and isinstance(tree.get("deepspeed_config"), dict):
        yield str(tree["deepspeed_config"].get("deepspeed_config_file") or "")
    if kind in (AXOLOTL, LLAMA_FACTORY, TRAINER) and isinstance(tree.get("deepspeed"), str):
        yield tree["deepspeed"]


def _found(name: str, file: Path) -> str | None:
    if not name.endswith((".json", ".yaml", ".yml")):
        return None
    for folder in (*file.parents, Path()):
        candidate = folder / name
        try:
            if candidate.is_file():
                return str(candidate)
        except OSError:
            return None
    return None
