"""Layers of different shapes in one model: what those of one kind have otherwise than the model's other layers."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compressed_keys import CompressedKeys


class Projections(ABC):
    """Queries, keys and values that come of fewer features, in heads whose widths `head_dim` does not say."""

    __slots__ = ()

    @property
    @abstractmethod
    def query_rank(self) -> int:
        """Features that queries come of; 0: of hidden states."""

    @property
    @abstractmethod
    def key_dim(self) -> int:
        """Width of a query or key head."""

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Width of a value head."""

    @abstractmethod
    def matmul_parameters(self, hidden: int, heads: int, gate: int, *, gated_queries: bool) -> int:
        """Of the attention, those that multiply each token; `gate` values of each head gate what it gives."""

    @abstractmethod
    def small_windows(self, heads: int) -> Mapping[str, Any]:
        """Keys of a small model with so many heads, of layers with a window that have other sizes than others."""


class KeysAndValues(enum.Enum):
    """Where an attention takes its keys and values from; the value names the projections that it has."""

    OWN = "qkv"
    KEYS_ARE_VALUES = "qk"
    """One projection gives the keys, and the values too."""
    OF_ANOTHER_LAYER = "q"
    """Those of an earlier layer."""


class LayersError(ValueError):
    """A configuration whose layers cannot be told apart; `key` is the key at fault."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The dimensions that may differ from layer to layer, under the names of `ModelShape`."""

    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    value_head_dim: int | None = None
    """None: as wide as `head_dim`."""
    sliding_window: int | None = None
    keys_and_values: KeysAndValues = KeysAndValues.OWN
    sinks: bool = True
    """Whether the layer has attention sinks, where its family knows them."""
    num_attention_heads: int | None = None
    projections: Projections | None = None
    """None: each head has its rows of one projection."""
    compressed: CompressedKeys | None = None
    """Keys that stand for windows of tokens, beside those of the tokens in the layer's own window."""


OF_MODEL = frozenset({"num_attention_heads", "projections"})
"""What a kind that leaves it out has as the model does."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of the same shape."""

    layers: tuple[int, ...]
    shape: LayerShape


def kinds_of_layers(shapes: Sequence[LayerShape]) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers, whose shapes are given in order; the kind of the first layer comes first."""
    found: dict[LayerShape, list[int]] = {}
    for layer, shape in enumerate(shapes):
        found.setdefault(shape, []).append(layer)
    return tuple(LayerKind(tuple(layers), shape) for shape, layers in found.items())
