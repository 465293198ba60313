"""A schema, to be asked; values, and what it expects of them, in words; what is said of a document, each once."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from parcompile.diagnostics import Diagnostic, Fix, Path, Related, Severity, format_path
from parcompile.text.document import entry
from parcompile.user_files import shipped

WORDS = shipped("parcompile.schema", "words.json")
"""How types, ranges and units are said."""
_LONGEST = 60


def quoted(value: object) -> str:
    """`value` as it is written in JSON, cut to fit into a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(character if character.isprintable() else "·" for character in text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 2] + "…" + text[-1]


def listed(values: Iterable[object]) -> str:
    """`"a", "b" or "c"`."""
    texts = [quoted(value) for value in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1] if texts else ""


def describe_found(value: object) -> str:
    """`text "8"`, `the number 8.5`, `a list`."""
    if isinstance(value, str):
        return f"text {quoted(value)}"
    if value is None or isinstance(value, bool):
        return quoted(value)
    if isinstance(value, (int, float)):
        return f"the number {quoted(value)}"
    if isinstance(value, list):
        return f"the list {quoted(value)}" if value else "an empty list"
    return f"the object {quoted(value)}" if value else "an empty object"


def describe_expected(schema: dict[str, Any]) -> str:
    """What a schema takes, as `a whole number of at least 1`."""
    if "const" in schema:
        return quoted(schema["const"])
    if "enum" in schema and len(schema["enum"]) <= 12:
        return listed(schema["enum"])
    names = types_of(schema)
    text = " or ".join(WORDS["types"].get(name, name) for name in names) or "another value"
    if names in (["integer"], ["number"]):
        if "minimum" in schema:
            text += f" of at least {quoted(schema['minimum'])}"
        elif "exclusiveMinimum" in schema:
            text += f" above {quoted(schema['exclusiveMinimum'])}"
    if names == ["array"] and schema.get("minItems") is not None and schema.get("minItems") == schema.get("maxItems"):
        text += f" of {schema['minItems']}"
    return text


def types_of(schema: dict[str, Any]) -> list[str]:
    """The JSON types that a schema names, an empty list when it names none."""
    named = schema.get("type", [])
    if isinstance(named, str):
        return [named]
    if named:
        return list(named)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return list(dict.fromkeys(type_of(choice) for choice in choices))


def type_of(value: object) -> str:
    """The narrowest JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and value == int(value)):
        return "integer"
    names: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "object")


def is_type(value: object, schema: Any) -> bool:
    """Whether a schema takes values of this type."""
    names = types_of(schema) if isinstance(schema, dict) else []
    kind = type_of(value)
    return kind in names or (kind == "integer" and "number" in names)


def fitting(value: object, schema: dict[str, Any]) -> bool:
    """Whether `value` passes the simple keywords of a schema: type, enum, const, bounds, pattern."""
    from jsonschema.validators import Draft202012Validator

    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    part = {key: schema[key] for key in ("type", "enum", "const", "pattern", *bounds) if key in schema}
    return bool(part) and is_type(value, schema) and Draft202012Validator(part).is_valid(value)


def as_number(text: object) -> int | float | None:
    """The number that a text spells."""
    if not isinstance(text, str) or not text.strip() or len(text) > 40 or "n" in text.lower():
        return None
    plain = text.strip().replace("_", "").replace(",", "") if text.strip()[0] != "," else text
    try:
        return int(plain)
    except ValueError:
        pass
    try:
        number = float(plain)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def as_truth(text: object) -> bool | None:
    """The truth value that a text spells."""
    if not isinstance(text, str):
        return None
    word = text.strip().lower()
    if word in ("true", "yes", "on", "y"):
        return True
    return False if word in ("false", "no", "off", "n") else None


NOTHING = object()
"""Stands for a value that is not there."""


class Findings:
    """Diagnostics of one tree.

    `unusable` holds the paths whose values must not be used, `at_key` the (code, path) of what is about a key rather
    than its value, `meant` the paths that misspelt keys were meant to be. Nothing is said about paths in `skipped`.
    """

    def __init__(self, tree: object, skipped: frozenset[Path]) -> None:
        self.tree = tree
        self.unusable: set[Path] = set()
        self.at_key: set[tuple[str, Path]] = set()
        self.meant: set[Path] = set()
        self._skipped = skipped
        self._said: dict[tuple[str, Path], Diagnostic] = {}

    def say(
        self,
        code: str,
        path: Path,
        message: str,
        advice: str | None = None,
        *,
        at_key: bool = False,
        fixes: tuple[Fix, ...] = (),
        related: tuple[Related, ...] = (),
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Something about the value (or with `at_key` the key) at `path`; the first of a code and a path counts.

        Only a value that an error is about must not be used.
        """
        if any(path[:length] in self._skipped for length in range(len(path) + 1)):
            return
        if at_key:
            self.at_key.add((code, path))
        found = Diagnostic(code, severity, message, path=path, help=advice, fixes=fixes, related=related)
        self._said.setdefault((code, path), found)
        if severity is Severity.ERROR:
            self.unusable.add(path)

    def diagnostics(self) -> list[Diagnostic]:
        """All that was said, without the consequences: a misspelt key is missing too, a text is no number in range."""
        return [
            found
            for (code, path), found in self._said.items()
            if not (code in ("K002", "K009") and path in self.meant)
            and not (code in ("K004", "K005", "K006", "K007") and ("K003", path) in self._said)
        ]

    def value(self, path: Path) -> object:
        """The document's value at `path`, NOTHING when there is none."""
        value: Any = self.tree
        for step in path:
            value = entry(value, step, NOTHING)
        return value


def named(path: Path) -> str:
    """A path as the start of a message."""
    return format_path(path) or "the document"


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


class Violation(NamedTuple):
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
