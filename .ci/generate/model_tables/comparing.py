"""Compares a table with models that transformers builds."""

from __future__ import annotations

import json
from typing import Any

from building import ModelType, Sample, nest
from drawing import Draws

from parcompile.model.tables import parameters
from parcompile.model.tables.completing import TableError, complete
from parcompile.model.tables.reading import table_from

DEEP = 60
"""So many layers show what a list of layers follows from, where models of 6 would agree with much."""
_EVERY = 10
"""One model in so many has up to `DEEP` layers."""


def compared(name: str, stored: dict[str, Any], count: int, seed: str) -> tuple[int, list[str]]:
    """How many models were built from fresh draws, and what a table says otherwise than they or deep configurations."""
    draws = Draws(ModelType(name), seed)
    draws.required = stored.get("required", {})
    built, wrong = 0, []
    for _ in range(12 * count):
        if built == count:
            break
        try:
            sample = draws.kind.model(draws.one(deepest=DEEP) if built % _EVERY == 0 else draws.one())
        except Exception:  # transformers refuses this configuration
            continue
        built += 1
        found = disagreement(stored, sample.given, sample.parameters, name)
        if found or (found := _miscompleted_deep(stored, draws, name)):
            wrong.append(f"{found} for {json.dumps(sample.given)}")
    return built, wrong


def _miscompleted_deep(stored: dict[str, Any], draws: Draws, name: str) -> str | None:
    try:
        sample = draws.kind.configuration(draws.one(deepest=DEEP))[1]
    except Exception:  # the class refuses this configuration
        return None
    return miscompleted(stored, sample, name)


def disagreement(stored: dict[str, Any], given: dict[str, Any], built: Any, name: str) -> str | None:
    """What a table says otherwise than the model that was built; None where names, order and shapes are the same."""
    try:
        found = [(one.name, one.shape) for one in parameters(table_from(name, stored), nest(given))]
    except TableError as error:
        return str(error)
    if found == list(built):
        return None
    for one, other in zip(found, built, strict=False):
        if one != other:
            return f"the table says {one}, the model {other}"
    return f"the table says {len(found)} parameters, the model {len(built)}"


def miscompleted(stored: dict[str, Any], sample: Sample, name: str) -> str | None:
    """A value that follows, where the table says otherwise than the configuration class; None where none does."""
    try:
        found = complete(table_from(name, stored), nest(sample.given))
    except TableError as error:
        return None if error.key in stored.get("fixed", {}) else str(error)  # no model was built with another value
    for key in stored.get("derived", {}):
        expected = sample.full.get(key)
        if (bool(found[key]) if isinstance(expected, bool) else found[key]) != expected:
            return f"{key}: the table says {found[key]}, the class {sample.full.get(key)}"
    return None
