"""What gpt-neox refuses of its own keys before it starts DeepSpeed: names, types and choices.

`NeoXArgs(**config)` takes no unknown key, and `validate_types` wants the very type of a field: a float may be written
as a whole number, null stands for the default, and the case of a choice does not count.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parcompile.diagnostics import Diagnostic, Path, Severity
from parcompile.schema.findings import Findings, named
from parcompile.schema.keys import unknown_key
from parcompile.schema.mismatch import choice, mismatch
from parcompile.text import Document, Place

from .fields import ANY, Field, fields, versions

TUNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization")
"""Keys that hold several values, or "auto", while DeepSpeed's autotuning looks for the best (AUTOTUNING_ARGS)."""
_SCHEMAS = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
    "dict": {"type": "object"},
    "list": {"type": "array"},
}
_EXPONENT = re.compile(r"[-+]?[0-9_.]+[eE]([-+]?)[0-9]+")


@dataclass(frozen=True, slots=True)
class _Places:
    """Where keys stand, for guesses at misspelt ones."""

    name: str
    places: tuple[tuple[str, ...], ...]


@functools.cache
def _current() -> _Places:
    return _Places("gpt_neox", tuple((name,) for name, field in fields().items() if field.is_current))


def findings(document: Document) -> list[Diagnostic]:
    """Everything of the kind in a file whose top-level keys are named as fields are."""
    tree = document.tree
    assert isinstance(tree, dict)
    found = Findings(tree, document.invalid)
    current = [name for (name,) in _current().places]
    for name, value in tree.items():
        field = fields().get(name)
        if field is None:
            consequence = ": gpt-neox refuses it"
            unknown_key((name,), current, tree, found, _current(), consequence=consequence, unguessed=Severity.WARNING)
        elif not field.is_current:
            _gone(name, field, found)
        elif not (tree.get("autotuning") and (value == "auto" or name in TUNED)):
            _value((name,), value, field, found)
    for path, literal in _texts(tree, document.root, document.text, ()):
        _no_number(path, literal, found)
    return [document.locate(one, key=(one.code, one.path) in found.at_key) for one in found.diagnostics()]


def _gone(name: str, field: Field, found: Findings) -> None:
    message = f"{name} was a key of gpt-neox up to version {field.versions[-1]}: version {versions()[-1]} refuses it"
    found.say("K010", (name,), message, "remove it, or run the file with that version", at_key=True, severity=_OLD)


_OLD = Severity.WARNING
"""A file does not say for which version it was written."""


def _value(path: Path, value: Any, field: Field, found: Findings) -> None:
    if value is None or ANY in field.types:
        return
    if field.choices:
        known = [str(one).lower() for one in field.choices if isinstance(one, str)]
        if value not in field.choices and not (isinstance(value, str) and value.lower() in known):
            choice(path, value, list(field.choices), [{"enum": list(field.choices)}], found)
    elif type(value).__name__ not in field.types and not (type(value) is int and "float" in field.types):
        mismatch(path, value, [_SCHEMAS[one] for one in field.types if one in _SCHEMAS], found)


def _texts(tree: Any, place: Place, text: str, path: Path) -> Iterator[tuple[Path, str]]:
    """Numbers with an exponent that PyYAML takes for text: it wants a point before it and a sign in it."""
    if isinstance(tree, (dict, list)) and place.children is not None:
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _texts(inner, place.children[key], text, (*path, key))  # type: ignore[index]
    elif isinstance(tree, float):
        literal = text[place.start : place.end]
        match = _EXPONENT.fullmatch(literal)
        if match is not None and not ("." in literal and match[1]):
            yield path, literal


def _no_number(path: Path, literal: str, found: Findings) -> None:
    digits, exponent = re.split("[eE]", literal)
    digits = digits if "." in digits else f"{digits}.0"
    better = f"{digits}e{exponent if exponent[0] in '+-' else '+' + exponent}"
    message = f"{named(path)}: gpt-neox reads its files with PyYAML, which takes {literal} for text"
    found.say("K003", path, message, f"write {better}")
