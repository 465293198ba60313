"""Names, order and shapes of a model's parameters, from the derived table of its type and its configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .completing import TableError, complete
from .expression import NULL, ExpressionError, evaluate, names
from .reading import Row, Table

MOST_REPEATED = 10_000
"""Layers, or experts that are stored one by one, of a model; the maximum of `num_hidden_layers` in a spec."""

INDICES = ("layer", "item", "part")
"""The names of the numbers in a parameter's name, outermost first."""


@dataclass(frozen=True, slots=True)
class Derived:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]
    row: Row

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


def parameters(table: Table, config: Mapping[str, Any]) -> list[Derived]:
    """Every parameter in the order in which transformers registers it.

    Raises:
        TableError: the table does not tell the parameters of this configuration.
    """
    scope = complete(table, config)
    found: list[tuple[list[tuple[int, int]], Derived]] = []
    first: dict[tuple[str, ...], int] = {}
    try:
        for number, row in enumerate(table.rows):
            parts = row.name.split(".")
            for end in range(1, len(parts) + 1):
                first.setdefault(tuple(parts[:end]), number)
            for numbers in numbers_of(table, parts, scope, 0):
                here = {**scope, **numbers}
                if not evaluate(row.when, here):
                    continue
                place = [(first[tuple(parts[: end + 1])], numbers.get(part[1:-1], 0)) for end, part in enumerate(parts)]
                shape = tuple(size_of(text, here) for text in row.shape)
                found.append((place, Derived(row.name.format(**numbers), shape, row)))
    except ExpressionError as error:
        raise TableError(str(error), error.key) from None
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def size_of(text: str, scope: Mapping[str, Any]) -> int:
    """A dim, or how often a module is repeated."""
    value = evaluate(text, scope)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        key = text if text in names(text) else None
        message = f"{text} is {value!r}: it has to be a whole number of 0 or more"
        raise ExpressionError(NULL.format(text) if key and value is None else message, key)
    return value


def times_of(text: str, scope: Mapping[str, Any]) -> int:
    """How often a module is repeated."""
    times = size_of(text, scope)
    if times > MOST_REPEATED:
        key = text if text in names(text) else None
        raise ExpressionError(f"{text} is {times}: at most {MOST_REPEATED:,} of them are counted", key)
    return times


def numbers_of(table: Table, parts: list[str], scope: Mapping[str, Any], start: int) -> Iterator[dict[str, int]]:
    """The numbers of every instance of a row: of its layer, and of what is repeated within."""
    for end in range(start, len(parts)):
        if parts[end].startswith("{"):
            name = parts[end][1:-1]
            for number in range(times_of(table.stacks[".".join(parts[: end + 1])], scope)):
                for inner in numbers_of(table, parts, {**scope, name: number}, end + 1):
                    yield {name: number, **inner}
            return
    yield {}
