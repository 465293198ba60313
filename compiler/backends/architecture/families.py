"""The switches of a decoder, in words that several tools have, and which keys of a model type set them.

Sources: the modeling files and configuration classes of transformers 5.23; the tests compare the defaults with them.
"""

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


_NONE: Biases = (False, False, False)
_ALL: Biases = (True, True, True)
_QKV: Biases = (True, False, False)


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


_SEQUENTIAL = {False: {"use_parallel_residual": False}, True: {"use_parallel_residual": True}}
_DEEPSEEK_KEYS = {
    "normalized": ("norm_topk_prob", True),
    "scale": ("routed_scaling_factor", 2.5),
    "groups": ("n_group", 8),
    "groups_per_token": ("topk_group", 4),
}

FAMILIES: Mapping[str, Switches] = MappingProxyType(
    {
        "llama": Switches(
            biases={
                _NONE: {},
                _ALL: {"attention_bias": True, "mlp_bias": True},
                (True, True, False): {"attention_bias": True},
                (False, False, True): {"mlp_bias": True},
            }
        ),
        "mistral": Switches(windowed=None),
        "qwen2": Switches(biases={_QKV: {}}),
        "qwen3": Switches(qk_norm={True: {}}, biases={_NONE: {}, (True, True, False): {"attention_bias": True}}),
        "arcee": Switches(
            epsilon=("rms_norm_eps", 1e-5),
            activation=("hidden_act", "relu2"),
            gated=False,
            biases={_NONE: {}, _ALL: {"attention_bias": True, "mlp_bias": True}},
        ),
        "starcoder2": Switches(
            rms_norm=False,
            epsilon=("norm_epsilon", 1e-5),
            activation=("hidden_act", "gelu_pytorch_tanh"),
            gated=False,
            biases={_ALL: {"use_bias": True}, _NONE: {"use_bias": False}},
            windowed=None,
            dropouts={
                "attention_dropout": ("attention_dropout", 0.0),
                "hidden_dropout": ("residual_dropout", 0.0),
                "embedding_dropout": ("embedding_dropout", 0.0),
            },
            initializer_range=0.018042,
            tied=True,
        ),
        "nemotron": Switches(
            rms_norm=False,
            epsilon=("norm_eps", 1e-5),
            activation=("hidden_act", "relu2"),
            gated=False,
            biases={_NONE: {}, _ALL: {"attention_bias": True, "mlp_bias": True}},
            percent=("partial_rotary_factor", 0.5),
            centered_norm=True,
            initializer_range=0.0134,
        ),
        "jais2": Switches(
            rms_norm=False,
            epsilon=("layer_norm_eps", 1e-5),
            activation=("hidden_act", "relu2"),
            gated=False,
            biases={_ALL: {"attention_bias": True, "mlp_bias": True}},
        ),
        "gpt_neox": Switches(
            rms_norm=False,
            epsilon=("layer_norm_eps", 1e-5),
            activation=("hidden_act", "gelu"),
            gated=False,
            biases={_ALL: {"attention_bias": True}, (False, False, True): {"attention_bias": False}},
            theta_key="rotary_emb_base",
            percent=("rotary_pct", 0.25),
            parallel=_SEQUENTIAL,
            grouped=False,
            dropouts={
                "attention_dropout": ("attention_dropout", 0.0),
                "hidden_dropout": ("hidden_dropout", 0.0),
                "embedding_dropout": ("hidden_dropout", 0.0),
            },
        ),
        "gpt2": Switches(
            rms_norm=False,
            epsilon=("layer_norm_epsilon", 1e-5),
            activation=("activation_function", "gelu_new"),
            gated=False,
            biases={_ALL: {}},
            theta=None,
            grouped=False,
            dropouts={
                "attention_dropout": ("attn_pdrop", 0.1),
                "hidden_dropout": ("resid_pdrop", 0.1),
                "embedding_dropout": ("embd_pdrop", 0.1),
            },
            tied=True,
        ),
        "mixtral": Switches(epsilon=("rms_norm_eps", 1e-5), theta=1000000.0, windowed=None, router=Router()),
        "qwen2_moe": Switches(
            biases={_QKV: {}, _NONE: {"qkv_bias": False}},
            router=Router(shared_gate=True, shared=True),
            router_keys={"normalized": ("norm_topk_prob", False)},
            has_dense_layers=True,
        ),
        "qwen3_moe": Switches(
            qk_norm={True: {}},
            biases={_NONE: {}, (True, True, False): {"attention_bias": True}},
            router=Router(),
            router_keys={"normalized": ("norm_topk_prob", False)},
            has_dense_layers=True,
        ),
        "glm4_moe": Switches(
            epsilon=("rms_norm_eps", 1e-5),
            biases={_NONE: {}, _QKV: {"attention_bias": True}},
            percent=("partial_rotary_factor", 0.5),
            qk_norm={False: {}, True: {"use_qk_norm": True}},
            router=Router("sigmoid", correction_bias=True, shared=True),
            has_dense_layers=True,
            router_keys={
                "normalized": ("norm_topk_prob", True),
                "scale": ("routed_scaling_factor", 1.0),
                "groups": ("n_group", 1),
                "groups_per_token": ("topk_group", 1),
            },
        ),
        "deepseek_v3": Switches(
            router=Router("sigmoid", correction_bias=True, shared=True),
            router_keys=_DEEPSEEK_KEYS,
            has_dense_layers=True,
            latent=True,
        ),
    }
)
"""The model types whose layers these switches describe in full, the plainest first: that is the order of the search."""
