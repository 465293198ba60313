"""Learns how a configuration class completes what it is given: defaults, and values that follow from others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from building import Sample
from collecting import Collection
from following import COMPUTED
from rows import keys_of
from trees import At, Learner, UnlearnableError

from parcompile.model.tables.completing import GIVEN
from parcompile.model.tables.expression import names as names_of

_FEW = 3
"""What so few configurations agree on may be chance."""


def completion(models: Collection, used: set[str]) -> dict[str, Any]:
    """Defaults and derived values of the keys that the rows read, and of those from which these follow."""
    values, computed = _Values(models.configs, models.draws.layer_keys), COMPUTED.get(models.name, {})
    derived: dict[str, str] = {}
    todo, seen = [key for key in sorted(used) if key not in ("layer", "item", "part")], set(used)
    while todo:
        key = todo.pop()
        if key not in values.keys:
            continue
        try:
            text = computed[key] if key in computed else values.derived(key)
        except UnlearnableError as error:
            raise UnlearnableError(f"what {key} follows from: {error}") from error
        if text is None:
            continue
        derived[key] = text
        for read in sorted(names_of(text) - {"layer"}):
            other = read.removeprefix(GIVEN)
            if other in seen:
                continue
            seen.add(other)
            if other == read:
                todo.append(other)
    defaults = {key: value for key, value in models.kind.defaults.items() if key in seen and value is not None}
    found: dict[str, Any] = {"defaults": defaults}
    if fixed := _fixed(models):
        found["fixed"] = fixed
        found["defaults"] |= {key: value for key, value in fixed.items() if value is not None}
    if derived:
        found["derived"] = {key: derived[key] for key in _ordered(derived)}
    return found


def _fixed(models: Collection) -> dict[str, Any]:
    """Keys for which parameters are known for one value only, since no other was ever built."""
    kind = models.kind

    def varied(key: str) -> bool:
        return len({json.dumps(sample.raw.get(key)) for sample in models.samples}) > 1

    return {
        key: value
        for key, value in kind.defaults.items()
        if key in models.draws.keys and key not in kind.names and not _changes_no_shape(value) and not varied(key)
    }


class _Values:
    """What a class makes of the values that it is given."""

    def __init__(self, configs: Sequence[Sample], layers: Sequence[str]) -> None:
        self.configs, self.layers = configs, layers
        self.keys = keys_of(configs)
        self.rewritten = [key for key in self.keys if any(one.raw.get(key) != one.full.get(key) for one in configs)]
        """Keys that do not keep what is given."""

    def derived(self, key: str) -> str | None:
        """How a value follows from what is given; None where it is what was given, or its default."""
        raw = [sample.raw.get(key) for sample in self.configs]
        full = [sample.full.get(key) for sample in self.configs]
        if all(one == other for one, other in zip(raw, full, strict=True)):
            return None
        given = [at for at, (one, other) in enumerate(zip(raw, full, strict=True)) if one is not None and one == other]
        left = [at for at, one in enumerate(raw) if one in (None, "auto")]
        if len(given) + len(left) == len(raw):
            text = self._text(key, left, full)
            if "auto" in raw:
                return f"({text}) if {key} in [None, 'auto'] else {key}"
            return f"({text}) if {key} is None else {key}"
        return self._text(key, list(range(len(raw))), full)

    def _text(self, key: str, at: list[int], full: list[Any]) -> str:
        # Where the key itself decides, it is what was given.
        configs = [{**self.configs[one].full, key: self.configs[one].raw.get(key)} for one in at]
        values = [full[one] for one in at]
        try:
            return self._value(Learner(configs, self.keys), list(range(len(values))), values)
        except UnlearnableError:
            others = [other for other in self.rewritten if other != key]
            if not others:
                raise
            for one, config in zip(at, configs, strict=True):
                config |= {GIVEN + other: self.configs[one].raw.get(other) for other in others}
            learner = Learner(configs, self.keys + [GIVEN + other for other in others])
            return self._value(learner, list(range(len(values))), values)

    def _value(self, learner: Learner, at: list[int], values: list[Any]) -> str:
        """An expression for the values of the configurations of these numbers."""
        samples: list[At] = [(one, ()) for one in at]
        if all(value == values[0] for value in values) and len(values) > _FEW:
            return repr(values[0])
        if all(isinstance(value, list) for value in values):
            return self._list(learner, at, values)
        if all(type(value) is int for value in values):
            return learner.size(samples, values, layered=False)
        for kind in (int, list):
            there = [type(value) is kind for value in values]
            if any(there):
                which = learner.choice(samples, [str(one) for one in there], layered=False)
                parts = [[one for one, is_kind in enumerate(there) if is_kind is wanted] for wanted in (True, False)]
                this, other = (self._part(learner, part, values) for part in parts)
                return f"({this}) if {which} else ({other})"
        return learner.choice(samples, [repr(value) for value in values], layered=False)

    def _part(self, learner: Learner, at: list[int], values: list[Any]) -> str:
        """What some of the configurations have."""
        return self._value(learner, at, [values[one] for one in at])

    def _list(self, learner: Learner, at: list[int], values: list[list[Any]]) -> str:
        if (text := self._members(learner, at, values)) is not None:
            return text
        samples: list[At] = [(one, ()) for one in at]
        length = learner.size(samples, [len(value) for value in values], layered=False)
        inner: list[At] = [
            (one, (layer,)) for one, value in zip(at, values, strict=True) for layer in range(len(value))
        ]
        entries = [entry for value in values for entry in value]
        if not entries:
            return "[]"
        if all(type(entry) is int for entry in entries):
            each = learner.size(inner, entries, layered=True)
        else:
            each = learner.choice(inner, [repr(entry) for entry in entries], layered=True)
        return f"[({each}) for layer in range({length})]"

    def _members(self, learner: Learner, at: list[int], values: list[list[Any]]) -> str | None:
        """A list of layers, by which layers are in it; None where the lists are no such."""
        numbers = [value for held in values for value in held]
        if not numbers or any(type(number) is not int for number in numbers):
            return None
        if any(held != sorted(set(held)) for held in values):
            return None
        held_by = dict(zip(at, values, strict=True))
        for text, depths in self._depths(learner, at):
            if any(held and held[-1] >= depth for held, depth in zip(values, depths, strict=True)):
                continue
            inner: list[At] = [(one, (layer,)) for one, depth in zip(at, depths, strict=True) for layer in range(depth)]
            try:
                which = learner.choice(inner, [str(layer in held_by[one]) for one, (layer,) in inner], layered=True)
            except UnlearnableError:
                continue
            return f"[layer for layer in range({text}) if ({which})]"
        return None

    def _depths(self, learner: Learner, at: list[int]) -> Iterator[tuple[str, list[int]]]:
        """What the number of layers may be, with what it is in the configurations of these numbers."""
        for key in self.layers:
            yield key, [learner.configs[one][key] for one in at]
        for key in self.keys:
            held = [learner.configs[one].get(key) for one in at]
            if all(isinstance(one, list) for one in held):
                yield f"len({key})", [len(one) for one in held if isinstance(one, list)]


def _ordered(derived: dict[str, str]) -> list[str]:
    """Derived keys, each behind those that it reads; where two read one another, as they come."""
    rest, order = list(derived), []
    while rest:
        ready = [key for key in rest if not (names_of(derived[key]) & set(rest)) - {key}]
        order.append(ready[0] if ready else rest[0])
        rest.remove(order[-1])
    return order


def _changes_no_shape(value: Any) -> bool:
    """Text that no code compares, and fractions: other values of them are taken as they come."""
    return isinstance(value, str | float) or (isinstance(value, list) and any(isinstance(one, float) for one in value))
