"""Means over layers of different shapes."""

from __future__ import annotations

from collections.abc import Callable

from parcompile.model.shape import ModelShape


def mean_over_layers(shape: ModelShape, value: Callable[[ModelShape], float]) -> float:
    """The mean over the layers that attend, of what `value` says of a model all of whose layers are of one kind.

    0 where none attends.
    """
    found = [(len(layers), value(one)) for layers, one in shape.by_kind if layers]
    return sum(count * each for count, each in found) / sum(count for count, _ in found) if found else 0.0
