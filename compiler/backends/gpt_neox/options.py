"""The options of gpt-neox: types, choices and defaults of each, in the versions that have it.

The facts stand in `options.json`, which `.ci/generate/gpt_neox_options.py` writes by importing its dataclasses.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Facts:
    """What one span of versions says of an option. `since` and `until` are places in `versions()`.

    `types` are Python's names of those that it takes, `group` the class that it stands in.
    """

    since: int
    until: int
    types: tuple[str, ...]
    choices: tuple[Any, ...] | None
    default: Any
    group: str


@functools.cache
def _table() -> Mapping[str, Any]:
    text = (importlib.resources.files("parcompile.backends.gpt_neox") / "options.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


@functools.cache
def versions() -> tuple[str, ...]:
    """The versions that are known, oldest first: tags and commits."""
    return tuple(_table()["versions"])


@functools.cache
def options() -> Mapping[str, tuple[Facts, ...]]:
    """The facts of every option that any version had, oldest first, by its name with underscores."""
    return {
        name: tuple(
            Facts(since, until, tuple(types), None if choices is None else tuple(choices), default, group)
            for since, until, types, choices, default, group in spans
        )
        for name, spans in _table()["options"].items()
    }


def is_current(name: str) -> bool:
    """Whether the newest version has the option."""
    return name in options() and options()[name][-1].until == len(versions()) - 1


@functools.cache
def defaults() -> Mapping[str, Any]:
    """What the newest version uses for each option that is left out."""
    return {name: facts[-1].default for name, facts in options().items() if is_current(name)}


def spelling(key: str) -> str:
    """An option as its name is written here: files have hyphens too."""
    return key.replace("-", "_")
