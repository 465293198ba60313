"""Values of a wrong type, not among the allowed ones, out of range, of the wrong form or number: K003 to K007."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parcompile.diagnostics import Edit, Fix, Path, Safety
from parcompile.diagnostics.diagnostic import closest

from .findings import NOTHING, Findings, named
from .keys import FEW
from .synonyms import bare, is_exact, known_value
from .values import as_number, as_truth, describe_expected, describe_found, fitting, is_type, listed, quoted
from .view import SchemaView, Violation, about, example

Schemas = Sequence[dict[str, Any]]

_RANGES = {
    "minimum": ("is too small", "write at least {0}"),
    "maximum": ("is too large", "write at most {0}"),
    "exclusiveMinimum": ("is too small: it must be above {0}", "write more than {0}"),
    "exclusiveMaximum": ("is too large: it must be below {0}", "write less than {0}"),
    "multipleOf": ("is not a multiple of {0}", "write a multiple of {0}"),
}
_UNITS = {"Length": ("character", "characters"), "Items": ("entry", "entries"), "Properties": ("key", "keys")}


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


def not_allowed(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K004 of one schema."""
    allowed = violation.limit if violation.keyword == "enum" else [violation.limit]
    choice(violation.path, violation.instance, allowed, [violation.schema], findings)


MANY = 24
"""Values that are listed where none is near."""


def choice(
    path: Path, value: object, allowed: Sequence[object], schemas: Schemas, findings: Findings, other: str = ""
) -> None:
    """K004: `value` is none of the `allowed` ones; `other` describes what else may be written."""
    near, safety = _near(value, [one for one in allowed if isinstance(one, str)])
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
    some = ", ".join(str(one) for one in allowed[:MANY]) + (f" and {len(allowed) - MANY} more" * (len(allowed) > MANY))
    findings.say("K004", path, message, f"write {' or '.join(alternatives) or f'one of {some}'}")


def _near(value: object, allowed: Sequence[str]) -> tuple[str | None, Safety]:
    """The allowed text that `value` misspells or that another tool calls so, and how sure that is."""
    if not isinstance(value, str):
        return None, Safety.SAFE
    same = next((one for one in allowed if bare(one) == bare(value)), None)
    if same is not None:
        return same, Safety.SAFE
    known = known_value(value)
    if known in allowed:
        return known, Safety.SAFE if is_exact(value) else Safety.CHANGES_COST
    return closest(value, allowed), Safety.CHANGES_NUMERICS


def out_of_range(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K005."""
    problem, advice = _RANGES[violation.keyword]
    limit = quoted(violation.limit)
    message = f"{named(violation.path)}: {quoted(violation.instance)} {problem.format(limit)}"
    findings.say("K005", violation.path, message, advice.format(limit))


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


def repeated(violation: Violation, findings: Findings, view: SchemaView | None = None) -> None:  # noqa: ARG001
    """K007: an entry is listed twice; the place is that of the second."""
    entries = violation.instance
    for index, entry in enumerate(entries):
        if entry in entries[:index]:
            message = f"{named(violation.path)}: {quoted(entry)} is listed twice"
            findings.say("K007", (*violation.path, index), message, "remove one of the two")
            return
    findings.say("K007", violation.path, f"{named(violation.path)}: an entry is listed twice", "remove one of the two")
