"""Versions of training tools that train with other numbers than a configuration says, with ways around and sources.

advisories.json holds them as records of OSV, for people and for other programs. What OSV has no field for stands in
`database_specific`: `condition` has clauses that must all be true of a configuration of the tool; a clause that only
the program can answer stands in `when`, in words; without clauses no configuration shows that it is affected. `cell`
has the features of a run in which `parcompile prove --engine TOOL` shows it, or the `script` of `.ci/pairs/` that
does, on so many `ranks`; `executed` the affected version in which it was red, and the fixed one, if any, in which it
was equal (`docs/historical_pairs.md` has the numbers).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from parcompile.user_files import shipped

DEEPSPEED = "deepspeed"


class Advisory(NamedTuple):
    """One of them. One with a rule of its own has an affected configuration, `wrong`, and one that is not, `right`."""

    id: str
    tool: str
    title: str
    effect: str
    affected: tuple[tuple[str | None, str | None], ...]
    condition: tuple[Mapping[str, Any], ...]
    when: str | None
    avoid: str
    sources: tuple[str, ...]
    wrong: Mapping[str, Any] | None = None
    right: Mapping[str, Any] | None = None
    severity: str = "warning"
    place: str | None = None
    cell: Mapping[str, Any] | None = None
    executed: tuple[str, ...] | None = None

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


@functools.cache
def records() -> tuple[Mapping[str, Any], ...]:
    """The file's records."""
    return tuple(shipped("parcompile.lint.advisories", "advisories.json")["advisories"])


@functools.cache
def advisories() -> tuple[Advisory, ...]:
    """Every advisory, by id."""
    return tuple(sorted(map(_advisory, records()), key=lambda advisory: advisory.id))


def affecting(tool: str, version: str) -> tuple[Advisory, ...]:
    """Those that a version of a tool is subject to."""
    return tuple(entry for entry in advisories() if entry.tool == tool and entry.affects(version))


def _advisory(record: Mapping[str, Any]) -> Advisory:
    given = {"when": None, **record["database_specific"]}
    own: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    events = [stretch["events"] for package in record["affected"] for stretch in package["ranges"]]
    return Advisory(
        id=record["id"],
        title=record["summary"],
        effect=record["details"],
        affected=tuple(_stretch({name: at for event in pair for name, at in event.items()}) for pair in events),
        sources=tuple(reference["url"] for reference in record["references"]),
        **own,
    )


def _stretch(events: Mapping[str, str]) -> tuple[str | None, str | None]:
    first = events["introduced"]
    return None if first == "0" else first, events.get("fixed")


def holds(clause: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
    """Whether a clause is true of a configuration.

    {"path": "a.b", "is": […]}, or "at_least", or "absent": true; "default" is the value of a key that is not there.
    {"any": […]} holds when one of its clauses does, {"not": …} when its clause does not.
    """
    if "any" in clause:
        return any(holds(part, tree) for part in clause["any"])
    if "not" in clause:
        return not holds(clause["not"], tree)
    value = _value(tree, clause["path"], clause.get("default"))
    if "absent" in clause:
        return (value is None) is clause["absent"]
    if "at_least" in clause:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= clause["at_least"]
    lowered = value.lower() if isinstance(value, str) else value
    return any(lowered == (other.lower() if isinstance(other, str) else other) for other in clause["is"])


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
