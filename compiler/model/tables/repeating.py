"""The parameters of a configuration, those of the layers once for each shape that they have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .completing import TableError, follow, frozen, thawed
from .expression import ExpressionError, evaluate, names
from .parameters import numbers_of, size_of, times_of
from .reading import Row, Table

_OF_LAYERS = "of layers"


def in_layers(own: Mapping[int, Mapping[str, Any]]) -> tuple[tuple[str, Hashable], ...]:
    """Values that single layers have in the place of the model's, to be added to those of `repeated`."""
    by_layer = tuple((layer, tuple((key, frozen(one)) for key, one in held.items())) for layer, held in own.items())
    return ((_OF_LAYERS, by_layer),) if own else ()


@dataclass(frozen=True, slots=True)
class Repeated:
    """One parameter, or one of every layer in `layers` (`{layer}` in its name)."""

    name: str
    shape: tuple[int, ...]
    row: Row
    layers: tuple[int, ...] | None
    """None: it stands outside the layers."""


def repeated(table: Table, stack: str, values: Iterable[tuple[str, Hashable]]) -> list[Repeated]:
    """The rows in the order in which transformers registers them; `stack` is the name of the layers (`model.layers`).

    `values` are those of a configuration that the table reads (`completing.stated`), and `in_layers` of some layers.

    Raises:
        TableError: the table does not tell the parameters of this configuration.
    """
    given = thawed(values)
    own = {layer: dict(pairs) for layer, pairs in given.pop(_OF_LAYERS, ())}
    scope, found = follow(table, given), []
    first: dict[tuple[str, ...], int] = {}
    prefix = f"{stack}.{{layer}}."
    try:
        for number, row in enumerate(table.rows):
            parts = row.name.split(".")
            for end in range(1, len(parts) + 1):
                first.setdefault(tuple(parts[:end]), number)
            start = prefix.count(".") if row.name.startswith(prefix) else 0
            count = times_of(table.stacks[prefix[:-1]], scope) if start else None
            for inner in numbers_of(table, parts, scope, start):
                place = [(first[tuple(parts[: end + 1])], inner.get(part[1:-1], 0)) for end, part in enumerate(parts)]
                name = row.name.format(**({"layer": "{layer}"} if start else {}), **inner)
                for shape, layers in _by_shape(row, {**scope, **inner}, count, own):
                    found.append((place, Repeated(name, shape, row, layers)))
    except ExpressionError as error:
        raise TableError(str(error), error.key) from None
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _by_shape(
    row: Row, scope: Mapping[str, Any], count: int | None, own: Mapping[int, Mapping[str, Any]]
) -> list[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """The shapes that a row has, each with its layers; none where the row is not there."""
    if count is None or not (own or any("layer" in names(text) for text in (row.when, *row.shape))):
        there = count != 0 and evaluate(row.when, scope)
        layers = None if count is None else tuple(range(count))
        return [(tuple(size_of(text, scope) for text in row.shape), layers)] if there else []
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for layer in range(count):
        here = {**scope, **own.get(layer, {}), "layer": layer}
        if evaluate(row.when, here):
            by_shape.setdefault(tuple(size_of(text, here) for text in row.shape), []).append(layer)
    return [(shape, tuple(layers)) for shape, layers in by_shape.items()]
