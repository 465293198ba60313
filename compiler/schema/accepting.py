"""Whether a tree violates nothing of a schema, told without what says which violations there are.

Most files violate nothing, and jsonschema takes half as long to import as all that reads and judges a spec. Keywords
are those of the schema of specs; where a schema has another, or a tree what no JSON file holds, nothing is told, and
jsonschema has to be asked. `tests/compiler/test_schema_fuzz.py` compares the two.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .values import is_type, type_of

Schema = Mapping[str, Any]
_OF_JSON = frozenset((dict, list, str, bool, int, float, type(None)))


def accepted(tree: Any, schema: Schema) -> bool:
    """Whether nothing is violated; False also where that is not told."""
    try:
        return _fits(tree, {key: one for key, one in schema.items() if key != "$id"}, schema)
    except (LookupError, TypeError):
        return False


def _fits(value: Any, schema: Any, root: Schema) -> bool:
    if isinstance(schema, bool):
        return schema
    # Whatever else is violated: `oneOf` and `if` would take a refusal for an answer.
    if type(value) not in _OF_JSON or not schema.keys() <= _KEYWORDS.keys():
        raise LookupError
    kind = type_of(value)
    for keyword, said in schema.items():
        kinds, holds = _KEYWORDS[keyword]
        if (not kinds or kind in kinds) and not holds(value, said, schema, root):
            return False
    return True


def _is(value: Any, other: Any) -> bool:
    if isinstance(other, dict | list):
        raise TypeError  # in them, too, true is not 1
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)  # true is not 1


def _target(said: str, root: Schema) -> Any:
    start, *steps = said.split("/")
    if start != "#":
        raise LookupError
    return functools.reduce(operator.getitem, steps, root)


def _further(value: Any, said: Any, schema: Schema, root: Schema) -> bool:
    return all(_fits(one, said, root) for key, one in value.items() if key not in schema.get("properties", ()))


def _chosen(value: Any, said: Any, schema: Schema, root: Schema) -> bool:
    return _fits(value, schema.get("then" if _fits(value, said, root) else "else", True), root)


_NUMBERS, _TEXT, _LIST, _OBJECT, _ANY = {"integer", "number"}, {"string"}, {"array"}, {"object"}, frozenset[str]()
_SAYS_NOTHING = ("title", "description", "examples", "default", "$schema", "$defs", "$comment", "then", "else")
_KEYWORDS: Mapping[str, tuple[Collection[str], Callable[[Any, Any, Schema, Schema], bool]]] = {
    **dict.fromkeys(_SAYS_NOTHING, (_ANY, lambda *_: True)),
    "type": (_ANY, lambda value, _, schema, __: is_type(value, schema)),
    "enum": (_ANY, lambda value, said, *_: any(_is(value, one) for one in said)),
    "const": (_ANY, lambda value, said, *_: _is(value, said)),
    "minimum": (_NUMBERS, lambda value, said, *_: not value < said),
    "maximum": (_NUMBERS, lambda value, said, *_: not value > said),
    "exclusiveMinimum": (_NUMBERS, lambda value, said, *_: not value <= said),
    "exclusiveMaximum": (_NUMBERS, lambda value, said, *_: not value >= said),
    "minLength": (_TEXT, lambda value, said, *_: len(value) >= said),
    "maxLength": (_TEXT, lambda value, said, *_: len(value) <= said),
    "pattern": (_TEXT, lambda value, said, *_: re.search(said, value) is not None),
    "minItems": (_LIST, lambda value, said, *_: len(value) >= said),
    "maxItems": (_LIST, lambda value, said, *_: len(value) <= said),
    "uniqueItems": (
        _LIST,
        lambda value, said, *_: not said or len({(one, isinstance(one, bool)) for one in value}) == len(value),
    ),
    "items": (_LIST, lambda value, said, _, root: all(_fits(one, said, root) for one in value)),
    "minProperties": (_OBJECT, lambda value, said, *_: len(value) >= said),
    "required": (_OBJECT, lambda value, said, *_: all(key in value for key in said)),
    "properties": (
        _OBJECT,
        lambda value, said, _, root: all(_fits(value[key], one, root) for key, one in said.items() if key in value),
    ),
    "additionalProperties": (_OBJECT, _further),
    "$ref": (_ANY, lambda value, said, _, root: _fits(value, _target(said, root), root)),
    "oneOf": (_ANY, lambda value, said, _, root: sum(_fits(value, one, root) for one in said) == 1),
    "if": (_ANY, _chosen),
}
"""Of each keyword the kinds of values that it speaks of, and whether it holds for a value."""
