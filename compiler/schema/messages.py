"""What a violated schema means for the person who wrote the file.

A validator says "is not valid under any of the given schemas"; here the alternative that was meant is found, the key or
value that is wrong in it is named, with what was found and what to write instead; consequences of a mistake stay quiet.

Codes: K001 unknown key · K002 missing key · K003 wrong type · K004 not one of the allowed values · K005 number out of
range · K006 text of the wrong form · K007 wrong number of entries or characters · K008 keys that exclude each other ·
K009 a key that needs another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .alternatives import alternatives, forbidden
from .findings import Findings, named
from .keys import (
    form,
    missing_keys,
    needed_keys,
    not_allowed,
    out_of_range,
    repeated,
    unknown_keys,
    wrong_count,
    wrong_form,
    wrong_type,
)
from .values import quoted
from .view import SchemaView, Violation, about

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

_HANDLERS: dict[str, Callable[[Violation, Findings, SchemaView], None]] = {
    "additionalProperties": unknown_keys,
    "unevaluatedProperties": unknown_keys,
    "required": missing_keys,
    "dependentRequired": needed_keys,
    "type": wrong_type,
    "enum": not_allowed,
    "const": not_allowed,
    "not": forbidden,
    "pattern": wrong_form,
    "format": wrong_form,
    "uniqueItems": repeated,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), out_of_range),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), wrong_count),
}


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
        elif violation.keyword in _HANDLERS:
            _HANDLERS[violation.keyword](violation, findings, view)
        else:
            message = f"{named(path)}: {quoted(violation.instance)} may not stand here"
            findings.say("K008", path, message, about(violation.schema))

    for error in errors:
        follow(Violation.of(error))
