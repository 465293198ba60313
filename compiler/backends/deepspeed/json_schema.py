"""The facts of keys.json as JSON Schema: for the published schema, and for what messages say of a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "path": "string",
    "list": "array",
    "dict": "object",
    "section": "object",
    "none": "null",
}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def as_schema(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one value, without what is in a section; {} takes everything."""
    kind = facts.get("type", "any")
    if kind == "union":
        parts = [as_schema(part) for part in facts["of"]]
        return {"anyOf": [*parts, {"type": "null"}] if facts.get("null") else parts}
    if kind == "choice":
        return {"enum": [*facts["in"], *([None] if facts.get("null") else [])]}
    if kind == "class":
        return {"not": {}}
    schema: dict[str, Any] = {}
    if kind in _TYPES:
        null = facts.get("null") and kind != "none"
        schema["type"] = [_TYPES[kind], "null"] if null else _TYPES[kind]
    schema.update({_BOUNDS[name]: facts[name] for name in _BOUNDS if name in facts})
    if "of" in facts:
        schema["items"] = as_schema(facts["of"])
    if "length" in facts:
        schema.update(minItems=facts["length"], maxItems=facts["length"])
    if "least" in facts:
        schema["minItems"] = facts["least"]
    return schema
