"""Keys that are unknown, missing or needed by another, and values that a schema does not take: K001 to K007, K009."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from parcompile.diagnostics import Edit, Fix, Path, Related, Safety, Severity, closest, format_path
from parcompile.units import first_of
from parcompile.user_files import shipped

from .values import (
    NOTHING,
    WORDS,
    Findings,
    SchemaView,
    Violation,
    about,
    as_number,
    as_truth,
    describe_expected,
    describe_found,
    example,
    fitting,
    is_type,
    listed,
    named,
    quoted,
)

# What other tools call keys and values: Megatron-LM, DeepSpeed, Transformers, vLLM, torchtitan, nanotron and gpt-neox.
# A user who brings a name from there is told the name here. Names are compared without case, `-` and `_`.


@functools.lru_cache(maxsize=4096)
def bare(name: str) -> str:
    """`name` without case and separators, for comparing."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


@functools.cache
def _names(*tables: str) -> Mapping[str, str]:
    """The names here by the bare names of other tools, in tables of `synonyms.json`."""
    stored = shipped("parcompile.schema", "synonyms.json")
    return {bare(other): name for table in tables for name, others in stored.get(table, {}).items() for other in others}


def known_key(schema: str, key: str) -> str | None:
    """The dotted path that another tool's `key` has under `schema`."""
    return _names(schema).get(bare(key))


@functools.cache
def _elsewhere(schema: str) -> Mapping[str, str]:
    """What to use in place of keys that no file of a schema has, by their bare names."""
    stored = shipped("parcompile.schema", "elsewhere.json").get(schema, {})
    return {bare(name): advice for advice, names in stored.items() for name in names}


Handler = Callable[[Violation, Findings, SchemaView], None]
Handles = TypeVar("Handles", bound=Handler)
HANDLERS: dict[str, Handler] = {}
"""What says a violation, by the violated keyword."""


def handles(*keywords: str) -> Callable[[Handles], Handles]:
    """Registers the decorated function for these keywords."""

    def register(handler: Handles) -> Handles:
        HANDLERS.update(dict.fromkeys(keywords, handler))
        return handler

    return register


# What is wrong with a key.


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


@handles("additionalProperties", "unevaluatedProperties")
def unknown_keys(violation: Violation, findings: Findings, view: SchemaView) -> None:
    """Every key of an object that its schema does not know."""
    parts = view.parts(violation.schema) if violation.keyword == "unevaluatedProperties" else [violation.schema]
    named = [pair for part in parts for pair in part.get("properties", {}).items()]
    # A schema also names removed keys, to say what replaced them: they are not worth suggesting.
    known = [key for key, entry in named if not (isinstance(entry, dict) and entry.get("not") == {})]
    patterns = [pattern for part in parts for pattern in part.get("patternProperties", {})]
    for key in violation.instance:
        if key not in dict(named) and not any(re.search(pattern, key) for pattern in patterns):
            unknown_key((*violation.path, key), known, violation.instance, findings, view)


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
    advice = None if parent == ("parallelism",) else _elsewhere(view.name).get(bare(key))  # its "data" is an axis
    target = None if advice else _target(key, parent, known, instance, view)
    if target is None:
        advice = advice or _without_guess(known, starts)
        findings.say("K001", path, message, advice, at_key=True, severity=unguessed)
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
    elsewhere = [path for path in view.places if path[-1] == key and path not in (parent, (*parent, key))]
    if len(elsewhere) == 1 and all(isinstance(step, str) for step in parent):
        return elsewhere[0]
    sibling = closest(key, [name for name in known if name not in instance]) or closest(key, known)
    if sibling is not None:
        return (*parent, sibling)
    longer = [name for name in known if name not in instance and name.endswith(f"_{key}")]
    if len(longer) == 1:
        return (*parent, *longer)
    near = closest(key, _names(view.name))
    target = () if near is None else tuple(_names(view.name)[near].split("."))
    other_section = parent and (target[:1] != parent[:1] or target == parent)
    return None if other_section else target or None


