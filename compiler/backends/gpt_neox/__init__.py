"""gpt-neox: the keys of its configurations, and what it and DeepSpeed refuse in them.

The keys are fields of its dataclasses, with what `validate_types` takes for each.

fields.json was written by `.ci/generate/gpt_neox_fields.py`, which asked the classes themselves.

`NeoXArgs(**config)` takes no unknown key, and `validate_types` wants the very type of a field: a float may be written
as a whole number, null stands for the default, and the case of a choice does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parcompile.backends.reading import Account, Outcome, effect_of
from parcompile.user_files import shipped

_STORED, WORDS = (shipped(__package__, f"{name}.json") for name in ("fields", "words"))
VERSIONS: Sequence[str] = _STORED["versions"]
"""The known versions of gpt-neox, oldest first."""
DEEPSPEED_VERSION: str = _STORED["deepspeed"]
"""The version of DeepSpeed that the newest one requires."""
ATTENTION_KINDS: Sequence[str] = _STORED["attention"]
"""ATTENTION_TYPE_CHOICES of the newest version; older ones have fewer."""
REPLACED: frozenset[str] = frozenset(_STORED["replaced"])
"""The fields that the newest version sets before it looks at types, whatever a file says."""
ANY = "any"
"""The type of a field that takes everything."""


class Field(NamedTuple):
    """A key: the versions that have it, oldest first, and either its types by their Python names or its choices."""

    name: str
    versions: tuple[str, ...]
    types: tuple[str, ...]
    choices: tuple[Any, ...]
    default: Any
    handed_on: bool
    """Whether gpt-neox hands the value on to DeepSpeed, unless it is the default."""

    @property
    def is_current(self) -> bool:
        """Whether the newest version has it."""
        return self.versions[-1] == VERSIONS[-1]


@functools.cache
def fields() -> Mapping[str, Field]:
    """Every field that any known version has, by name."""
    return {
        name: Field(
            name,
            tuple(entry["versions"]),
            tuple(entry.get("types", ())),
            tuple(entry.get("choices", ())),
            entry.get("default"),
            bool(entry.get("deepspeed")),
        )
        for name, entry in _STORED["fields"].items()
    }


# What keys of gpt-neox do that have no place in a spec. Every key of the newest version is read or in `effects.json`.


_DERIVED = frozenset(WORDS["derived"])
"""Keys that `calculate_derived` sets from others, whatever a file says."""


def fate(name: str, value: object) -> Account | None:
    """What there is to say of a key that has no place in a spec; None for one that no version has."""
    top = name.partition(".")[0]
    field = fields().get(top)
    if field is None:
        return None
    if not field.is_current:
        return Account(name, Outcome.LOST, f"a key of gpt-neox up to version {field.versions[-1]}")
    if top in _DERIVED:
        return Account(name, Outcome.NO_EFFECT, "gpt-neox derives it from other keys")
    if name == top and value == field.default and type(value) is type(field.default):
        return Account(name, Outcome.NO_EFFECT, "it is gpt-neox's own default")
    effect = effect_of(top, "gpt_neox")
    return None if effect is None else effect.account(name)
