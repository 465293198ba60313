"""Writes compiler/lint/deepspeed/fillers.json: which keys transformers and accelerate fill where "auto" stands.

    python .ci/generate/deepspeed/fillers.py [--check]

Each key of the newest known DeepSpeed gets "auto", one at a time, and the installed transformers and accelerate are run
on the file; a key is filled when they take the file and another value stands there afterwards.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TARGET = ROOT / "compiler" / "lint" / "deepspeed" / "fillers.json"
sys.path.insert(0, str(ROOT / ".ci" / "upstream"))

import hugging_face  # noqa: E402

from parcompile.backends.deepspeed.table import ANY, ENTRY, newest, table  # noqa: E402

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
FILLERS = ("transformers", "accelerate")


def paths() -> list[str]:
    """Every key that holds a value."""
    found = [
        key.path for key in table(newest()).walk() if not key.is_section and not key.refused and not key.deprecated
    ]
    return [path for path in found if not {ANY, ENTRY} & set(path.split("."))]


def fills(filler: str, path: str) -> bool:
    tree: dict[str, Any] = json.loads(json.dumps(BASE))
    steps = path.split(".")
    node = tree
    for step in steps[:-1]:
        node = node.setdefault(step, {})
    node[steps[-1]] = "auto"
    try:
        node = hugging_face.filled(tree, filler, world=8, steps=1000)
    except ValueError:
        return False
    for step in steps:
        node = node[step]
    return bool(node != "auto")


def as_text() -> str:
    tree = {
        filler: {
            "version": importlib.metadata.version(filler),
            "fills": sorted(path for path in paths() if fills(filler, path)),
        }
        for filler in FILLERS
    }
    return json.dumps(tree, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the file is out of date")
    check = parser.parse_args().check
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    text = as_text()
    if check and json.loads(TARGET.read_text(encoding="utf-8")) != json.loads(text):
        sys.exit(f"{TARGET.name} is out of date")
    if not check:
        TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
