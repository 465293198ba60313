"""The keys of DeepSpeed's configuration in one version, as a tree to walk through.

A section knows its keys under every name that DeepSpeed takes: alias and field name. A strict one is a pydantic class,
which refuses what it does not know; from the others DeepSpeed takes what it knows and never looks at the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .versions import at, facts

ANY, ENTRY = "*", "[]"
"""Steps of a path in keys.json: every key of a section, every entry of a list."""


@dataclass(slots=True)
class Key:
    """A key: its dotted path, its facts in this version, and the keys in it by every name they have."""

    path: str
    facts: Mapping[str, Any]
    keys: dict[str, Key] = field(default_factory=dict)
    name: str = field(init=False)
    """Its name in a file, as the documentation has it."""

    def __post_init__(self) -> None:
        self.name = self.path.rpartition(".")[2]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that DeepSpeed takes for it."""
        other = self.facts.get("field")
        return (self.name, other) if other else (self.name,)

    @property
    def is_section(self) -> bool:
        """Whether it holds keys that are known."""
        return bool(self.keys)

    @property
    def strict(self) -> bool:
        """Whether DeepSpeed refuses keys in it that it does not know."""
        return bool(self.facts.get("strict"))

    @property
    def loose(self) -> bool:
        """Whether DeepSpeed takes its value without a look."""
        return bool(self.facts.get("loose"))

    @property
    def refused(self) -> bool:
        """Whether DeepSpeed only knows it to say that it is gone."""
        return bool(self.facts.get("refused"))

    @property
    def deprecated(self) -> Mapping[str, Any] | None:
        """What a deprecated key means: `to`, the key it stands for; None for a key of today."""
        found = self.facts.get("deprecated")
        return found if isinstance(found, Mapping) else None

    @property
    def default(self) -> Any:
        """DeepSpeed's default, None also where it has none."""
        return self.facts.get("default")

    @property
    def known(self) -> list[str]:
        """The names worth suggesting in it: those of the documentation, without what is gone or deprecated."""
        return [
            name
            for name, key in self.keys.items()
            if name not in (ANY, ENTRY) and name == key.name and not key.refused and not key.deprecated
        ]

    def walk(self) -> Iterator[Key]:
        """Every key in it, at every depth, each once."""
        for name, key in self.keys.items():
            if name == key.name:
                yield key
                yield from key.walk()


@functools.cache
def table(version: str) -> Key:
    """The whole configuration in a known version."""
    root = Key("", {"type": "section"})
    by_path = {"": root}
    entries = facts()["keys"]
    for path in sorted(entries, key=lambda path: path.count(".")):
        found = at(entries[path], version)
        parent = by_path.get(path.rpartition(".")[0])
        if found is None or parent is None:
            continue
        key = by_path[path] = Key(path, found)
        for name in key.names:
            parent.keys[name] = key
    return root


def find(version: str, *path: str | int) -> Key | None:
    """The key at a path of a file, by any of its names; None when that version has none there."""
    key = table(version)
    for step in path:
        name = ENTRY if isinstance(step, int) else step
        found = key.keys.get(name) or key.keys.get(ANY)
        if found is None:
            return None
        key = found
    return key


@functools.cache
def classes(version: str) -> Mapping[str, Mapping[str, Any]]:
    """What the constructors of optimizers and schedules take in a known version, by the name of the class."""
    found = {name: at(entry, version) for name, entry in facts()["classes"].items()}
    return {name: entry for name, entry in found.items() if entry is not None}