@handles("required")
def missing_keys(violation: Violation, findings: Findings, view: SchemaView) -> None:
    """Every key that an object must have and has not."""
    for key in violation.limit:
        if key not in violation.instance:
            _missing(key, violation, findings, view, "K002", "")


@handles("dependentRequired")
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


Schemas = Sequence[dict[str, Any]]

_RANGES: Mapping[str, Sequence[str]] = WORDS["ranges"]
_UNITS: Mapping[str, Sequence[str]] = WORDS["units"]


@handles("type")
def wrong_type(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K003 of one schema."""
    mismatch(violation.path, violation.instance, [violation.schema], findings)


def mismatch(path: Path, value: object, schemas: Schemas, findings: Findings, advice: str | None = None) -> None:
    """K003: `value` has no type that any of `schemas` takes. `advice` replaces what the schemas suggest."""
    expected = " or ".join(dict.fromkeys(describe_expected(schema) for schema in schemas))
    better: object = NOTHING
    if advice is None:
        advice, better = _conversion(value, schemas)
    fixes: tuple[Fix, ...] = ()
    if better is not NOTHING:
        fixes = (Fix(f"write {quoted(better)}", Safety.SAFE, (Edit(path, better),)),)
    message = f"{named(path)}: expected {expected}, found {describe_found(value)}"
    findings.say("K003", path, message, advice, fixes=fixes)


def _conversion(value: object, schemas: Schemas) -> tuple[str | None, object]:
    """What to write instead of a value of the wrong type, and that value when nothing else can be meant."""
    for schema in schemas:
        for meant in _meant(value):
            if fitting(meant, schema):
                quotes = " without quotes" if isinstance(value, str) else ""
                return f"write {quoted(meant)}{quotes}", meant
        if isinstance(value, float) and is_type(1, schema) and abs(value) < 2**53:
            return f"write {int(value)} or {int(value) + (1 if value > 0 else -1)}", NOTHING
        if value is None and "default" in schema:
            return f"remove the key: the default is {quoted(schema['default'])}", NOTHING
        items = schema.get("items")
        if (
            is_type([], schema)
            and schema.get("minItems", 1) <= 1
            and not isinstance(value, list)
            and is_type(value, items)
        ):
            return f"write {quoted([value])}", NOTHING
        if isinstance(value, list) and len(value) == 1 and fitting(value[0], schema):
            return f"write {quoted(value[0])} without the brackets", NOTHING
    examples = [found for schema in schemas if (found := example(schema)) is not None]
    return (f"write it like {quoted(examples[0])}" if examples else None), NOTHING


def _meant(value: object) -> list[object]:
    """What `value` spells in another type: 8 for "8", true for "yes", "8" for 8."""
    if isinstance(value, str):
        return [meant for meant in (as_number(value), as_truth(value)) if meant is not None]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    return [str(value), *([bool(value)] if value in (0, 1) else [])]


@handles("enum", "const")
def not_allowed(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K004 of one schema."""
    allowed = violation.limit if violation.keyword == "enum" else [violation.limit]
    other = _OTHER_TYPES if violation.path == ("model", "model_type") else ""
    choice(violation.path, violation.instance, allowed, [violation.schema], findings, other)


_OTHER_TYPES = '"hf_config": PATH of its config.json, which takes all types that work (`parcompile models`)'
"""What a spec's model has in place of a type that it cannot write itself."""


def refused_optimizer(kind: str) -> str | None:
    """Why a spec does not have an optimizer of another tool, by the first known part of its bare name; or None."""
    refused: Mapping[str, str] = shipped("parcompile.schema", "refused_optimizers.json")
    return next((why for part, why in refused.items() if part in bare(kind)), None)


MANY = 24
"""Values that are listed where none is near."""


def choice(
    path: Path, value: object, allowed: Sequence[object], schemas: Schemas, findings: Findings, other: str = ""
) -> None:
    """K004: `value` is none of the `allowed` ones; `other` describes what else may be written."""
    near, safety = _near(value, [one for one in allowed if isinstance(one, str)])
    is_optimizer = path == ("training", "optimizer", "type") and isinstance(value, str)
    refused = refused_optimizer(str(value)) if is_optimizer and near != bare(str(value)) else None
    near = None if refused else near
    if near is None and any(meant == one and type(meant) is type(one) for meant in _meant(value) for one in allowed):
        # "1" for 1: the value is right, its type is not.
        mismatch(path, value, schemas, findings)
        return
    rest = [one for one in allowed if one != near]
    alternatives = [listed(rest)] if 0 < len(rest) <= FEW else []
    alternatives += [other] if other else []
    message = f"{named(path)}: {quoted(value)} is not allowed"
    if near is not None:
        fixes = (Fix(f"write {quoted(near)}", safety, (Edit(path, near),)),)
        advice = f"did you mean {quoted(near)}?" + (f" (or {' or '.join(alternatives)})" if alternatives else "")
        findings.say("K004", path, message, advice, fixes=fixes)
        return
    if not any(type(one) is type(value) for one in allowed) and len(allowed) <= FEW:
        message = f"{named(path)}: expected {' or '.join(alternatives)}, found {describe_found(value)}"
    message += f": {refused}" if refused else ""
    findings.say("K004", path, message, f"write {' or '.join(alternatives) or f'one of {first_of(allowed, MANY)}'}")


def _near(value: object, allowed: Sequence[str]) -> tuple[str | None, Safety]:
    """The allowed text that `value` misspells or that another tool calls so, and how sure that is."""
    if not isinstance(value, str):
        return None, Safety.SAFE
    same = next((one for one in allowed if bare(one) == bare(value)), None)
    if same is not None:
        return same, Safety.SAFE
    known = _names("values", "guesses").get(bare(value))
    if known in allowed:
        # A guess: "h100" may be an SXM or a PCIe card.
        return known, Safety.SAFE if bare(value) in _names("values") else Safety.CHANGES_COST
    return closest(value, allowed), Safety.CHANGES_NUMERICS


@handles(*_RANGES)
def out_of_range(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K005."""
    problem, advice = _RANGES[violation.keyword]
    limit = quoted(violation.limit)
    message = f"{named(violation.path)}: {quoted(violation.instance)} {problem.format(limit)}"
    findings.say("K005", violation.path, message, advice.format(limit))


@handles("pattern", "format")
def wrong_form(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K006."""
    message = f"{named(violation.path)}: {quoted(violation.instance)} is not of the expected form"
    findings.say("K006", violation.path, message, form(violation.schema))


def form(schema: dict[str, Any]) -> str | None:
    """What a text should look like."""
    text, shown = about(schema), example(schema)
    if shown is not None:
        return f"write it like {quoted(shown)}" + (f" ({text})" if text else "")
    return text or (f"it must match {schema['pattern']}" if "pattern" in schema else None)


@handles(*(side + unit for side in ("min", "max") for unit in _UNITS))
def wrong_count(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K007: too few or too many characters, entries or keys."""
    side, unit = violation.keyword[:3], violation.keyword[3:]
    count, limit, schema = len(violation.instance), violation.limit, violation.schema
    exact = schema.get("min" + unit) == schema.get("max" + unit)
    needed = f"{'exactly' if exact else 'at least' if side == 'min' else 'at most'} {limit}"
    found = f"{count} {_UNITS[unit][count != 1]}"
    message = f"{named(violation.path)}: {found}, but {needed} {'is' if limit == 1 else 'are'} needed"
    shown = example(schema)
    findings.say(
        "K007", violation.path, message, f"write it like {quoted(shown)}" if shown is not None else f"write {needed}"
    )


@handles("uniqueItems")
def repeated(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K007: an entry is listed twice; the place is that of the second."""
    entries = violation.instance
    for index, entry in enumerate(entries):
        if entry in entries[:index]:
            message = f"{named(violation.path)}: {quoted(entry)} is listed twice"
            findings.say("K007", (*violation.path, index), message, "remove one of the two")
            return
    findings.say("K007", violation.path, f"{named(violation.path)}: an entry is listed twice", "remove one of the two")
