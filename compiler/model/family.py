"""What a model family is: how its parameters differ from Llama's, under the names that transformers gives them."""

from __future__ import annotations

import enum
import functools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from parcompile.user_files import shipped

from .blocks import Traits
from .blocks.experts import Experts as Experts
from .blocks.latent import Latent as Latent
from .compressed_keys import LowRank
from .layers import LayerRuns, LayerShape
from .shape import LayerInputs, ModelShape
from .tables import frozen
from .tables.expression import evaluate

T = TypeVar("T", bound=Traits)

Switch = bool | str | tuple[str, ...]
"""A trait that is fixed, or the configuration key that decides it; several keys stand for the same thing."""


class Norm(enum.Enum):
    """What a norm holds."""

    WEIGHT = "weight"
    WEIGHT_AND_BIAS = "weight and bias"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A configuration that the parameters of its family cannot be told from: the key, when, and why."""

    key: str
    applies: Callable[[Mapping[str, Any]], bool]
    reason: str


@dataclass(frozen=True, slots=True)
class Family:
    """Names below `base.layers.N`, and traits that no row tells. Without arguments it is Llama."""

    base: str = "model"
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """What the configuration calls keys that others call as Llama does; None: it has no such key."""
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = ""
    """A learned table of positions, added to the embedding."""
    fixed_positions: str = ""
    """A table of positions that is not learned."""
    embedding_norm: str = ""
    alibi: Switch = False
    """Scores fall linearly with the distance of a key, by a slope of each head (arXiv 2108.12409)."""
    head: str = "lm_head"
    layers_per_module: int = 1
    """Layers in one module of `layers`: its attentions, MLPs and norms are lists of so many; the first has experts."""
    transposed: bool = False
    """Linears are stored as [in, out], as GPT-2's `Conv1D` is."""
    attention: str = "self_attn"
    qkv_parts: str = "qkv"
    """The order of the parts of a fused projection, or of the names of `qkv`."""
    kv_heads: Callable[[Mapping[str, Any], int], int] | None = None
    """The number of kv heads, from the configuration and the number of query heads; else `num_key_value_heads`."""
    heads_interleaved: bool = False
    """A fused projection holds queries, key and value of one kv head after the other, not all queries first."""
    fused_blocks: int = 0
    """A fused projection holds this many blocks of heads one after the other, each with its own parts."""
    paired_heads: bool = False
    """Each head of the first half works with its place in the second half: both halves are cut alike."""
    sinks: str = ""
    """A learned score of each head beside those of its keys, which takes a share of the softmax and gives nothing."""
    gate: str = ""
    """A projection that gates what the attention gives, before its output projection."""
    gate_of_heads: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether it has one value for each head; otherwise one for each of its features."""
    gate_key: Switch = True
    """Whether there is one."""
    query_gate: bool = False
    """The query projection gives such a gate too: behind the query of a head its gate. With latent attention `gate` is
    the name of that projection, which takes the compressed queries with and without their norm."""
    norm_gate: tuple[str, int] | None = None
    """The key of the rank of a gate behind norms of a layer: behind the first, and with experts behind all."""
    runs: Callable[[Mapping[str, Any], int], LayerRuns] | None = None
    """Stacks in the place of `layers`, which run several times, from the configuration and its number of layers."""
    initial_state: str = ""
    """A vector of the base model that is never trained, registered before the embedding."""
    layer_shapes: Callable[[Mapping[str, Any], LayerShape, int], Sequence[LayerShape]] | None = None
    """The shape of each layer, where they differ: from the configuration, what it says for all, and their number."""
    values_of_layers: Callable[[Mapping[str, Any], ModelShape], Mapping[int, Mapping[str, Any]]] | None = None
    """What keys that the derived table reads are in single layers, where a configuration says so in other words."""
    layer_inputs: Callable[[Mapping[str, Any]], LayerInputs | None] | None = None
    """The second embedding, of which every layer gets a part."""
    layer_blocks: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None
    """Where a layer is one block: the kind of each, from the configuration (`layers.py`)."""
    attends: bool = True
    """Whether any layer attends; otherwise each carries a state, and has no MLP."""
    weightless_qk_norms: Callable[[Mapping[str, Any], int], tuple[int, ...]] | None = None
    """In which layers norms without a weight, of which no row tells, norm queries and keys."""
    fp32_residual: Switch = False
    """Hidden states between the layers are in fp32, whatever the type of the weights."""
    shared_blocks: bool = False
    """Hybrid layers use transformer blocks in turn, in front of their Mamba-2 layer (`shared_blocks.py`)."""
    hyper_streams: tuple[str, int] | None = None
    """The key of the number of its residual streams, where learned mixtures join them (hyper-connections)."""
    square_mixtures: tuple[str, int] | None = None
    """Where these mixtures mix the streams with one another too, the key of how often their numbers are normalised."""
    mixture_rank: tuple[str, int] | None = None
    """Where streams lie side by side, and gates of all their features read them, the key of the rank of these gates."""
    parts: tuple[Traits, ...] = ()
    """The mechanisms that some of its layers have (`blocks/`)."""
    mlp: str = "mlp"
    """Empty: its linears stand in the layer itself."""
    mlp_ratio: int | None = None
    """The width of the MLP in hidden sizes, where the configuration does not say."""
    mlp_width: Callable[[Mapping[str, Any], int], int] | None = None
    """What the MLP makes of `intermediate_size`."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: Norm = Norm.WEIGHT
    experts: Experts | None = None
    latent: Latent | None = None
    low_rank: Callable[[Mapping[str, Any]], LowRank] | None = None
    """Projections of queries and outputs through fewer features, without latent keys."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a configuration leaves out, where they are not those of Llama's."""
    hidden_is_heads: bool = False
    """hidden_size has to be num_attention_heads x head_dim, whatever `head_dim` says: parts of the layer assume it."""
    window_of: Callable[[Mapping[str, Any]], int | None] | None = None
    """The sliding window of a configuration that does not state `sliding_window`."""
    window_key: str | None = None
    """The key without which a sliding window is not used."""
    window_only_in: Literal["", "mask", "attention"] = ""
    """Where transformers has the sliding window when its mask and its attention do not agree on one."""

    table: Mapping[str, Any] = field(default_factory=dict)
    """Of a plug-in's family: names and shapes of its parameters, as an entry of `tables/` has them."""
    refusals: tuple[Refusal, ...] = ()
    refused_axes: Mapping[str, str] = field(default_factory=dict)
    """Axes of the mesh that the runtime does not run the family over, and why."""

    def part(self, kind: type[T]) -> T | None:
        """What it says of a mechanism; None where it has none of that kind."""
        return next((one for one in self.parts if isinstance(one, kind)), None)

    @property
    def names_norms(self) -> bool:
        """Whether `norms` are those of a layer: rows name more, which are counted by themselves, or none."""
        return self.norm is Norm.NOTHING or bool(self.norm_gate or self.layer_inputs)

    def is_on(self, switch: Switch, config: Mapping[str, Any]) -> bool:
        """What a configuration makes of a trait."""
        if isinstance(switch, bool):
            return switch
        for key in (switch,) if isinstance(switch, str) else switch:
            if key in config or key in self.defaults:
                return bool(config[key] if key in config else self.defaults[key])
        return False


