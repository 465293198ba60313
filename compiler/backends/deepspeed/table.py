"""The keys of DeepSpeed's configuration by version, as a tree, as JSON Schema and in words.

A section knows its keys under every name that DeepSpeed takes: alias and field name. A strict one is a pydantic class,
which refuses what it does not know; from the others DeepSpeed takes what it knows and never looks at the rest.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parcompile.schema import load
from parcompile.user_files import shipped

# Versions of DeepSpeed: those whose configuration is known, and the one that a version given by a user means.

_NUMBER = re.compile(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?")


class UnknownVersionError(ValueError):
    """A text that is no version of DeepSpeed, or one before the first that is known."""


@functools.cache
def facts() -> dict[str, Any]:
    """keys.json: what each version reads from its configuration. To be read only."""
    tree = shipped("parcompile.backends.deepspeed", "keys.json")
    assert isinstance(tree, dict)
    return tree


@functools.cache
def known() -> tuple[str, ...]:
    """The versions whose configuration is known, oldest first."""
    return tuple(facts()["versions"])


def newest() -> str:
    """The newest of them."""
    return known()[-1]


@functools.cache
def order(version: str) -> tuple[int, int, int]:
    """A version as numbers, to compare: "0.16" is 0.16.0.

    Raises:
        UnknownVersionError: it is no version.
    """
    match = _NUMBER.match(version.strip())
    if match is None:
        raise UnknownVersionError(f"{version!r} is no version of DeepSpeed: write it like {newest()}")
    major, minor, patch = (int(part or 0) for part in match.groups())
    return major, minor, patch


def nearest(version: str) -> str:
    """The known version that a given one behaves like: the last one that is not newer.

    "0.16" is the last of 0.16, and what is newer than the newest is taken for the newest.

    Raises:
        UnknownVersionError: it is no version, or older than the first known one.
    """
    given = order(version)
    whole = version.strip().lstrip("v").count(".") >= 2
    found = [one for one in known() if (order(one) <= given if whole else order(one)[:2] <= given[:2])]
    if not found:
        raise UnknownVersionError(f"DeepSpeed {version} is older than {known()[0]}, the first version that is known")
    return found[-1]


def at(entry: Any, version: str) -> Any:
    """The value of an entry of keys.json in a known version; None where there is none."""
    if not _changes(entry):
        return entry
    value = None
    for first, one in entry:
        if order(first) > order(version):
            break
        value = one
    return value


def _changes(entry: Any) -> bool:
    """Whether an entry is a list of [first version, value]."""
    return isinstance(entry, list) and bool(entry) and isinstance(entry[0], list)


def since(entry: Any) -> str | None:
    """The first version that has an entry, None when the first known one has it already."""
    return str(entry[0][0]) if _changes(entry) and entry[0][0] != known()[0] else None


def ended(entry: Any) -> str | None:
    """The first version that has an entry no more, or refuses its key; None when the newest has it."""
    if not _changes(entry):
        return None
    gone = [first for first, value in entry if value is None or value.get("refused")]
    last = entry[-1][1]
    return str(gone[-1]) if gone and (last is None or last.get("refused")) else None


# The keys of DeepSpeed's configuration in one version, as a tree to walk through.

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


# The facts of keys.json as JSON Schema: for the published schema, and for what messages say of a value.

_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "path": "string",
    "list": "array",
    "dict": "object",
    "section": "object",
    "none": "null",
}
BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("minimum", operator.ge),
    "gt": ("exclusiveMinimum", operator.gt),
    "le": ("maximum", operator.le),
    "lt": ("exclusiveMaximum", operator.lt),
}


def broken(value: float, facts: Mapping[str, Any]) -> Iterator[str]:
    """The bounds of a key that a number does not keep."""
    return (name for name, (_, holds) in BOUNDS.items() if name in facts and not holds(value, facts[name]))


def as_schema(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one value, without what is in a section; {} takes everything."""
    kind = facts.get("type", "any")
    if kind == "union":
        parts = [as_schema(part) for part in facts["of"]]
        return {"anyOf": [*parts, {"type": "null"}] if facts.get("null") else parts}
    if kind == "choice":
        return {"enum": [*facts["in"], *([None] if facts.get("null") else [])]}
    if kind == "class":
        return {"not": {}}
    schema: dict[str, Any] = {}
    if kind in _TYPES:
        null = facts.get("null") and kind != "none"
        schema["type"] = [_TYPES[kind], "null"] if null else _TYPES[kind]
    schema.update({keyword: facts[name] for name, (keyword, _) in BOUNDS.items() if name in facts})
    if "of" in facts:
        schema["items"] = as_schema(facts["of"])
    if "length" in facts:
        schema.update(minItems=facts["length"], maxItems=facts["length"])
    if "least" in facts:
        schema["minItems"] = facts["least"]
    return schema


# What the published schema says of a key in words: its example, and what to write instead of a removed one.

OPEN = frozenset({"datastates_ckpt"})
"""Sections whose keys belong to somebody else."""


@functools.cache
def _entry(path: str) -> dict[str, Any]:
    node: dict[str, Any] = load("ds_config")
    for step in path.split("."):
        for part in (node, *node.get("anyOf", ())):
            inner = part.get("properties", {}).get(step)
            if step == "*":
                inner = part.get("additionalProperties")
            elif step == "[]":
                inner = part.get("items")
            if isinstance(inner, dict):
                node = inner
                break
        else:
            return {}
    return node


def example(path: str) -> dict[str, Any]:
    """{"examples": […]} of a key; {} when there is none."""
    examples = _entry(path).get("examples")
    return {"examples": examples} if examples else {}


def instead(path: str) -> str | None:
    """What became of a removed key, as advice."""
    entry = _entry(path)
    text = entry.get("description") if entry.get("not") == {} else None
    return str(text).rstrip(".") if text else None
