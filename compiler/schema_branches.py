"""Which alternative of a `oneOf` or `anyOf` the user meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .schema_values import is_type, types_of
from .suggest import closest
from .synonyms import known_key

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError


@dataclass(frozen=True, slots=True)
class Branch:
    """One alternative and what is wrong with the value under it."""

    index: int
    schema: dict[str, Any]
    errors: list[ValidationError]
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
        if "const" in self.schema:
            return [self.schema["const"]]
        return list(self.schema.get("enum", []))

    @property
    def refuses_type(self) -> bool:
        """Whether the value as a whole has the wrong type, or is not one of the enumerated ones."""
        return any(error.validator in ("type", "const", "enum") and not error.relative_path for error in self.errors)

    @property
    def takes_type(self) -> bool:
        """Whether values of this type can be meant for this alternative."""
        return not types_of(self.schema) or is_type(self.instance, self.schema)

    @property
    def contradicted(self) -> int:
        """How many keys that tell alternatives apart (their values are fixed) have another value here."""
        return sum(
            1
            for error in self.errors
            if len(error.relative_path) == 1
            and (error.validator == "const" or (error.validator == "enum" and len(error.validator_value) == 1))
        )


def branches_of(error: ValidationError, resolve: Callable[[Any], dict[str, Any]]) -> list[Branch]:
    """The alternatives of a failed `oneOf` or `anyOf`, each with its own errors."""
    return [
        Branch(
            index,
            resolve(schema),
            [inner for inner in error.context or () if inner.relative_schema_path[0] == index],
            error.instance,
        )
        for index, schema in enumerate(error.validator_value)
    ]


def chosen(branches: Sequence[Branch], value: object, schema_name: str) -> Branch | None:
    """The alternative that `value` is nearest to; None when it is near to none (an object without a telling key)."""
    candidates = [branch for branch in branches if not branch.refuses_type]
    if not candidates:
        return None
    if not isinstance(value, dict):
        return min(candidates, key=lambda branch: (len(branch.errors), branch.index))

    def nearness(branch: Branch) -> tuple[int, int, int, int, int, int]:
        own = [key for key in value if key in branch.known]
        missing = [key for key in branch.required if key not in value]
        unknown = [key for key in value if key not in branch.known]
        guessed = sum(1 for key in unknown if _guess(key, branch, schema_name))
        return (
            branch.contradicted,
            -len(own) - guessed,
            len(missing) - guessed,
            len(unknown) - guessed,
            len(branch.errors),
            branch.index,
        )

    best = min(candidates, key=nearness)
    if len(branches) > 1 and -nearness(best)[1] == 0 and best.known:
        return None
    return best


def _guess(key: str, branch: Branch, schema_name: str) -> bool:
    synonym = known_key(schema_name, key)
    if synonym is not None and synonym.rsplit(".", 1)[-1] in branch.known:
        return True
    return closest(key, branch.known) is not None
