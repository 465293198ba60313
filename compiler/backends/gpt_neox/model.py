"""gpt-neox's options of the model (megatron/model/transformer.py, gpt2_model.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from parcompile.backends.architecture import Architecture, InexpressibleError, Rope, architecture_of, config_of
from parcompile.backends.losses import Loss
from parcompile.backends.reading import Draft, Source, SpecPath, UndecidedError
from parcompile.backends.table import Arguments, Entry, Part, Row
from parcompile.spec import Spec

_MODEL: SpecPath = ("model",)
SIZES: Mapping[str, str] = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
    }
)
"""Sizes that every file has to say, and what Hugging Face calls them."""
OPTIONS = (
    *SIZES,
    "intermediate_size",
    "expansion_factor",
    "mlp_multiple_of",
    "mlp_type",
    "num_kv_heads",
    "sliding_window_width",
    "norm",
    "layernorm_epsilon",
    "rms_norm_epsilon",
    "pos_emb",
    "rotary_pct",
    "rotary_emb_base",
    "no_weight_tying",
    "activation",
    "bias_gelu_fusion",
    "use_bias_in_attn_linear",
    "use_bias_in_mlp",
    "gpt_j_residual",
    "gpt_j_tied",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "attention_config",
)
_GATED: Mapping[str, str] = MappingProxyType({"swiglu": "silu", "geglu": "gelu", "reglu": "relu"})
_PLAIN: Mapping[str, str] = MappingProxyType({"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"})
_LARGE_BASE = 2**53


def architecture(spec: Spec) -> Architecture:
    """The switches of the plan's model.

    Raises:
        InexpressibleError: they cannot be described.
    """
    return architecture_of(spec.model.hf_config, spec.model.shape)


def _write(spec: Spec) -> Arguments:
    found, shape = architecture(spec), spec.model.shape
    _refuse_unknown(found)
    width = shape.intermediate_size
    options: Arguments = {
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "max_position_embeddings": max(shape.max_position_embeddings, spec.training.sequence_length),
        # A gated MLP takes two thirds of what is written, and half of that for each of its two parts.
        "intermediate_size": 3 * width if found.gated else width,
        "mlp_multiple_of": 1,
        "norm": "rmsnorm" if found.rms_norm else "layernorm",
        ("rms_norm_epsilon" if found.rms_norm else "layernorm_epsilon"): found.epsilon,
        **_write_positions(found),
        **_write_activation(found),
        "no_weight_tying": not found.tied,
        "use_bias_in_attn_linear": found.biases[0],
        "use_bias_in_mlp": found.biases[2],
        "gpt_j_residual": found.parallel,
        "gpt_j_tied": False,
        "attention_dropout": found.attention_dropout,
        "hidden_dropout": found.hidden_dropout,
        "init_method_std": found.initializer_range,
    }
    if found.grouped:
        options["num_kv_heads"] = shape.num_key_value_heads
    if found.window is not None:
        # gpt-neox counts the tokens before a query, Hugging Face counts the query too.
        options["sliding_window_width"] = found.window - 1
        options["attention_config"] = [[["flash"], shape.num_hidden_layers]]
    return options


def _refuse_unknown(found: Architecture) -> None:
    refused = (
        (found.router is not None, "experts", "gpt-neox routes tokens in another way"),
        (found.latent, "latent attention", "gpt-neox has none"),
        (found.qk_norm, "norms of queries and keys", "gpt-neox norms all heads of a rank together"),
        (found.centered_norm, "a norm with 1 + weight", "gpt-neox has none"),
        (found.own_head_dim, "head_dim", "gpt-neox divides hidden_size by the heads"),
        (found.biases[0] != found.biases[1], "biases of queries, keys and values alone", "gpt-neox has one switch"),
        (found.rope is not None and bool(found.rope.scaling), "rope_scaling", "gpt-neox has no option for it"),
    )
    for wrong, what, why in refused:
        if wrong:
            raise InexpressibleError(what, why)


def _write_positions(found: Architecture) -> Arguments:
    if found.rope is None:
        return {"pos_emb": "learned"}
    if found.rope.theta % 1 or found.rope.theta > _LARGE_BASE:
        raise InexpressibleError(f"rope_theta {found.rope.theta}", "rotary_emb_base is a whole number")
    return {"pos_emb": "rotary", "rotary_pct": found.rope.percent, "rotary_emb_base": int(found.rope.theta)}


def _write_activation(found: Architecture) -> Arguments:
    if found.gated:
        names = {computes: name for name, computes in _GATED.items()}
        if found.activation in names:
            return {"activation": names[found.activation]}
    elif found.activation == "gelu_tanh" and found.biases[2]:
        # The fused kernel of bias and GELU computes the approximation with tanh.
        return {"activation": "gelu", "bias_gelu_fusion": True}
    elif found.activation in _PLAIN:
        fused = {"bias_gelu_fusion": False} if found.activation == "gelu" else {}
        return {"activation": found.activation, **fused}
    gated = "a gated MLP" if found.gated else "an MLP without a gate"
    raise InexpressibleError(f"{found.activation} in {gated}", "gpt-neox has no such activation")


def _losses(spec: Spec) -> Iterator[Loss]:
    try:
        found = architecture(spec)
        _write(spec)
    except InexpressibleError as error:
        yield Loss(error.what, error.why, "another target", fatal=True)
        return
    if found.embedding_dropout != found.hidden_dropout:
        yield Loss(
            f"dropout {found.embedding_dropout} of the embedding",
            f"hidden_dropout {found.hidden_dropout} is used there too",
            "equal dropouts",
        )


def described(source: Source) -> list[str]:
    """The options that give sizes of a model."""
    return [name for name in ("num_layers", "hidden_size", "num_attention_heads") if source.has(name)]


def _read(source: Source, draft: Draft) -> None:
    """The model, when the file describes one; files are combined, and many do not.

    Raises:
        InexpressibleError: a spec has no word for it.
    """
    _refuse_other_models(source)
    if not described(source):
        for name in OPTIONS:
            if name in source.given:
                source.used.setdefault(name, set()).add(_MODEL)
        return
    sizes: dict[str, Any] = {}
    for name, key in SIZES.items():
        sizes[key] = draft.carry(source, name, (*_MODEL, key), int)
        if sizes[key] is None:
            draft.ask((*_MODEL, key), f"the file does not say {name}; it may stand in another one")
    draft.ask((*_MODEL, "vocab_size"), "a gpt-neox file does not say it: the tokenizer decides")
    try:
        _read_layers(source, draft, sizes)
    except UndecidedError as error:
        draft.leave_open(source, error, _MODEL)
    for name in OPTIONS:
        if name in source.given and name not in source.used and name not in source.reasons:
            source.used[name] = {_MODEL}


def _refuse_other_models(source: Source) -> None:
    experts = source.given.get("moe_num_experts")
    if isinstance(experts, int) and experts > 1:
        raise InexpressibleError(f"moe_num_experts {experts}", "a spec has no word for the router of gpt-neox")
    for kind in kinds(source.given.get("attention_config")):
        if kind not in ("global", "flash"):
            raise InexpressibleError(f"attention_config {kind}", "a spec has layers of full attention alone")
    for name, what in (("use_mup", "its scales are those of µP"), ("soft_prompt_tuning", "it trains a soft prompt")):
        if source.given.get(name):
            raise InexpressibleError(name, what)


def kinds(found: Any) -> Iterator[str]:
    """The kinds of attention in a nested list of kinds and numbers of layers."""
    if isinstance(found, str) and found != "all":
        yield found
    elif isinstance(found, list):
        for one in found:
            yield from kinds(one)


def _read_layers(source: Source, draft: Draft, sizes: dict[str, Any]) -> None:
    def value(name: str) -> Any:
        return source.value(name, _MODEL)

    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    rms, epsilon = _read_norm(source)
    gated, activation = _read_activation(source)
    attention, mlp = value("use_bias_in_attn_linear") is not False, value("use_bias_in_mlp") is not False
    rope, groups, window = _read_positions(source), value("num_kv_heads"), value("sliding_window_width")
    if value("gpt_j_tied") is True and value("gpt_j_residual") is True:
        raise InexpressibleError("gpt_j_tied", "attention and MLP share a norm")
    if value("use_qk_layernorm") is True:
        raise InexpressibleError("use_qk_layernorm", "all heads of a rank are normed together")
    hidden_dropout = float(value("hidden_dropout"))
    value("attention_config")
    if hidden is None or heads is None:
        return  # asked for already
    wanted = Architecture(
        rms_norm=rms,
        epsilon=epsilon,
        activation=activation,
        gated=gated,
        biases=(attention, attention, mlp),
        rope=rope,
        tied=value("no_weight_tying") is not True,
        grouped=groups is not None and groups != heads,
        parallel=value("gpt_j_residual") is True,
        window=None if window is None else int(window) + 1,
        attention_dropout=float(value("attention_dropout")),
        hidden_dropout=hidden_dropout,
        embedding_dropout=hidden_dropout,
        initializer_range=float(value("init_method_std")),
    )
    own = {"intermediate_size": mlp_width(source, hidden, gated=gated), "num_key_value_heads": groups or heads}
    for key, one in config_of(wanted, own, preferred="gpt_neox").items():
        draft.set((*_MODEL, key), one, said=True)


def _read_norm(source: Source) -> tuple[bool, float]:
    kind = str(source.value("norm", _MODEL)).removeprefix("te_")
    if kind not in ("rmsnorm", "layernorm"):
        raise InexpressibleError(f"norm {kind}", "a spec has rmsnorm and layernorm")
    names = {"rmsnorm": "rms_norm_epsilon", "layernorm": "layernorm_epsilon"}
    other = names["layernorm" if kind == "rmsnorm" else "rmsnorm"]
    source.ignore(other, f"the norm is {kind}")
    return kind == "rmsnorm", float(source.value(names[kind], _MODEL))


def _read_activation(source: Source) -> tuple[bool, str]:
    name = str(source.value("activation", _MODEL)).lower()
    fused = source.value("bias_gelu_fusion", _MODEL) is True
    if name in _GATED:
        return True, _GATED[name]
    if source.given.get("mlp_type") == "llama":
        return True, _PLAIN.get(name, name)  # versions up to 2024 had the gate as a type of MLP
    if name not in _PLAIN:
        raise InexpressibleError(f"activation {name}", "a spec has no such activation")
    return False, "gelu_tanh" if name == "gelu" and fused else _PLAIN[name]


def _read_positions(source: Source) -> Rope | None:
    kind = source.value("pos_emb", _MODEL)
    if kind == "learned":
        for name in ("rotary_pct", "rotary_emb_base"):
            source.ignore(name, "positions are learned")
        return None
    if kind != "rotary":
        raise InexpressibleError(f"pos_emb {kind}", "a spec has rotary and learned positions")
    percent, base = source.value("rotary_pct", _MODEL), source.value("rotary_emb_base", _MODEL)
    interleaved = source.given.get("rotary_interleaved") is True
    return Rope(float(base), float(percent), interleaved=interleaved)


def mlp_width(source: Source, hidden: int, *, gated: bool) -> int:
    """The hidden width of an MLP, or of each of the two parts before a gate.

    Raises:
        UndecidedError: the file does not say a value.
    """
    given, factor = source.value("intermediate_size", _MODEL), source.value("expansion_factor", _MODEL)
    if source.given.get("mlp_type") == "llama":
        source.value("mlp_type", _MODEL)
        return int(given) if given else 256 * math.ceil(int(2 * hidden * 4 / 3) / 256)
    multiple = int(source.value("mlp_multiple_of", _MODEL))
    width = int(given) if given else int(factor * hidden) if factor else 4 * hidden
    if gated:
        # "auto scale so gated activations has equal parameters"
        width = int(width * 2 / 3) // 2
    return multiple * math.ceil(width / multiple)


ROWS: tuple[Row, ...] = (
    Entry("make_vocab_size_divisible_by", ("parallelism", "make_vocab_size_divisible_by")),
    Part(OPTIONS, _write, _read, _losses),
)
"""The model, in the order in which it is written."""
