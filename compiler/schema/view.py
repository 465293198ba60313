"""A schema, to be asked: what a reference means, which keys it knows; and one violated keyword."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parcompile.diagnostics import Path

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError


# A schema, to be asked: what a reference means, which keys it knows and where.

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


# One violated keyword of a schema, with the schema it stands in and the value that violates it.


@dataclass(frozen=True, slots=True)
class Violation:
    """The value `instance` at `path` violates `keyword`, whose value in `schema` is `limit`.

    `depth` is how far the value lies below the one that the enclosing `oneOf` or `anyOf` is about, `alternative` the
    index of the alternative in it, and `context` what is wrong under each alternative when `keyword` is one of those.
    """

    keyword: str
    limit: Any
    path: Path
    instance: Any
    schema: dict[str, Any]
    depth: int
    alternative: int
    is_key: bool
    context: tuple[Violation, ...]

    @classmethod
    def of(cls, error: ValidationError) -> Violation:
        """The validator's error; a schema that is just `false` has the keyword ""."""
        schema_path = list(error.relative_schema_path)
        first = schema_path[0] if schema_path else 0
        return cls(
            keyword=error.validator if isinstance(error.validator, str) else "",
            limit=error.validator_value,
            path=tuple(error.absolute_path),
            instance=error.instance,
            schema=dict(error.schema) if isinstance(error.schema, dict) else {},
            depth=len(error.relative_path),
            alternative=first if isinstance(first, int) else 0,
            is_key="propertyNames" in schema_path and isinstance(error.instance, str),
            context=tuple(cls.of(inner) for inner in error.context or ()),
        )
