"""The switches of a decoder, in words that several tools have, and which keys of a model type set them.

Sources: the modeling files and configuration classes of transformers 5.23; the tests compare the defaults with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parcompile.user_files import shipped

Biases = tuple[bool, bool, bool]
"""Biases of queries, keys and values; of the attention's output; of the MLP."""

_WORDS = shipped(__package__, "words.json")
ACTIVATIONS: Mapping[str, str] = _WORDS["activations"]
"""Hugging Face's names of activations, by what they compute: gelu_tanh is GELU's approximation with tanh."""
SCALING_KEYS: Sequence[str] = _WORDS["scaling"]
"""Keys of `rope_scaling` beside its type."""
LACKS: Sequence[Mapping[str, str]] = _WORDS["lacks"]
"""What a family has in place of what is wanted, the greatest difference first."""


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


_NONE: Biases = (False, False, False)
_PLACES = ("qkv", "output", "mlp")


@dataclass(frozen=True, slots=True)
class Switches:
    """Which switches a model type has, and which of its keys set them. Without arguments it is Llama."""

    rms_norm: bool = True
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    activation: tuple[str, str] = ("hidden_act", "silu")
    gated: bool = True
    biases: Mapping[Biases, Mapping[str, bool]] = field(default_factory=lambda: {_NONE: {}})
    """The combinations that it has, and the keys that bring each."""
    theta: float | None = 10000.0
    """The default base; None for learned positions."""
    theta_key: str = "rope_theta"
    percent: tuple[str, float] | None = None
    """The key of the part of a head that is turned, where it need not be the whole."""
    centered_norm: bool = False
    qk_norm: Mapping[bool, Mapping[str, bool]] = field(default_factory=lambda: {False: {}})
    parallel: Mapping[bool, Mapping[str, bool]] = field(default_factory=lambda: {False: {}})
    parallel_by_default: bool = False
    reads_head_dim: bool = True
    """Whether its class takes the width of a head that the configuration gives."""
    windowed: bool | None = False
    """Whether every layer has a sliding window; None: the key decides."""
    dropouts: Mapping[str, tuple[str, float]] = field(
        default_factory=lambda: {"attention_dropout": ("attention_dropout", 0.0)}
    )
    """Keys of the dropouts that it has, with their defaults."""
    initializer_range: float = 0.02
    tied: bool = False
    router: Router | None = None
    router_keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Keys that set parts of the router, with their defaults."""
    has_dense_layers: bool = False
    """Its first layers can be without experts."""
    grouped: bool = True
    latent: bool = False


def _read(tree: Mapping[str, Any]) -> Switches:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()}
    for name in given.keys() & {"qk_norm", "parallel"}:
        given[name] = {on == "true": keys for on, keys in tree[name].items()}
    for name in given.keys() & {"dropouts", "router_keys"}:
        given[name] = {part: tuple(key) for part, key in tree[name].items()}
    if "biases" in given:
        given["biases"] = {
            tuple(place in places.split() for place in _PLACES): keys for places, keys in tree["biases"].items()
        }
    if "router" in given:
        given["router"] = Router(**tree["router"])
    return Switches(**given)


FAMILIES: Mapping[str, Switches] = {name: _read(one) for name, one in shipped(__package__, "families.json").items()}
"""The model types whose layers these switches describe in full, the plainest first: that is the order of the search.

`families.json` says of each what is not Llama's; `biases` names the places that have one.
"""
