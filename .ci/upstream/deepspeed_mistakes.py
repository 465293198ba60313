"""Realistic mistakes, each planted into a configuration that DeepSpeed accepts and honours.

They are those of issue threads and of public files: misspelt and misplaced keys, values of a wrong type or unit, keys
that exclude or need each other, keys of other versions and other tools, and broken text. `refused` is what DeepSpeed
does with each of them, or the one who reads the file for it; what it takes silently is the worse half.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""`renamed`: a key, how it is written, whether DeepSpeed refuses it. `edited`: a name, values at dotted paths (null
removes a key), the place, whether it is refused, and the filler, where there is one. A rate as text fails in the first
step of the fused Adam, which the judge does not take."""
BASE: Mapping[str, Any] = _ROWS["base"]


@dataclass(frozen=True)
class Mistake:
    """One of them, as the text of a file. `at` is a part of the path, or the code, that a finding must have."""

    name: str
    text: str
    at: str
    refused: bool
    filler: str = "bare"


def finds(mistake: Mistake, diagnostics: Sequence[Any]) -> bool:
    """Whether one of the checker's findings names the mistake: as an error when it keeps a job from starting."""
    named = [
        one
        for one in diagnostics
        if mistake.at in one.code or mistake.at in one.message or any(mistake.at in str(step) for step in one.path)
    ]
    return any(one.is_error for one in named) if mistake.refused else bool(named)


def edited(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with values at dotted paths; None removes a key."""
    tree: dict[str, Any] = copy.deepcopy(dict(BASE))
    for dotted, value in changes.items():
        *steps, last = dotted.split(".")
        node = tree
        for step in steps:
            node = node.setdefault(step, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    return tree


def renamed(dotted: str, name: str) -> dict[str, Any]:
    """The base with one key written in another way, at its place."""
    tree: dict[str, Any] = copy.deepcopy(dict(BASE))
    *steps, last = dotted.split(".")
    node = tree
    for step in steps:
        node = node[step]
    entries = [(name if key == last else key, value) for key, value in node.items()]
    node.clear()
    node.update(entries)
    return tree


_TEXT = json.dumps(BASE, indent=2)
_BROKEN = (
    ("a comma too many for the Trainer", _TEXT.replace("1000\n", "1000,\n"), "J013", True, "transformers"),
    ("a comment for the Trainer", _TEXT.replace("{\n", "{\n  // tuned\n", 1), "J014", True, "transformers"),
    (
        "a key given twice",
        _TEXT.replace('"bf16"', '"gradient_clipping": 0.5,\n  "bf16"', 1),
        "gradient_clipping",
        True,
        "bare",
    ),
    ("Python's words", _TEXT.replace('"enabled": true', '"enabled": True'), "J016", True, "transformers"),
    ("a bracket that is missing", _TEXT.rstrip("}\n"), "J", True, "transformers"),
)


def mistakes() -> Iterator[Mistake]:
    """All of them."""
    for dotted, name, refused in _ROWS["renamed"]:
        yield Mistake(f"{dotted} as {name}", json.dumps(renamed(dotted, name), indent=2), name, refused)
    for name, changes, *further in _ROWS["edited"]:
        yield Mistake(name, json.dumps(edited(changes), indent=2), *further)
    for row in _BROKEN:
        yield Mistake(*row)
