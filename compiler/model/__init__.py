"""What a model is made of: its shape and its parameters, from a preset, a Hugging Face config or dimensions.

What a parameter table consists of: parameters, and how tensor parallelism cuts each of them.

A parameter is cut along one dim. What lies along that dim is made of *parts* (query, key and value of a fused
projection, say), each cut on its own, and a part is made of indivisible *units* (attention heads; single rows for an
MLP). A part with fewer units than ranks is replicated: consecutive ranks share a unit. This one rule covers columns,
rows, heads, kv heads and fused projections.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

Layers: TypeAlias = "range | tuple[int, ...]"
"""Numbers of layers, ascending."""


class ModelConfigError(ValueError):
    """A configuration that does not describe a model.

    `key` is the key at fault, when it is one; `instead` says what to do, where there is more to say than the message.
    """

    def __init__(self, message: str, key: str | None = None, instead: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.instead = instead


class Part(NamedTuple):
    """`size` elements along the cut dim, in `units` equal pieces that are never cut."""

    size: int
    units: int


class Split(NamedTuple):
    """How tensor parallelism cuts a parameter: along `dim`, each of `parts` on its own.

    `pads_vocabulary` marks the embedding and the head, whose rows are padded before they are cut.
    """

    dim: int
    parts: tuple[Part, ...]
    pads_vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, or one of every layer (`{layer}` in the name); `shape` is that of the whole, unpadded tensor."""

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    expert_dim: int | None = None
    """The dim that expert parallelism cuts, for the weights of routed experts."""
    layers: Layers | None = None
    """The layers that have it; None when it stands outside the layers."""
    sequence_parallel: bool = False
    """Used on a shard of the sequence under sequence parallelism: its gradient is summed over tp there."""
    partial: bool = False
    """Held by every tp rank but used on the rank's own heads or features: its gradient is always summed over tp."""
    trained: bool = True
    """It gets a gradient; what does not is frozen, without gradients and states of the optimizer."""

    first: int = 0
    """The layer that its name calls 0."""
    layers_per_module: int = 1
    """Consecutive layers that its name calls by one number."""
    idle_experts: int = 0
    """The last entries of `expert_dim`, with which no rank computes: they are dealt apart from the others."""

    @property
    def numel(self) -> int:
        """Elements of one such tensor."""
        return math.prod(self.shape)

    @property
    def numbers(self) -> Layers | None:
        """Those layers as its name counts them."""
        return None if self.layers is None else tuple(map(self.number, self.layers))

    def number(self, layer: int) -> int:
        """What its name calls a layer."""
        return (layer - self.first) // self.layers_per_module

    @property
    def count(self) -> int:
        """How many such tensors the model has."""
        return 1 if self.layers is None else len(self.layers)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters: those before the layers, those of the layers, those after them."""

    before: tuple[Parameter, ...]
    layer: tuple[Parameter, ...]
    after: tuple[Parameter, ...]
    num_layers: int
    registered_first: int = 0
    """How many of those after the layers the model registers before them."""
    registered_late: int = 0
    """How many of those before the layers the model registers behind them and the last norm."""
    last_norm: int = 0
    """How many parameters that norm has, where some are registered late."""
    layers_per_module: int = 1
    """Consecutive layers whose parameters the model registers together."""

    def __repr__(self) -> str:
        return f"ParameterTable({self.numel:,} parameters, {self.num_layers} layers)"

    def __iter__(self) -> Iterator[Parameter]:
        """Each row once, layers not repeated."""
        yield from self.before
        yield from self.layer
        yield from self.after

    def expanded(self) -> Iterator[tuple[str, Parameter]]:
        """Name and parameter of every tensor, in Hugging Face's order."""
        for parameter, layer in self.in_order():
            number = None if layer is None else parameter.number(layer)
            yield parameter.name if number is None else parameter.name.format(layer=number), parameter

    def in_order(self) -> Iterator[tuple[Parameter, int | None]]:
        """Parameter and layer of every tensor, in Hugging Face's order."""
        early = len(self.before) - self.registered_late
        yield from ((parameter, None) for parameter in (*self.before[:early], *self.after[: self.registered_first]))
        for first in range(0, self.num_layers, self.layers_per_module):
            together = range(first, first + self.layers_per_module)
            for parameter in self.layer:
                yield from ((parameter, index) for index in within(parameter.layers, together))
        behind = max(self.registered_first, self.last_norm)
        late = (*self.after[self.registered_first : behind], *self.before[early:], *self.after[behind:])
        yield from ((parameter, None) for parameter in late)

    @property
    def numel(self) -> int:
        """Parameters of the whole model, tied weights counted once."""
        return sum(parameter.numel * parameter.count for parameter in self)


def within(layers: Layers | None, among: range) -> Layers:
    """Those of `layers` that are in `among`, consecutive numbers."""
    held = layers or ()
    return held[bisect_left(held, among.start) : bisect_left(held, among.stop)]


def spans(layers: Layers) -> list[list[int]]:
    """Layers as stretches `[start, stop)` without a gap."""
    if isinstance(layers, range):
        return [[layers.start, layers.stop]]
    starts = [layers[0], *(after for before, after in pairwise(layers) if after != before + 1)] if layers else []
    stops = [before + 1 for before, after in pairwise(layers) if after != before + 1]
    return [[start, stop] for start, stop in zip(starts, [*stops, layers[-1] + 1] if layers else [], strict=True)]


def vocabulary(size: int) -> Split:
    """Cut along the padded vocabulary."""
    return Split(0, (Part(size, size),), pads_vocabulary=True)


class Cut(NamedTuple):
    """The fields of the same names of `Parameter`."""

    split: Split | None = None
    expert_dim: int | None = None
    sequence_parallel: bool = False
    partial: bool = False
    trained: bool = True


STREAM = Cut(sequence_parallel=True)
"""Whole on every rank, which works on its own tokens: norms of the stream, biases behind a sum over ranks."""

FROZEN = Cut(trained=False)
"""Whole on every rank, all of which compute the same with it; it gets no gradient."""

PARTIAL = Cut(partial=True)
"""Whole on every rank, which works on its own heads, features or experts."""


def columns(parts: tuple[Part, ...], dims: int, *, transposed: bool) -> Cut:
    """A linear cut by its outputs, or its bias."""
    return Cut(Split(1 if transposed and dims > 1 else 0, parts))


def rows(part: Part, *, transposed: bool) -> Cut:
    """A linear's weight cut by its inputs."""
    return Cut(Split(0 if transposed else 1, (part,)))
