"""Layers of different shapes in one model: what those of one kind have otherwise than the model's other layers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from .compressed_keys import CompressedKeys


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None
    """None: queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the part without and the part with rotary position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


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
    mla: MlaShape | None = None
    compressed: CompressedKeys | None = None
    """Keys that stand for windows of tokens, beside those of the tokens in the layer's own window."""


OF_MODEL = frozenset({"num_attention_heads", "mla"})
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
