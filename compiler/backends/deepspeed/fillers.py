"""Who replaces "auto" in a DeepSpeed configuration, and where: DeepSpeed itself does not.

fillers.json was written by `.ci/generate/deepspeed/fillers.py`, which put "auto" into one key after another and ran
the code of transformers and accelerate.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

from parcompile.diagnostics import Path

TRANSFORMERS, ACCELERATE, LIGHTNING, BARE = "transformers", "accelerate", "lightning", "bare"
NAMES = (TRANSFORMERS, ACCELERATE, LIGHTNING, BARE)
TITLES = {
    TRANSFORMERS: "the Trainer of transformers",
    ACCELERATE: "accelerate",
    LIGHTNING: "Lightning",
    BARE: "deepspeed.initialize alone",
}
"""Fillers by name, as messages call them."""


@functools.cache
def _tables() -> dict[str, Any]:
    file = importlib.resources.files("parcompile.backends.deepspeed") / "fillers.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


@functools.cache
def filled(filler: str) -> frozenset[str]:
    """The dotted paths at which a filler replaces "auto"."""
    return frozenset(_tables().get(filler, {}).get("fills", ()))


def version(filler: str) -> str | None:
    """The version of a filler whose code was asked."""
    found = _tables().get(filler, {}).get("version")
    return None if found is None else str(found)


def autos(tree: object, path: Path = ()) -> Iterator[Path]:
    """The paths of all values that are "auto"."""
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(value, (dict, list, str)):
                yield from autos(value, (*path, key))
    elif tree == "auto":
        yield path
