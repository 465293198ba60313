"""The derived tables, as `.ci/generate/model_tables` writes them: one file for a version of transformers."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from parcompile.user_files import shipped, shipped_text

VERSION = "5.23.0"
"""The version of transformers that the tables come from."""
_FILE = f"transformers-{VERSION}.json"
_stored = functools.partial(shipped, __package__, _FILE)


class Row(NamedTuple):
    """One parameter, or one of each entry of a stack (`{layer}` in its name)."""

    name: str
    shape: tuple[str, ...]
    """An expression for each dim."""
    when: str = "True"
    """The condition under which it exists."""
    tp: str | None = None
    """How transformers' own plan cuts it, in transformers' words; None where its plan does not name it."""


class Table(NamedTuple):
    """The parameters of a model type, and how its configuration is completed."""

    model_type: str
    model_class: str
    nested: frozenset[str]
    """Keys that hold configurations."""
    names: Mapping[str, str]
    """Other names of keys."""
    defaults: Mapping[str, Any]
    """Values of keys that a configuration leaves out."""
    fixed: Mapping[str, Any]
    """Keys for which parameters are known for one value only."""
    derived: Mapping[str, str]
    """Values that the class computes from others, in the order in which they follow."""
    stacks: Mapping[str, str]
    """How often each repeated module (`model.layers.{layer}`) is there."""
    rows: tuple[Row, ...]


def table_of(model_type: str) -> Table | None:
    """The table of a model type; None where it has none."""
    return _ADDED.get(model_type) or _built_in(model_type)


_ADDED: dict[str, Table] = {}
"""The tables that plug-ins' families bring, by their types."""


def add_table(model_type: str, stored: Mapping[str, Any]) -> None:
    """Keeps the table of a plug-in's family.

    Raises:
        ValueError: it is none.
    """
    try:
        _ADDED[model_type] = table_from(model_type, stored)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its table is none: {type(error).__name__} {error}") from None


def table_like(model_type: str) -> dict[str, Any]:
    """The stored table of a built-in type, to be changed into that of a plug-in's family.

    Raises:
        KeyError: there is none.
    """
    return dict(copy.deepcopy(_stored()["types"][model_type]))


@functools.cache
def _built_in(model_type: str) -> Table | None:
    # Of the lines of all types only those of the one that is asked for are decoded: all of them take milliseconds.
    text, key = shipped_text(__package__, _FILE), f"\n  {json.dumps(model_type)}: "
    start = text.find(key + "{")
    return None if start < 0 else table_from(model_type, json.JSONDecoder().raw_decode(text, start + len(key))[0])


def class_default(model_type: str, key: str) -> Any:
    """What the class of a type takes for a key that is left out; None where it derives it, or has no table."""
    table = table_of(model_type)
    return None if table is None else table.defaults.get(key)


def covered() -> tuple[str, ...]:
    """The model types that have a table, in alphabetical order."""
    return tuple(sorted(_stored()["types"]))


def left_out() -> Mapping[str, str]:
    """Model types whose parameters cannot be expressed, and why."""
    found: Mapping[str, str] = _stored()["left_out"]
    return found


def table_from(model_type: str, stored: Mapping[str, Any]) -> Table:
    """The table from its entry in the file."""
    return Table(
        model_type,
        stored["class"],
        frozenset(stored.get("nested", ())),
        stored.get("names", {}),
        stored["defaults"],
        stored.get("fixed", {}),
        stored.get("derived", {}),
        stored["stacks"],
        tuple(Row(row["name"], tuple(row["shape"]), row.get("when", "True"), row.get("tp")) for row in stored["rows"]),
    )
