"""Keys that are unknown, missing or needed by another: K001, K002, K009."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity, format_path
from parcompile.diagnostics.diagnostic import closest

from .findings import NOTHING, Findings
from .synonyms import bare, known_key, near_key
from .values import listed, quoted
from .view import SchemaView, Violation, about, example


class Places(Protocol):
    """Where the keys of a kind of file stand, for guesses at misspelt ones."""

    @property
    def name(self) -> str:
        """The kind."""

    @property
    def places(self) -> Sequence[tuple[str, ...]]:
        """The paths of its keys."""


FEW = 12
"""So many names are still worth listing."""


def unknown_keys(violation: Violation, findings: Findings, view: SchemaView) -> None:
    """Every key of an object that its schema does not know."""
    parts = view.parts(violation.schema) if violation.keyword == "unevaluatedProperties" else [violation.schema]
    known = [key for part in parts for key in not_removed(part.get("properties", {}))]
    named = {key for part in parts for key in part.get("properties", {})}
    patterns = [pattern for part in parts for pattern in part.get("patternProperties", {})]
    for key in violation.instance:
        if key not in named and not any(re.search(pattern, key) for pattern in patterns):
            unknown_key((*violation.path, key), known, violation.instance, findings, view)


def not_removed(properties: Mapping[str, Any]) -> list[str]:
    """The keys worth suggesting: a schema also names removed ones, to say what replaced them."""
    return [key for key, entry in properties.items() if not (isinstance(entry, dict) and entry.get("not") == {})]


def unknown_key(
    path: Path,
    known: Collection[str],
    instance: Mapping[str, Any],
    findings: Findings,
    view: Places,
    starts: Sequence[str] = (),
    *,
    consequence: str = "",
    unguessed: Severity = Severity.ERROR,
) -> None:
    """The key at `path` is none of the `known` ones; `starts` are those of which one is needed.

    `consequence` says what the tool does with it, `unguessed` how bad that is when it is near to none of them.
    """
    key, parent = str(path[-1]), path[:-1]
    message = f"unknown key {quoted(key)}" + (f" in {format_path(parent)}" if parent else "") + consequence
    target = _target(key, parent, known, instance, view)
    if target is None:
        findings.say("K001", path, message, _without_guess(known, starts), at_key=True, severity=unguessed)
        return
    findings.meant.add(target)
    findings.unusable.add(target)
    name = str(target[-1])
    if findings.value(target) is not NOTHING:
        advice = f"this is {format_path(target)}, which is given already: remove one of the two"
        related = (Related("given here", target),)
        findings.say("K001", path, message, advice, at_key=True, related=related)
    elif target[:-1] == parent:
        same = bare(name) == bare(key) or known_key(view.name, key) is not None
        safety = Safety.SAFE if same else Safety.CHANGES_NUMERICS
        fixes = (Fix(f"rename {quoted(key)} to {quoted(name)}", safety, (Edit(path, rename_to=name),)),)
        findings.say("K001", path, message, f"did you mean {quoted(name)}?", at_key=True, fixes=fixes)
    else:
        section = format_path(target[:-1])
        place = f"under {quoted(section)}" if section else "at the top level"
        findings.say("K001", path, message, f"write it {place} as {quoted(name)}", at_key=True)


def _without_guess(known: Collection[str], starts: Sequence[str]) -> str:
    if starts:
        return f"write one of {listed(starts)}"
    if not known:
        return "no keys may stand here: remove it"
    return f"known keys are {listed(dict.fromkeys(known))}" if len(known) <= FEW else "remove it"


def _target(key: str, parent: Path, known: Collection[str], instance: Mapping[str, Any], view: Places) -> Path | None:
    """The path that the unknown `key` under `parent` was meant to be."""
    for name in known:
        if bare(name) == bare(key):
            return (*parent, name)
    synonym = known_key(view.name, key)
    if synonym is not None:
        return tuple(synonym.split("."))
    elsewhere = [path for path in view.places if path[-1] == key and path[:-1] != parent]
    if len(elsewhere) == 1 and all(isinstance(step, str) for step in parent):
        return elsewhere[0]
    sibling = closest(key, [name for name in known if name not in instance]) or closest(key, known)
    if sibling is not None:
        return (*parent, sibling)
    near = near_key(view.name, key)
    return None if near is None else tuple(near.split("."))


def missing_keys(violation: Violation, findings: Findings, view: SchemaView) -> None:
    """Every key that an object must have and has not."""
    for key in violation.limit:
        if key not in violation.instance:
            _missing(key, violation, findings, view, "K002", "")


def needed_keys(violation: Violation, findings: Findings, view: SchemaView) -> None:
    """Every key that another key of the object calls for."""
    for key, needed in violation.limit.items():
        for other in needed if key in violation.instance else ():
            if other not in violation.instance:
                _missing(other, violation, findings, view, "K009", f": {quoted(key)} needs it")


def _missing(key: str, violation: Violation, findings: Findings, view: SchemaView, code: str, why: str) -> None:
    where = f" in {format_path(violation.path)}" if violation.path else ""
    entry = view.resolved(violation.schema.get("properties", {}).get(key, {}))
    advice = f"add {quoted(key)}"
    if "const" in entry:
        advice += f": {quoted(entry['const'])}"
    elif (value := example(entry)) is not None:
        advice = f"add it, such as {quoted(key)}: {quoted(value)}"
    if text := about(entry):
        advice += f" ({text})"
    findings.say(code, (*violation.path, key), f"the key {quoted(key)} is missing{where}{why}", advice)
