"""What a violated schema means for the person who wrote the file; which of its alternatives was meant.

A validator says "is not valid under any of the given schemas"; here the alternative that was meant is found, the key or
value that is wrong in it is named, with what was found and what to write instead; consequences of a mistake stay quiet.

Codes: K001 unknown key · K002 missing key · K003 wrong type · K004 not one of the allowed values · K005 number out of
range · K006 text of the wrong form · K007 wrong number of entries or characters · K008 keys that exclude each other ·
K009 a key that needs another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parcompile.diagnostics import Path, Related, closest

from .keys import HANDLERS, choice, form, handles, known_key, mismatch, unknown_key
from .values import (
    Findings,
    SchemaView,
    Violation,
    about,
    as_number,
    describe_expected,
    fitting,
    is_type,
    listed,
    named,
    quoted,
    types_of,
)

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

Follow = Callable[[Violation], None]
_CLOSED = ("additionalProperties", "unevaluatedProperties")


@dataclass(frozen=True, slots=True)
class _Branch:
    """One alternative and what is wrong with the value under it."""

    index: int
    schema: dict[str, Any]
    violations: list[Violation]
    instance: object

    @property
    def known(self) -> dict[str, Any]:
        """The keys that an object of this alternative may have."""
        properties: dict[str, Any] = self.schema.get("properties", {})
        return properties

    @property
    def required(self) -> list[str]:
        """The keys that it must have."""
        return list(self.schema.get("required", []))

    @property
    def allowed(self) -> list[object]:
        """The values that it enumerates."""
        return [self.schema["const"]] if "const" in self.schema else list(self.schema.get("enum", []))

    @property
    def refused(self) -> bool:
        """Whether the value as a whole has the wrong type, or is not one of the enumerated ones."""
        return any(one.depth == 0 and one.keyword in ("type", "const", "enum") for one in self.violations)

    @property
    def contradicted(self) -> int:
        """How many keys that tell alternatives apart, because their values are fixed, have another value here."""
        fixed = [one for one in self.violations if one.depth == 1 and not one.is_key]
        return sum(one.keyword == "const" or (one.keyword == "enum" and len(one.limit) == 1) for one in fixed)


def alternatives(violation: Violation, findings: Findings, view: SchemaView, follow: Follow) -> None:
    """Says what is wrong under the alternative that was meant; `follow` says one violation."""
    path, value = violation.path, violation.instance
    if not violation.context:
        starts = [view.resolved(schema).get("required", [""])[0] for schema in violation.limit]
        given = [key for key in starts if isinstance(value, dict) and key in value]
        if len(given) > 1:
            _exclude(path, given, findings)
            return
        message = f"{named(path)}: fits several alternatives that exclude each other"
        findings.say("K008", path, message, about(violation.schema))
        return
    branches = [
        _Branch(index, view.resolved(schema), [one for one in violation.context if one.alternative == index], value)
        for index, schema in enumerate(violation.limit)
    ]
    if all(one.keyword == "required" and one.depth == 0 for one in violation.context):
        starts = list(dict.fromkeys(key for one in branches for key in one.required if key not in value))
        unknown = [key for key in value if key not in violation.schema.get("properties", {})]
        if any(closest(key, starts) for key in unknown):
            findings.unusable.add(path)  # a misspelt key, which is said as such
            return
        findings.say("K002", path, f"{named(path)} needs one of the keys {listed(starts)}", "add one of them")
        return
    branch = _meant(branches, value, view)
    if branch is None and isinstance(value, dict) and any(not one.refused for one in branches):
        _no_start(violation, branches, findings, view)
    elif branch is None:
        _none_fits(violation, branches, findings, view)
    elif not (isinstance(value, dict) and _excluded(violation, branch, branches, findings, follow)):
        for inner in branch.violations:
            follow(inner)


def _meant(branches: Sequence[_Branch], value: object, view: SchemaView) -> _Branch | None:
    """The alternative that `value` is nearest to; None when it is near to none."""
    candidates = [branch for branch in branches if not branch.refused]
    if not candidates:
        return None
    if not isinstance(value, dict):
        return min(candidates, key=lambda branch: (len(branch.violations), branch.index))

    def nearness(branch: _Branch) -> tuple[int, int, int, int, int, int]:
        own = sum(key in branch.known for key in value)
        guessed = sum(key not in branch.known and _guess(key, branch, view) for key in value)
        missing = sum(key not in value for key in branch.required)
        unknown = len(value) - own
        return (
            branch.contradicted,
            -own - guessed,
            missing - guessed,
            unknown - guessed,
            len(branch.violations),
            branch.index,
        )

    best = min(candidates, key=nearness)
    return None if best.known and not nearness(best)[1] else best


def _guess(key: str, branch: _Branch, view: SchemaView) -> bool:
    synonym = known_key(view.name, key)
    if synonym is not None and synonym.rsplit(".", 1)[-1] in branch.known:
        return True
    return closest(key, branch.known) is not None


def _none_fits(violation: Violation, branches: Sequence[_Branch], findings: Findings, view: SchemaView) -> None:
    """The value as a whole is nothing that any alternative takes."""
    path, value = violation.path, violation.instance
    schemas = [branch.schema for branch in branches]
    allowed = [one for branch in branches for one in branch.allowed]
    number = as_number(value)
    if isinstance(value, str) and any(isinstance(one, str) for one in allowed):
        if number is None or not any(fitting(number, schema) for schema in schemas):
            others = " or ".join(describe_expected(branch.schema) for branch in branches if not branch.allowed)
            choice(path, value, allowed, schemas, findings, others)
            return
    elif not isinstance(value, (dict, list)) and value is not None:
        for branch in branches:
            # A bare value where an object with one key is meant: "llama-3-8b" for {"preset": "llama-3-8b"}.
            if len(branch.required) == 1 and is_type(value, view.resolved(branch.known.get(branch.required[0]))):
                advice = f"write {quoted({branch.required[0]: value})}"
                mismatch(path, value, [branch.schema], findings, advice)
                return
    mismatch(path, value, [schema for schema in schemas if types_of(schema)] or schemas, findings)


def _no_start(violation: Violation, branches: Sequence[_Branch], findings: Findings, view: SchemaView) -> None:
    """An object that begins none of the alternatives: say how each starts."""
    path, value = violation.path, violation.instance
    starts = list(dict.fromkeys(branch.required[0] for branch in branches if branch.required))
    known = list(dict.fromkeys(name for branch in branches for name in branch.known))
    for key in value:
        unknown_key((*path, key), known, value, findings, view, starts)
    if not value:
        findings.say("K002", path, f"{named(path)} needs one of the keys {listed(starts)}", "add one of them")
    findings.unusable.add(path)


def _excluded(
    violation: Violation, branch: _Branch, branches: Sequence[_Branch], findings: Findings, follow: Follow
) -> bool:
    """Whether keys of several alternatives stand side by side."""
    path, value = violation.path, violation.instance
    others = {key for other in branches for key in other.known} - set(branch.known)
    foreign = [key for key in value if key in others]
    own = [key for key in value if key in branch.known]
    if not foreign or not own or any(key in violation.schema.get("properties", {}) for key in foreign):
        return False
    message = f"{named(path)}: {quoted(own[0])} and {listed(foreign)} exclude each other"
    related = (Related("the other one", (*path, own[0])),)
    schemas = {key: schema for one in (*branches, branch) for key, schema in one.known.items()}
    notes = [schemas[key]["$comment"] for key in (own[0], *foreign) if "$comment" in schemas[key]]
    advice = "; ".join([f"keep {quoted(own[0])} or {listed(foreign)}", *notes])
    findings.say("K008", (*path, foreign[0]), message, advice, at_key=True, related=related)
    findings.unusable.add(path)
    for inner in branch.violations:
        if inner.keyword not in (*_CLOSED, "required"):
            follow(inner)
    return True


def _exclude(path: Path, keys: Sequence[str], findings: Findings) -> None:
    related = tuple(Related("and this", (*path, key)) for key in keys[:-1])
    message = f"{' and '.join(quoted(key) for key in keys)} exclude each other"
    findings.say("K008", (*path, keys[-1]), message, f"keep {listed(keys)}", at_key=True, related=related)


@handles("not")
def forbidden(violation: Violation, findings: Findings, view: SchemaView) -> None:  # noqa: ARG001
    """`not`: keys that exclude each other, or a value that is ruled out."""
    path = violation.path
    keys = violation.limit.get("required", []) if isinstance(violation.limit, dict) else []
    if len(keys) > 1 and isinstance(violation.instance, dict):
        _exclude(path, keys, findings)
        return
    if len(keys) == 1 and isinstance(violation.instance, dict):
        message = f"{quoted(keys[0])} may not stand here"
        findings.say("K008", (*path, keys[0]), message, about(violation.schema), at_key=True)
        return
    if violation.limit == {}:
        # The schema names a key only to say what became of it.
        message = f"{quoted(path[-1]) if path else 'this'} may not stand here"
        findings.say("K008", path, message, about(violation.schema), at_key=True)
        return
    message = f"{named(path)}: {quoted(violation.instance)} is not allowed"
    findings.say("K008", path, message, about(violation.schema))


def explain(errors: Iterable[ValidationError], findings: Findings, view: SchemaView) -> None:
    """Says each error of a validator once."""

    def follow(violation: Violation) -> None:
        path = violation.path
        if violation.is_key:
            key = violation.instance
            message = f"{quoted(key)} cannot be a key here"
            findings.say("K001", (*path, key), message, form(violation.schema), at_key=True)
        elif violation.keyword in ("oneOf", "anyOf"):
            alternatives(violation, findings, view, follow)
        elif violation.keyword in HANDLERS:
            HANDLERS[violation.keyword](violation, findings, view)
        else:
            message = f"{named(path)}: {quoted(violation.instance)} may not stand here"
            findings.say("K008", path, message, about(violation.schema))

    for error in errors:
        follow(Violation.of(error))
