"""Parameters of every causal model type of transformers, derived by building its models with drawn configurations.

Names, order and shapes of a model's parameters, from the derived table of its type and its configuration; and which
dim transformers' own plan of tensor parallelism cuts.

Source: the styles of `transformers.distributed.tensor_parallel` and `.expert_parallel` (5.23).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from .completing import OLDER_KINDS, alias_of, complete, follow, frozen, reads, stated, thawed
from .expression import NULL, TableError, evaluate, names
from .reading import VERSION, Row, Table, class_default, covered, left_out, table_of

T = TypeVar("T")

MOST_REPEATED = 10_000
"""Layers, or experts that are stored one by one, of a model; the maximum of `num_hidden_layers` in a spec."""

MOST_IN_LAYERS = 200_000
"""Instances of one parameter that all layers have together, where a layer has several."""

INDICES = ("layer", "item", "part")
"""The names of the numbers in a parameter's name, outermost first."""


class Derived(NamedTuple):
    """One parameter of a model, or one of every layer in `layers` (`{layer}` in its name)."""

    name: str
    shape: tuple[int, ...]
    row: Row
    layers: tuple[int, ...] | None = None
    """None: it stands outside the layers, or in one of them."""

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

    def instances(row: Row, parts: list[str]) -> Iterator[tuple[dict[str, int], Derived]]:
        for numbers in numbers_of(table, parts, scope, 0):
            here = {**scope, **numbers}
            if evaluate(row.when, here):
                shape = tuple(size_of(text, here) for text in row.shape)
                yield numbers, Derived(row.name.format(**numbers), shape, row)

    return _registered(table, instances)


def _registered(table: Table, instances: Callable[[Row, list[str]], Iterable[tuple[dict[str, int], T]]]) -> list[T]:
    """What there is of each row, with its numbers, in the order in which transformers registers it."""
    found: list[tuple[list[tuple[int, int]], T]] = []
    first: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(table.rows):
        parts = row.name.split(".")
        for end in range(1, len(parts) + 1):
            first.setdefault(tuple(parts[:end]), number)
        for numbers, one in instances(row, parts):
            place = [(first[tuple(parts[: end + 1])], numbers.get(part[1:-1], 0)) for end, part in enumerate(parts)]
            found.append((place, one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def size_of(text: str, scope: Mapping[str, Any]) -> int:
    """A dim, or how often a module is repeated."""
    value = evaluate(text, scope)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        key = text if text in names(text) else None
        message = f"{text} is {value!r}: it has to be a whole number of 0 or more"
        raise TableError(NULL.format(text) if key and value is None else message, key)
    return value


def times_of(text: str, scope: Mapping[str, Any]) -> int:
    """How often a module is repeated."""
    times = size_of(text, scope)
    if times > MOST_REPEATED:
        key = text if text in names(text) else None
        raise TableError(f"{text} is {times}: at most {MOST_REPEATED:,} of them are counted", key)
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


# The parameters of a configuration, those of the layers once for each shape that they have.

_OF_LAYERS = "of layers"


def in_layers(own: Mapping[int, Mapping[str, Any]]) -> tuple[tuple[str, Hashable], ...]:
    """Values that single layers have in the place of the model's, to be added to those of `repeated`."""
    by_values: dict[tuple[tuple[str, Hashable], ...], list[int]] = {}
    frozen_once: dict[int, tuple[tuple[str, Hashable], ...]] = {}
    for layer, held in own.items():
        values = frozen_once.get(id(held))
        if values is None:
            values = frozen_once[id(held)] = tuple((key, frozen(one)) for key, one in held.items())
        by_values.setdefault(values, []).append(layer)
    return ((_OF_LAYERS, tuple((values, tuple(layers)) for values, layers in by_values.items())),) if own else ()


def repeated(table: Table, stack: str, values: Iterable[tuple[str, Hashable]]) -> list[Derived]:
    """The rows in the order in which transformers registers them; `stack` is the name of the layers (`model.layers`).

    `values` are those of a configuration that the table reads (`completing.stated`), and `in_layers` of some layers.

    Raises:
        TableError: the table does not tell the parameters of this configuration.
    """
    given = thawed(values)
    own = {layer: dict(pairs) for pairs, layers in given.pop(_OF_LAYERS, ()) for layer in layers}
    scope, prefix = follow(table, given), f"{stack}.{{layer}}."

    def instances(row: Row, parts: list[str]) -> Iterator[tuple[dict[str, int], Derived]]:
        start = prefix.count(".") if row.name.startswith(prefix) else 0
        count = times_of(table.stacks[prefix[:-1]], scope) if start else None
        for inner in _bounded(row, list(numbers_of(table, parts, scope, start)), count or 1):
            name = row.name.format(**({"layer": "{layer}"} if start else {}), **inner)
            for shape, layers in _by_shape(row, {**scope, **inner}, count, own):
                yield inner, Derived(name, shape, row, layers)

    return _registered(table, instances)


def _bounded(row: Row, instances: list[dict[str, int]], layers: int) -> list[dict[str, int]]:
    if len(instances) > 1 and len(instances) * layers > MOST_IN_LAYERS:
        times = f"{row.name} stands {len(instances):,} times in each of {layers:,} layers"
        raise TableError(f"{times}: at most {MOST_IN_LAYERS:,} in all are counted", "num_hidden_layers")
    return instances


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


# How many parameters a configuration describes, by where they are.


class Counts(NamedTuple):
    """Elements of the parameters of a model, tied weights once."""

    layers: int
    """Of the repeated layers, with their experts."""
    experts: int
    """Of routed experts."""
    others: int
    """Embeddings, the last norm and the head."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.others


def counts_of(config: Mapping[str, Any]) -> Counts | None:
    """The parameters of a configuration; None where no table tells them."""
    table = table_of(str(config.get("model_type")))
    if table is None:
        return None
    try:
        found = parameters(table, config)
    except TableError:
        return None
    layers = [one for one in found if "{layer}" in one.row.name]
    return Counts(
        layers=sum(one.numel for one in layers),
        experts=sum(one.numel for one in layers if ".experts." in one.name),
        others=sum(one.numel for one in found if "{layer}" not in one.row.name),
    )
