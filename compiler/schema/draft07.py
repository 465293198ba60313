"""The draft-07 twin of a schema, for editors that know nothing newer.

What draft-07 cannot say is left out: the twin accepts everything that the schema accepts, and a little more.
"""

from __future__ import annotations

from typing import Any

_DROPPED = frozenset({"unevaluatedProperties", "unevaluatedItems", "dependentRequired", "dependentSchemas", "$schema"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"default", "examples", "enum", "const", "required"})


def draft07(schema: dict[str, Any]) -> dict[str, Any]:
    """The twin of a draft 2020-12 schema."""
    twin: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#"}
    twin.update(_converted(schema))
    if "$id" in twin:
        twin["$id"] = twin["$id"].replace(".schema.json", ".draft-07.schema.json")
    return twin


def _converted(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_converted(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    twin: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DROPPED or (key == "items" and "prefixItems" in schema):
            continue
        if key == "$ref":
            twin[key] = value.replace("#/$defs/", "#/definitions/") if isinstance(value, str) else value
        elif key == "prefixItems":
            twin["items"] = _converted(value)
            if "items" in schema:
                twin["additionalItems"] = _converted(schema["items"])
        elif key in _DATA:
            twin[key] = value
        elif key in _BY_NAME:
            twin["definitions" if key == "$defs" else key] = {name: _converted(entry) for name, entry in value.items()}
        else:
            twin[key] = _converted(value)
    dependencies = {**schema.get("dependentSchemas", {}), **schema.get("dependentRequired", {})}
    if dependencies:
        twin["dependencies"] = {
            name: entry if isinstance(entry, list) else _converted(entry) for name, entry in dependencies.items()
        }
    if "$ref" in twin and len(twin) > 1:
        # Draft-07 ignores everything beside a reference.
        reference = twin.pop("$ref")
        twin["allOf"] = [*twin.get("allOf", []), {"$ref": reference}]
    return twin
