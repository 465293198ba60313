"""The switches of a decoder, in words that several tools have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Biases = tuple[bool, bool, bool]
"""Biases of queries, keys and values; of the attention's output; of the MLP."""

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "squared_relu",
    }
)
"""Hugging Face's names of activations, by what they compute: gelu_tanh is GELU's approximation with tanh."""


class InexpressibleError(ValueError):
    """A model, or a switch of it, that there is no word for. The message is meant for users."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
        self.why = why


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `scaling` is Hugging Face's `rope_scaling` without its theta; empty where there is none."""

    theta: float
    percent: float = 1.0
    """The part of a head that is turned."""
    scaling: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    """Neighbouring elements are turned together, not one of each half."""


@dataclass(frozen=True, slots=True)
class Router:
    """How tokens are sent to experts."""

    score: str = "softmax"
    normalized: bool = True
    """The weights of a token's experts add up to 1."""
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    correction_bias: bool = False
    """A bias that counts when experts are chosen and not when they are weighted."""
    shared_gate: bool = False
    shared: bool = False
    """Experts that every token passes through stand beside the others."""
    dense_layers: bool = False
    """The first layers have no experts."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The switches of a decoder. Sizes stand in `ModelShape`."""

    rms_norm: bool
    epsilon: float
    activation: str
    gated: bool
    biases: Biases
    rope: Rope | None
    """None: a learned table of positions."""
    tied: bool
    grouped: bool = False
    """Several query heads share a head of keys and values."""
    own_head_dim: bool = False
    """A head is not hidden_size / num_attention_heads wide."""
    centered_norm: bool = False
    """The norm multiplies with 1 + weight."""
    qk_norm: bool = False
    """Queries and keys are normed, each head on its own."""
    parallel: bool = False
    """Attention and MLP stand side by side."""
    window: int | None = None
    """Tokens that a query attends to, itself among them."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    initializer_range: float = 0.02
    router: Router | None = None
    latent: bool = False
