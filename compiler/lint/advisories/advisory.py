"""Numerics advisories: which versions of a tool compute something else, under which configuration, and how to avoid it.

advisories.json holds them, for people and for other programs. `affected` lists stretches of versions, [first, first
fixed], null for "from the beginning" and "still". `condition` holds clauses that must all be true of a configuration;
a clause that only the program can answer stands in `when`, in words; without clauses no configuration shows that it is
affected. `cell` has the features of a run in which `parcompile prove --engine TOOL` shows it.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEEPSPEED, MEGATRON = "deepspeed", "megatron"


@dataclass(frozen=True, slots=True)
class Advisory:
    """One of them. `wrong` and `right` are configurations, the first of them affected."""

    id: str
    tool: str
    title: str
    effect: str
    affected: tuple[tuple[str | None, str | None], ...]
    condition: tuple[Mapping[str, Any], ...]
    when: str | None
    avoid: str
    sources: tuple[str, ...]
    wrong: Mapping[str, Any]
    right: Mapping[str, Any]
    severity: str = "warning"
    place: str | None = None
    cell: Mapping[str, Any] | None = None

    def affects(self, version: str) -> bool:
        """Whether a version computes something else."""
        return any(_within(version, *stretch) for stretch in self.affected)

    def matches(self, tree: Mapping[str, Any]) -> bool:
        """Whether a configuration is one of those, as far as it can tell."""
        return bool(self.condition) and all(holds(clause, tree) for clause in self.condition)

    @property
    def versions(self) -> str:
        """The affected versions in words: "from 0.17.6 to before 0.18.3"."""
        return ", ".join(_in_words(*stretch) for stretch in self.affected)

    def as_tree(self) -> dict[str, Any]:
        """The advisory as plain data."""
        return {
            "id": self.id,
            "tool": self.tool,
            "title": self.title,
            "effect": self.effect,
            "affected": [list(stretch) for stretch in self.affected],
            "condition": [dict(clause) for clause in self.condition],
            "when": self.when,
            "avoid": self.avoid,
            "sources": list(self.sources),
            "severity": self.severity,
            "cell": None if self.cell is None else dict(self.cell),
        }


@functools.cache
def advisories() -> tuple[Advisory, ...]:
    """Every advisory, by id."""
    file = importlib.resources.files("parcompile.lint.advisories") / "advisories.json"
    found = [_advisory(entry) for entry in json.loads(file.read_text(encoding="utf-8"))["advisories"]]
    return tuple(sorted(found, key=lambda one: one.id))


def affecting(tool: str, version: str) -> tuple[Advisory, ...]:
    """Those that a version of a tool is subject to."""
    return tuple(one for one in advisories() if one.tool == tool and one.affects(version))


def _advisory(entry: Mapping[str, Any]) -> Advisory:
    return Advisory(
        id=entry["id"],
        tool=entry["tool"],
        title=entry["title"],
        effect=entry["effect"],
        affected=tuple((first, fixed) for first, fixed in entry["affected"]),
        condition=tuple(entry["condition"]),
        when=entry.get("when"),
        avoid=entry["avoid"],
        sources=tuple(entry["sources"]),
        wrong=entry["wrong"],
        right=entry["right"],
        severity=entry.get("severity", "warning"),
        place=entry.get("place"),
        cell=entry.get("cell"),
    )


def holds(clause: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
    """Whether a clause is true of a configuration.

    {"path": "a.b", "is": […]}, or "at_least", or "absent": true; "default" is the value of a key that is not there.
    {"any": […]} holds when one of its clauses does, {"not": …} when its clause does not.
    """
    if "any" in clause:
        return any(holds(one, tree) for one in clause["any"])
    if "not" in clause:
        return not holds(clause["not"], tree)
    value = _value(tree, clause["path"], clause.get("default"))
    if "absent" in clause:
        return (value is None) is clause["absent"]
    if "at_least" in clause:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= clause["at_least"]
    lowered = value.lower() if isinstance(value, str) else value
    return any(lowered == (one.lower() if isinstance(one, str) else one) for one in clause["is"])


def _value(tree: Any, path: str, default: Any) -> Any:
    for step in path.split("."):
        tree = tree.get(step) if isinstance(tree, Mapping) else None
    return default if tree is None else tree


@functools.cache
def _order(version: str) -> tuple[int, ...]:
    digits = [part for part in version.split("+")[0].split(".") if part.isdigit()]
    return tuple(int(part) for part in digits)


@functools.cache
def _within(version: str, first: str | None, fixed: str | None) -> bool:
    given = _order(version)
    return (first is None or _order(first) <= given) and (fixed is None or given < _order(fixed))


def _in_words(first: str | None, fixed: str | None) -> str:
    if first is None and fixed is None:
        return "all versions"
    if fixed is None:
        return f"from {first} on"
    return f"before {fixed}" if first is None else f"from {first} to before {fixed}"
