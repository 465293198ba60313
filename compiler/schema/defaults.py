"""What holds where a document says nothing: the defaults that stand in its schema, and nowhere else."""

from __future__ import annotations

import copy
import functools
from typing import Any

from .validation import load
from .view import resolved


class NoDefaultError(LookupError):
    """A key that has to be given, or that the schema does not know."""


def default(name: str, path: tuple[str, ...]) -> Any:
    """The value at a path of a document that does not give it; None where it may be left out and has no default.

    None also stands for what follows from other values: those who resolve the document know how.

    Raises:
        NoDefaultError: the key has to be given, or the schema `name` has no such key.
    """
    found = _default(name, path)
    return copy.deepcopy(found) if isinstance(found, (dict, list)) else found


def example(name: str, path: tuple[str, ...]) -> Any:
    """A value that may stand at a path: the schema's example, one of its choices, its default; else an ellipsis."""
    root = node = load(name)
    for step in path:
        branches = [node, *(resolved(one, root) for key in ("anyOf", "oneOf", "allOf") for one in node.get(key, ()))]
        found = (one["properties"][step] for one in branches if step in one.get("properties", {}))
        node = resolved(next(found, {}), root)
    for key in ("examples", "enum"):
        if node.get(key):
            return node[key][0]
    return node.get("default", "…")


@functools.lru_cache(maxsize=4096)
def type_of(name: str, path: tuple[str, ...]) -> str | None:
    """The one type that a schema takes at a path, as "integer"; None where it takes several, or has no such key."""
    root = node = load(name)
    for step in path:
        if step not in node.get("properties", {}):
            return None
        node = resolved(node["properties"][step], root)
    found = node.get("type")
    return found if isinstance(found, str) else None


@functools.lru_cache(maxsize=4096)
def _default(name: str, path: tuple[str, ...]) -> Any:
    root = node = load(name)
    for step in path:
        if step not in node.get("properties", {}):
            raise NoDefaultError(".".join(path))
        is_required = step in node.get("required", ())
        node = resolved(node["properties"][step], root)
    if is_required and "default" not in node:
        raise NoDefaultError(".".join(path))
    return node.get("default")
