"""The keys of a gpt-neox configuration: fields of its dataclasses, with what `validate_types` takes for each.

fields.json was written by `.ci/generate/gpt_neox_fields.py`, which asked the classes themselves.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANY = "Any"
"""The type of a field that takes everything."""


@dataclass(frozen=True, slots=True)
class Field:
    """A key: the versions that have it, oldest first, and either its types by their Python names or its choices."""

    name: str
    versions: tuple[str, ...]
    types: tuple[str, ...]
    choices: tuple[Any, ...]
    default: Any
    handed_on: bool
    """Whether gpt-neox hands the value on to DeepSpeed, unless it is the default."""

    @property
    def is_current(self) -> bool:
        """Whether the newest version has it."""
        return self.versions[-1] == versions()[-1]


@functools.cache
def _facts() -> dict[str, Any]:
    file = importlib.resources.files("parcompile.backends.gpt_neox") / "fields.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


@functools.cache
def fields() -> Mapping[str, Field]:
    """Every field that any known version has, by name."""
    return {
        name: Field(
            name,
            tuple(entry["versions"]),
            tuple(entry.get("types", ())),
            tuple(entry.get("choices", ())),
            entry.get("default"),
            bool(entry.get("deepspeed")),
        )
        for name, entry in _facts()["fields"].items()
    }


def versions() -> tuple[str, ...]:
    """The known versions of gpt-neox, oldest first."""
    return tuple(_facts()["versions"])


def deepspeed() -> str:
    """The version of DeepSpeed that the newest one requires."""
    return str(_facts()["deepspeed"])
