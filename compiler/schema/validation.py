"""The JSON Schemas of the package, and what a document violates in them, as diagnostics."""

from __future__ import annotations

import functools
import importlib.resources
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parcompile.diagnostics import Diagnostic, Path, in_file_order
from parcompile.entry_points import FAMILIES, offers
from parcompile.text import Document

if TYPE_CHECKING:
    from jsonschema.protocols import Validator
    from referencing import Registry

    from .view import SchemaView


class UnknownSchemaError(ValueError):
    """There is no schema of that name."""


@dataclass(frozen=True, slots=True)
class Validation:
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


def names() -> tuple[str, ...]:
    """The names of all schemas, such as "spec" and "plan"."""
    folder = importlib.resources.files("parcompile.schemas")
    suffix = ".schema.json"
    return tuple(sorted(entry.name[: -len(suffix)] for entry in folder.iterdir() if entry.name.endswith(suffix)))


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
    folder = importlib.resources.files("parcompile.schemas")
    name = name.removeprefix(BASE).removesuffix(".schema.json")
    for candidate in (name, name.replace("-", "_"), name.replace("_", "-")):
        file = folder / f"{candidate}.schema.json"
        if file.is_file():
            return file.read_text(encoding="utf-8")
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
    from .view import SchemaView

    return SchemaView(name, load(name))


def validate(document: Document | object, name: str) -> Validation:
    """Everything in a document, or a plain tree, that the schema `name` does not allow: one diagnostic per mistake."""
    placed = document if isinstance(document, Document) else None
    tree: Any = placed.tree if placed else document
    errors = list(_validator(name).iter_errors(tree))
    read_wrong = placed.invalid | placed.duplicates if placed else frozenset()
    if not errors:
        return Validation((), read_wrong)
    # Most specs violate nothing: what explains violations is imported for those that do.
    from .findings import Findings
    from .messages import explain

    findings = Findings(tree, placed.invalid if placed else frozenset())
    explain(errors, findings, _view(name))
    found = findings.diagnostics()
    if placed:
        found = [placed.locate(one, key=(one.code, one.path) in findings.at_key) for one in found]
    return Validation(tuple(in_file_order(found)), read_wrong | findings.unusable)
