"""What a schema finds wrong in a document, said so that a person can mend it.

`accepting` tells what is violated, or jsonschema of a schema with other keywords; `alternatives` and the modules behind
it turn that into diagnostics: the deepest useful error, the branch that was meant, the key or value that was nearly
written.

The JSON Schemas of the package: what a document violates in them, their defaults, and draft-07 twins.

A twin, for editors that know nothing newer, accepts everything that its schema accepts, and a little more.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple

from parcompile import schemas
from parcompile.diagnostics import Diagnostic, Path, in_file_order
from parcompile.entry_points import FAMILIES, offers
from parcompile.text import Document
from parcompile.user_files import shipped_text

from .accepting import accepted
from .values import Findings, SchemaView, resolved, types_of

if TYPE_CHECKING:
    from jsonschema.protocols import Validator
    from referencing import Registry


class UnknownSchemaError(ValueError):
    """There is no schema of that name."""


class Validation(NamedTuple):
    """What a schema finds wrong. A rule that reads a value at or under one of `invalid_paths` stays quiet.

    `invalid_paths` also names what was written more than once, what could not be read as written, keys that are
    missing, and the key that a misspelt one was meant to be.
    """

    diagnostics: tuple[Diagnostic, ...]
    invalid_paths: frozenset[Path]

    @property
    def valid(self) -> bool:
        """Whether nothing was found."""
        return not self.diagnostics


_FOLDER, _SUFFIX = FilePath(str(schemas.__file__)).parent, ".schema.json"


def names() -> tuple[str, ...]:
    """The names of all schemas, such as "spec" and "plan"."""
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in _FOLDER.glob(f"*{_SUFFIX}")))


BASE = "https://parcompile.readthedocs.io/en/stable/schemas/v1/"
"""What the `$id` of every schema begins with; the name of its file follows."""


def registry() -> Registry[Any]:
    """All schemas by their `$id`, for jsonschema's `registry`: an address resolves without a network."""
    from referencing import Registry, Resource

    return Registry().with_resources((load(name)["$id"], Resource.from_contents(load(name))) for name in names())


def text(name: str) -> str:
    """The text of a schema, by its name or its `$id`; `-` and `_` in names are the same.

    Raises:
        UnknownSchemaError: there is none of that name.
    """
    name = name.removeprefix(BASE).removesuffix(_SUFFIX)
    for candidate in (name, name.replace("-", "_"), name.replace("_", "-")):
        if (_FOLDER / f"{candidate}{_SUFFIX}").is_file():
            return shipped_text("parcompile.schemas", f"{candidate}{_SUFFIX}")
    raise UnknownSchemaError(f"there is no schema {name!r}; there are: {', '.join(names())}")


@functools.cache
def load(name: str) -> dict[str, Any]:
    """A schema, to be read only: it is loaded once.

    Raises:
        UnknownSchemaError: there is none of that name.
    """
    schema = json.loads(text(name))
    assert isinstance(schema, dict)
    if name == "spec":
        # A spec may name the families of plug-ins too. What `parcompile schema` prints is the same everywhere.
        known = schema["$defs"]["model_dimensions"]["properties"]["model_type"]["enum"]
        known += [family for family in offers(FAMILIES) if family not in known]
    return schema


@functools.cache
def _validator(name: str) -> Validator:
    from jsonschema.validators import Draft202012Validator

    return Draft202012Validator(load(name))


@functools.cache
def _view(name: str) -> SchemaView:
    return SchemaView(name, load(name))


def validate(document: Document | object, name: str) -> Validation:
    """Everything in a document, or a plain tree, that the schema `name` does not allow: one diagnostic per mistake."""
    placed = document if isinstance(document, Document) else None
    tree: Any = placed.tree if placed else document
    read_wrong = placed.invalid | placed.duplicates if placed else frozenset()
    if accepted(tree, load(name)) or not (errors := list(_validator(name).iter_errors(tree))):
        return Validation((), read_wrong)
    # Most specs violate nothing: what explains violations is imported for those that do.
    from .alternatives import explain

    findings = Findings(tree, placed.invalid if placed else frozenset())
    explain(errors, findings, _view(name))
    found = findings.diagnostics()
    if placed:
        found = [placed.locate(one, key=(one.code, one.path) in findings.at_key) for one in found]
    return Validation(tuple(in_file_order(found)), read_wrong | findings.unusable)


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
    node = next(iter(_nodes(name, path)), {})
    for key in ("examples", "enum"):
        if node.get(key):
            return node[key][0]
    return node.get("default", "…")


def whole(tree: Any, name: str, path: tuple[str | None, ...] = ()) -> Any:
    """A tree with an integer for each whole number where its schema takes no others: JSON Schema counts 64.0 as one."""
    if isinstance(tree, float):
        kinds = {kind for node in _nodes(name, path) for kind in types_of(node)} if tree.is_integer() else set()
        return int(tree) if "integer" in kinds and "number" not in kinds else tree
    if not isinstance(tree, dict | list) or not _nodes(name, path):
        return tree
    if isinstance(tree, list):
        return [whole(one, name, (*path, None)) for one in tree]
    return {key: whole(one, name, (*path, key)) for key, one in tree.items()}


@functools.lru_cache(maxsize=4096)
def _nodes(name: str, path: tuple[str | None, ...]) -> tuple[dict[str, Any], ...]:
    """What a schema says of a place, and each of its alternatives; None is a step into a list."""
    root = load(name)
    around = _nodes(name, path[:-1]) if path else ()
    if path and path[-1] is not None:
        inside = [one.get("properties", {}).get(path[-1], one.get("additionalProperties")) for one in around]
    else:
        inside = [one.get("items") for one in around] if path else [root]
    nodes = [resolved(one, root) for one in inside if isinstance(one, dict)]
    chosen = [one for node in nodes for key in ("anyOf", "oneOf", "allOf") for one in node.get(key, ())]
    return (*nodes, *(resolved(one, root) for one in chosen))


@functools.lru_cache(maxsize=4096)
def type_of(name: str, path: tuple[str, ...]) -> str | None:
    """The one type that a schema takes at a path, as "integer"; None where it takes several, or has no such key."""
    entry = _entry(name, path)
    found = entry[0].get("type") if entry else None
    return found if isinstance(found, str) else None


@functools.lru_cache(maxsize=4096)
def _default(name: str, path: tuple[str, ...]) -> Any:
    entry = _entry(name, path)
    if entry is None or (entry[1] and "default" not in entry[0]):
        raise NoDefaultError(".".join(path))
    return entry[0].get("default")


def _entry(name: str, path: tuple[str, ...]) -> tuple[dict[str, Any], bool] | None:
    """What a schema says of a key, and whether it has to be given; None where it has no such key."""
    root = node = load(name)
    is_required = False
    for step in path:
        if step not in node.get("properties", {}):
            return None
        is_required = step in node.get("required", ())
        node = resolved(node["properties"][step], root)
    return node, is_required
