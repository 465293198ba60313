"""The options of Megatron-LM's parsers: flags, types, choices and defaults of each, in the versions that have it.

The facts stand in `options.json`, which `.ci/generate/megatron_options.py` writes by asking the parsers themselves.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NVIDIA = "NVIDIA/Megatron-LM"


@dataclass(frozen=True, slots=True)
class Facts:
    """What one parser says of an option. `since` and `until` are places in the versions of its line.

    `kind` is "on" or "off" for flags without a value, "either" for a pair of them (`--x`, `--no-x`), "list" for several
    values, else "value". `type` is that of one value: "int", "float", "str", "bool", or "other".
    """

    since: int
    until: int
    flags: tuple[str, ...]
    dest: str
    kind: str
    type: str
    choices: tuple[Any, ...] | None
    default: Any
    group: str

    @property
    def is_flag(self) -> bool:
        """Whether it stands without a value."""
        return self.kind in ("on", "off", "either")


@dataclass(frozen=True, slots=True)
class Option:
    """An option, by the name of its first long flag with underscores; `facts` are those of one line, oldest first."""

    name: str
    facts: tuple[Facts, ...]

    @property
    def newest(self) -> Facts:
        """What the newest version says that has the option."""
        return self.facts[-1]

    @property
    def default(self) -> Any:
        """Its value when it is not given; False for a flag."""
        newest = self.newest
        return newest.default if newest.kind == "either" or not newest.is_flag else False


@dataclass(frozen=True, eq=False)
class Line:
    """The parsers of one project: its versions, oldest first, and every option that any of them had."""

    name: str
    versions: tuple[str, ...]
    options: Mapping[str, Option]

    @property
    def newest(self) -> int:
        """The place of the newest version."""
        return len(self.versions) - 1

    def has(self, name: str) -> bool:
        """Whether the newest version has the option."""
        return name in self.options and self.options[name].newest.until == self.newest

    @functools.cached_property
    def flags(self) -> tuple[str, ...]:
        """Every flag of any version."""
        facts = (one for option in self.options.values() for one in option.facts)
        return tuple(dict.fromkeys(flag for one in facts for flag in one.flags))

    @functools.cached_property
    def by_flag(self) -> Mapping[str, tuple[str, bool]]:
        """Names and what a flag alone says, by every spelling of it: without dashes in front, with underscores."""
        found: dict[str, tuple[str, bool]] = {}
        for name, option in sorted(self.options.items(), key=lambda one: not self.has(one[0])):
            for facts in reversed(option.facts):
                for flag in facts.flags:
                    spelled = spelling(flag)
                    turns_off = facts.kind == "either" and spelled.startswith("no_") and not name.startswith("no_")
                    found.setdefault(spelled, (name, not turns_off))
        return found

    @functools.cached_property
    def defaults(self) -> Mapping[str, Any]:
        """The value of every option of the newest version that is not given."""
        return {name: option.default for name, option in self.options.items() if self.has(name)}


def spelling(flag: str) -> str:
    """A flag as its name is written here."""
    return flag.lstrip("-").replace("-", "_")


@functools.cache
def _table() -> Mapping[str, Any]:
    text = (importlib.resources.files("parcompile.backends.megatron") / "options.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


@functools.cache
def line(name: str = NVIDIA) -> Line:
    """The parsers of a project.

    Raises:
        KeyError: there are no facts of it.
    """
    table = _table()
    numbers = {one["name"]: number for number, one in enumerate(table["lines"])}
    number = numbers[name]
    options = {
        key: Option(key, tuple(map(_facts, spans[str(number)])))
        for key, spans in table["options"].items()
        if str(number) in spans
    }
    return Line(name, tuple(table["lines"][number]["versions"]), options)


@functools.cache
def lines() -> tuple[str, ...]:
    """The projects of which there are facts."""
    return tuple(one["name"] for one in _table()["lines"])


@functools.cache
def elsewhere() -> Mapping[str, str]:
    """Flags that scripts and forks add to the parser, as names are written here, with where."""
    return {spelling(flag): where for flag, where in _table()["elsewhere"].items()}


def _facts(row: list[Any]) -> Facts:
    since, until, flags, dest, kind, type_, choices, default, group = row
    return Facts(
        since, until, tuple(flags), dest, kind, type_, None if choices is None else tuple(choices), default, group
    )
