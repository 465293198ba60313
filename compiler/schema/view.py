"""A schema, to be asked: what a reference means, which keys it knows and where."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

_DEPTH = 3


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with its `$ref` into `root` followed, its own keywords on top; {} for what is no object."""
    if not isinstance(schema, dict):
        return {}
    if "$ref" not in schema:
        return schema
    found: Any = root
    for step in schema["$ref"].removeprefix("#/").split("/"):
        found = found[step]
    return {**resolved(found, root), **{key: value for key, value in schema.items() if key != "$ref"}}


class SchemaView:
    """The schema called `name`."""

    def __init__(self, name: str, schema: dict[str, Any]) -> None:
        self.name = name
        self.schema = schema

    def resolved(self, schema: Any) -> dict[str, Any]:
        """`schema` with its `$ref` followed, its own keywords on top; {} for what is no object."""
        return resolved(schema, self.schema)

    def parts(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """`schema` and everything that it combines."""
        schema = self.resolved(schema)
        inner = [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword, [])]
        inner += [schema[keyword] for keyword in ("if", "then", "else") if keyword in schema]
        return [schema, *(part for one in inner for part in self.parts(one))]

    @functools.cached_property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """The paths of all keys that the schema knows, to the depth of three."""
        found: dict[tuple[str, ...], None] = {}
        level: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), self.schema)]
        for _ in range(_DEPTH):
            entries = [
                ((*path, key), self.resolved(entry))
                for path, schema in level
                for part in self.parts(schema)
                for key, entry in part.get("properties", {}).items()
            ]
            found.update((path, None) for path, _ in entries)
            level = entries
        return tuple(found)


def about(schema: Any) -> str | None:
    """What the schema says the value is for, as a part of a sentence."""
    text = schema.get("description") if isinstance(schema, dict) else None
    return str(text).rstrip(".") if text else None


def example(schema: Any) -> Any:
    """The schema's first example, None when it gives none."""
    examples = schema.get("examples") if isinstance(schema, dict) else None
    return examples[0] if examples else None
