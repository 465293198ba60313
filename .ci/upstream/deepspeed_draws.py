"""Draws a value for a key that pydantic reads: DeepSpeed and the checker are to refuse it both, or neither.

Of plain dictionaries DeepSpeed takes everything, and fails later or never: their keys are not drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parcompile.backends.deepspeed.table import ANY, ENTRY, Key, newest, table
from parcompile.backends.kinds import DEEPSPEED
from parcompile.pipeline import check_read
from parcompile.text import parse

WORDS: tuple[Any, ...] = ("1", "2.0", "true", "auto1", "cpu", "")
POOL: tuple[Any, ...] = (True, False, 0, 1, 2, -1, 1.5, 3.0, 5e8, None, [], [1], {}, *WORDS)


def keys() -> list[Key]:
    """The keys of the newest version that stand in a pydantic class."""
    found = []
    for key in table(newest()).walk():
        steps = key.path.split(".")
        if len(steps) > 1 and not {ANY, ENTRY} & set(steps) and not key.loose and not key.is_section:
            found.append(key)
    return found


def drawn(seed: int) -> Iterator[str]:
    """Configurations with one drawn value in each, without end."""
    draw, known = random.Random(seed), keys()
    while True:
        key, value = draw.choice(known), draw.choice(POOL)
        tree: dict[str, Any] = {"train_batch_size": 8}
        *steps, last = key.path.split(".")
        node = tree
        for step in steps:
            node = node.setdefault(step, {})
        node[last] = value
        yield json.dumps(tree)


def is_agreed(text: str, refused: str | None) -> bool:
    """Whether the checker refuses a configuration just where DeepSpeed does."""
    found = check_read(parse(text, "-"), Path(), kind=DEEPSPEED).diagnostics
    return any(one.is_error for one in found) == (refused is not None)