def family_from(stored: Mapping[str, Any]) -> Family:
    """A family from its entry in `families.json`: fields by their names, lists for tuples.

    "@MODULE:NAME" is a function below `parcompile.model`. An object with the key "@" is one with arguments, or an
    object of such a class. "=EXPRESSION" is a function of a configuration (`of_keys` without defaults).
    """
    found = {name: _read(value) for name, value in stored.items()}
    if "norm" in found:
        found["norm"] = Norm(found["norm"])
    for name, kind in (("experts", Experts), ("latent", Latent)):
        if name in found:
            found[name] = kind(**found[name])
    found["refusals"] = tuple(map(_refusal, stored.get("refusals", ())))
    return Family(**found)


def _refusal(stored: Mapping[str, Any]) -> Refusal:
    """Of a function, or an expression (`of_keys`)."""
    when = _read(stored["when"])
    asked = when if callable(when) else functools.partial(of_keys, text=when, defaults=stored.get("defaults"))
    return Refusal(stored["key"], lambda config: bool(asked(config)), stored["reason"])


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_read, value))
    if isinstance(value, str) and value.startswith("="):
        return functools.partial(of_keys, text=value[1:])
    if isinstance(value, str) and value.startswith("@"):
        return pkgutil.resolve_name(f"{__package__}.{value[1:]}")
    if not isinstance(value, dict):
        return value
    given = {name: _read(inner) for name, inner in value.items() if name != "@"}
    if "@" not in value:
        return given
    named = _read(f"@{value['@']}")
    return named(**given) if isinstance(named, type) else functools.partial(named, **given)


def of_keys(
    config: Mapping[str, Any], given: int | None = None, *, text: str, defaults: Mapping[str, Any] | None = None
) -> Any:
    """What an expression of keys says, as in tables; `given` is what a function gets beside the configuration.

    A key that is left out has its value in `defaults`, else null; `section.key` is one inside another. Lists become
    tuples.
    """
    sections = [(name, section) for name, section in config.items() if "." in text and isinstance(section, Mapping)]
    inner = {f"{name}.{key}": value for name, section in sections for key, value in section.items()}
    return frozen(evaluate(text, {**(defaults or {}), **config, **inner, "given": given}))


def by_type(trait: str) -> Mapping[str, Any]:
    """The values of a trait, by the types that have it."""
    types = shipped("parcompile.model", "families.json")
    return {name: traits[trait] for name, traits in types.items() if trait in traits}


def types_with(trait: str) -> frozenset[str]:
    """The types that have a trait."""
    return frozenset(by_type(trait))


# What the activation of an MLP keeps in memory for its backward pass, beside its input and its result, and makes in it.

_KEYS = ("hidden_act", "activation_function", "afn", "mlp_hidden_act")
"""What configurations call it."""

_OF_CLASS = by_type("activation")
"""Those that classes take by default, where they are not what torch computes in one piece from what it keeps."""

_ACTIVATIONS: Mapping[str, tuple[int, float]] = {
    **dict.fromkeys(("gelu_accurate", "gelu_new", "gelu_python_tanh"), (3, 2)),
    "gelu_10": (1, 2),
    "gelu_fast": (6, 2),
    "gelu_python": (2, 4),
    "quick_gelu": (1, 2),
    "relu": (-1, 2),  # its result alone, not its input
    "relu2": (0, 3),
    "laplace": (0, 5),
    "mish": (0, 8),
    "bloom_gelu": (0, 5),
    "xielu": (0, 3.5),
}
"""Numbers for each feature, in the type of the weights: those that are kept, counted with autograd's hooks for saved
tensors in transformers/activations.py, which writes these functions out; and those that are there at most in backward,
the gradient that comes among them, less those that are let go of, counted operator by operator."""


def activation_numbers(model_type: str, config: Mapping[str, Any]) -> tuple[int, float]:
    """Of each feature of an MLP: numbers more than its input and its result that are kept, and those of gradients."""
    name = next((config[key] for key in _KEYS if isinstance(config.get(key), str)), _OF_CLASS.get(model_type))
    if model_type in types_with("gelu_is_new") and name in (None, "gelu"):
        name = "gelu_new"  # what its class calls so
    return _ACTIVATIONS.get(str(name), (0, 1))
