"""What the published schema says of a key in words: its example, and what to write instead of a removed one."""

from __future__ import annotations

import functools
from typing import Any

from parcompile.schema import load

OPEN = frozenset({"datastates_ckpt"})
"""Sections whose keys belong to somebody else."""


@functools.cache
def _entry(path: str) -> dict[str, Any]:
    node: dict[str, Any] = load("ds_config")
    for step in path.split("."):
        for part in (node, *node.get("anyOf", ())):
            inner = part.get("properties", {}).get(step)
            if step == "*":
                inner = part.get("additionalProperties")
            elif step == "[]":
                inner = part.get("items")
            if isinstance(inner, dict):
                node = inner
                break
        else:
            return {}
    return node


def example(path: str) -> dict[str, Any]:
    """{"examples": […]} of a key; {} when there is none."""
    examples = _entry(path).get("examples")
    return {"examples": examples} if examples else {}


def instead(path: str) -> str | None:
    """What became of a removed key, as advice."""
    entry = _entry(path)
    text = entry.get("description") if entry.get("not") == {} else None
    return str(text).rstrip(".") if text else None
