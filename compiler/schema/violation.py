"""One violated keyword of a schema, with the schema it stands in and the value that violates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parcompile.diagnostics import Path

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError


@dataclass(frozen=True, slots=True)
class Violation:
    """The value `instance` at `path` violates `keyword`, whose value in `schema` is `limit`.

    `depth` is how far the value lies below the one that the enclosing `oneOf` or `anyOf` is about, `alternative` the
    index of the alternative in it, and `context` what is wrong under each alternative when `keyword` is one of those.
    """

    keyword: str
    limit: Any
    path: Path
    instance: Any
    schema: dict[str, Any]
    depth: int
    alternative: int
    is_key: bool
    context: tuple[Violation, ...]

    @classmethod
    def of(cls, error: ValidationError) -> Violation:
        """The validator's error; a schema that is just `false` has the keyword ""."""
        schema_path = list(error.relative_schema_path)
        first = schema_path[0] if schema_path else 0
        return cls(
            keyword=error.validator if isinstance(error.validator, str) else "",
            limit=error.validator_value,
            path=tuple(error.absolute_path),
            instance=error.instance,
            schema=dict(error.schema) if isinstance(error.schema, dict) else {},
            depth=len(error.relative_path),
            alternative=first if isinstance(first, int) else 0,
            is_key="propertyNames" in schema_path and isinstance(error.instance, str),
            context=tuple(cls.of(inner) for inner in error.context or ()),
        )
