"""gpt-neox's keys of the model. What kind of layers there are decides the model type; see `architecture`.

Read off gpt-neox of 2026-05-20: megatron/model/transformer.py, activations.py, norms.py, word_embeddings.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from parcompile.backends.architecture import Architecture, InexpressibleError, Rope, config_of
from parcompile.backends.reading import Draft, Source, SpecPath, Undecided
from parcompile.text.typed import integer, number

from . import WORDS

_MODEL: SpecPath = ("model",)
SIZES: Sequence[str] = WORDS["sizes"]
OPTIONS: Sequence[str] = [*SIZES, *WORDS["options"]]
"""The keys that this module reads."""
_ACTIVATIONS: Mapping[str, tuple[bool, str]] = WORDS["activations"]
"""Whether each is gated, and what it computes."""
_NORMS: Mapping[str, bool] = WORDS["norms"]
"""Whether each is an RMSNorm."""


def described(source: Source) -> list[str]:
    """The keys that give sizes of a model."""
    return [name for name in SIZES[:3] if source.has(name)]


def mlp_width(given: int, multiple: int, *, gated: bool) -> int:
    """The inner width of an MLP (`ParallelMLP`).

    A gated one is scaled by 2/3, and half of that is each of its two parts: the key counts both.

    Raises:
        InexpressibleError: rounding makes the two linears disagree, so that gpt-neox itself stops.
    """
    first = math.floor(given * 2 / 3) if gated else given
    second = first // 2 if gated else given
    first = -(-first // (2 * multiple)) * 2 * multiple
    second = -(-second // multiple) * multiple
    if (first // 2 if gated else first) != second:
        what = f"intermediate_size {given} with mlp_multiple_of {multiple}"
        raise InexpressibleError(what, f"the MLP's linears would be {first} and {second} wide and do not fit together")
    return second


def read(source: Source, draft: Draft) -> None:
    """The model, when the file describes one.

    Raises:
        InexpressibleError: a spec has no word for it.
        UndecidedError: the file leaves a value open.
    """
    _refuse_other_models(source)
    if not described(source):
        return
    sizes: dict[str, Any] = {}
    for name in SIZES:
        key = "num_hidden_layers" if name == "num_layers" else name
        sizes[name] = draft.carry(source, name, (*_MODEL, key), _positive)
        if sizes[name] is None:
            draft.ask((*_MODEL, key), f"the file does not say {name}")
    draft.ask((*_MODEL, "vocab_size"), "the file does not say it: the tokenizer decides")
    if None in (sizes["hidden_size"], sizes["num_attention_heads"]):
        return
    wanted, own = _layers(source, sizes["hidden_size"], sizes["num_attention_heads"])
    draft.fill(_MODEL, config_of(wanted, own))


def _layers(source: Source, hidden: int, heads: int) -> tuple[Architecture, dict[str, int]]:
    """The switches of a layer, and the sizes of its heads and its MLP."""

    def value(name: str) -> Any:
        return source.value(name, _MODEL)

    activation, norm = str(value("activation")), str(value("norm"))
    if activation not in _ACTIVATIONS:
        raise InexpressibleError(f"activation {activation}", "a spec has GELU, ReLU and SiLU, with a gate or without")
    gated, computes = _ACTIVATIONS[activation]
    if activation == "gelu" and value("bias_gelu_fusion") is True:
        computes = "gelu_tanh"  # the fused kernel computes the approximation
    elif activation != "gelu":
        source.ignore("bias_gelu_fusion", "the activation is not gelu")
    if norm not in _NORMS:
        raise InexpressibleError(f"norm {norm}", "a spec has LayerNorm and RMSNorm")
    rms = _NORMS[norm]
    multiple = _positive(value("mlp_multiple_of"), "mlp_multiple_of")
    kv_heads = source.integer("num_kv_heads", _MODEL) or heads
    source.ignore("rms_norm_epsilon" if not rms else "layernorm_epsilon", f"norm is {norm}")
    return (
        Architecture(
            rms_norm=rms,
            epsilon=_number(source, "rms_norm_epsilon" if rms else "layernorm_epsilon"),
            activation=computes,
            gated=gated,
            biases=_biases(source, rms=rms),
            rope=_positions(source),
            tied=value("no_weight_tying") is not True,
            grouped=kv_heads != heads,
            parallel=_is_parallel(source),
            window=_window(source),
            attention_dropout=_number(source, "attention_dropout"),
            hidden_dropout=_number(source, "hidden_dropout"),
            embedding_dropout=_number(source, "hidden_dropout"),
            initializer_range=_deviation(source),
        ),
        {
            "intermediate_size": mlp_width(_given_width(source, hidden), multiple, gated=gated),
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
        },
    )


def _positive(value: object, name: str) -> int:
    return integer(value, name, least=1)


def _number(source: Source, name: str) -> float:
    """A number that has a default."""
    return number(source.value(name, _MODEL), name)


def _given_width(source: Source, hidden: int) -> int:
    if width := source.integer("intermediate_size", _MODEL):
        return width
    factor = source.number("expansion_factor", _MODEL)
    return integer(math.floor(factor * hidden), "expansion_factor", least=1) if factor else 4 * hidden


def _biases(source: Source, *, rms: bool) -> tuple[bool, bool, bool]:
    attention, mlp = (source.value(name, _MODEL) is True for name in ("use_bias_in_attn_linear", "use_bias_in_mlp"))
    if source.value("use_bias_in_norms", _MODEL) is not True and not rms:
        raise InexpressibleError("use_bias_in_norms false", "a spec's LayerNorm has a bias")
    if rms:
        source.ignore("use_bias_in_norms", "an RMSNorm has none")
    return attention, attention, mlp


def _positions(source: Source) -> Rope | None:
    kind = source.value("pos_emb", _MODEL)
    if kind not in ("learned", "rotary"):
        raise InexpressibleError(f"pos_emb {kind}", "a spec has rotary and learned positions")
    if kind == "learned":
        source.ignore(("rotary_pct", "rotary_emb_base"), "pos_emb is learned")
        return None
    percent, base = (_number(source, name) for name in ("rotary_pct", "rotary_emb_base"))
    return Rope(base, percent, interleaved=source.value("rotary_interleaved", _MODEL) is True)


def _is_parallel(source: Source) -> bool:
    parallel, tied = (source.value(name, _MODEL) is True for name in ("gpt_j_residual", "gpt_j_tied"))
    if parallel and tied:
        raise InexpressibleError("gpt_j_tied", "attention and MLP side by side have a norm each")
    source.ignore("gpt_j_tied", "it counts with gpt_j_residual only")
    return parallel


def _window(source: Source) -> int | None:
    """Tokens that a query attends to: gpt-neox counts those before it, and only its flash attention has a window."""
    width = source.integer("sliding_window_width", _MODEL)
    if width is None:
        return None
    if _kinds(source) != {"flash"}:
        source.ignore("sliding_window_width", "attention_config is not flash")
        return None
    return width + 1


def _deviation(source: Source) -> float:
    deviation = _number(source, "init_method_std")
    why = "a spec draws all weights from a normal distribution: load a checkpoint to start alike"
    source.lose(("init_method", "output_layer_init_method"), why)
    return deviation


def _kinds(source: Source) -> set[str]:
    """The kinds of attention that are asked for: `[[["flash"], 32]]` names one for 32 layers."""
    given = source.value("attention_config", _MODEL)
    names: set[str] = set()
    for entry in given if isinstance(given, list) else ():
        kinds = entry[0] if isinstance(entry, list) and entry else entry
        names.update(str(one) for one in (kinds if isinstance(kinds, list) else [kinds]))
    return names or {"global"}


def _refuse_other_models(source: Source) -> None:
    """Refuses what is no decoder of a spec."""
    other = sorted(_kinds(source) - {"global", "flash"})
    if other:
        raise InexpressibleError(f"attention_config {', '.join(other)}", "a spec has full attention and windows")
    experts = source.value("moe_num_experts", _MODEL)
    if isinstance(experts, int) and experts > 1:
        raise InexpressibleError(f"moe_num_experts {experts}", "gpt-neox routes its experts as no model type here does")
    for name, what in WORDS["other models"].items():
        value = source.value(name, _MODEL)
        if value not in (None, False) and not isinstance(value, Undecided):
            raise InexpressibleError(f"{name} {value}".removesuffix(" True"), what)
