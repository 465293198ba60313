"""Reads the dimensions out of a Hugging Face `config.json` (a dictionary).

Defaults are those of the family; a key that a family cannot do without is an error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from . import ModelConfigError
from .blocks.experts import MoeShape, experts_from
from .blocks.latent import MlaShape
from .catalogue import CAPPED_LOGITS, CAPPED_SCORES, DROPPED_SCORES, LOGIT_CAP, SCORE_CAP, SCORE_DROPOUTS, refusal
from .config_reader import ConfigReader
from .derived_rows import facts_of
from .families import FAMILIES, try_family
from .family import Family, activation_numbers, types_with
from .key_types import LISTS_OF_KINDS, check_lists, classified, fields_of, keys_of, mistyped, whole_heads
from .layers import LayerAttention, LayerBlocks, LayerShape, checked, kinds_of_layers
from .shape import Caps, Head, Heads, Mlp, ModelShape, Norms, Positions, Residual, Stack
from .shared_blocks import INPUTS, shared_blocks
from .tables import Table, in_layers, stated, table_of
from .user_module import InjectionProblem, UserModule

Config = Mapping[str, Any]


__all__ = ["FAMILIES", "InjectionError", "ModelConfigError", "shape_from_config"]

_LONG_CONTEXT = 16384
"""What transformers' Zamba2 makes of `max_position_embeddings` where `use_long_context` is on."""


class InjectionError(ModelConfigError):
    """Rules for a user module that do not fit its parameters."""

    def __init__(self, problems: tuple[InjectionProblem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems), "injection")
        self.problems = problems


def shape_from_config(config: Config) -> ModelShape:
    """The shape that a Hugging Face configuration describes; remembered, since rules and searches ask again and again.

    Raises:
        InjectionError: the rules of a user module do not fit it.
        ModelConfigError: an unknown model type, a missing key, or a value that is not a positive whole number.
    """
    try:
        said = json.dumps(config, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return _shape(config)
    name = config.get("model_type")
    # A plug-in may give a type another family.
    key = (said, id(FAMILIES.get(name)) if isinstance(name, str) else None)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        try_family(name, lambda: _tried(config))
        _KNOWN[key] = _shape(config)
    return _KNOWN[key]


def _tried(config: Config) -> None:
    from .derived_rows import parameter_table

    with contextlib.suppress(ModelConfigError):
        parameter_table(_shape(config))


_KNOWN: dict[tuple[str, int | None], ModelShape] = {}
_MOST_KNOWN = 512


def _shape(config: Config) -> ModelShape:
    if "injection" in config:
        return _user_module_shape(config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        sentence, instead = refusal(name, config)
        raise ModelConfigError(sentence, "model_type", instead)
    if (wrong := mistyped(name, config)) is not None:
        raise ModelConfigError(wrong[1], wrong[0])
    family = FAMILIES[name]
    read = ConfigReader(config, family.defaults, family.keys)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads") if family.attends else 0
    if heads and hidden % heads and whole_heads(name):
        raise ModelConfigError(
            f"hidden_size {hidden} / num_attention_heads {heads} is not whole: transformers' {name} refuses that, "
            "beside a head_dim too",
            "num_attention_heads",
            "write heads that divide hidden_size",
        )
    for refused in family.refusals:
        if refused.applies(config):
            raise ModelConfigError(f"{refused.key}: {refused.reason}", refused.key)
    if (by_modules := _by_modules(config, family)) is not config:
        config, read = by_modules, ConfigReader(by_modules, family.defaults, family.keys)
    if (block_kinds := family.layer_blocks and family.layer_blocks(config)) is None and LISTS_OF_KINDS & config.keys():
        check_lists(config, read.size("num_hidden_layers"))
    table = table_of(name)
    assert table is not None, name
    of_few = family.latent.read(config, hidden // heads, read.size) if family.latent else None
    kv_heads = _kv_heads(read, family, config, heads)
    blocks = None if block_kinds is None else LayerBlocks.of(block_kinds)
    shared = shared_blocks(config, read.size) if family.shared_blocks else None
    if shared is not None:
        blocks = LayerBlocks(attention=shared.layers, mlp=shared.layers, experts=())
    if not family.attends:
        blocks = LayerBlocks((), (), ())
    layers = read.size("num_hidden_layers") * family.layers_per_module if block_kinds is None else len(block_kinds)
    runs = None if family.runs is None else family.runs(config, layers)
    weightless, (kept, made) = family.weightless_qk_norms, activation_numbers(name, config)

    def size(key: tuple[str, int] | None) -> int:
        return read.size(*key) if key else 0

    shape = ModelShape(
        model_type=name,
        hidden_size=hidden,
        num_hidden_layers=layers if runs is None else runs.total,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=of_few.value_dim if of_few else _head_dim(read, family, hidden * (INPUTS if shared else 1), heads),
        intermediate_size=_width(read, family, name, hidden, config),
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=_positions(read, family, config),
        head=Head(labels=_labels(config)),
        positions=Positions(not (family.positions or family.fixed_positions), family.is_on(family.alibi, config)),
        mlp=Mlp(activation_numbers=kept, activation_gradients=made),
        heads=Heads(
            paired=family.paired_heads,
            weightless_qk_norms=weightless(config, layers) if weightless else (),
            gate=_gate(read, family, config, hidden, heads, of_few),
            low_rank=None if family.low_rank is None else family.low_rank(config),
        ),
        norms=Norms(len(family.norms), family.norms, gate=size(family.norm_gate)),
        caps=_caps(name, config),
        attention=LayerAttention(_sliding_window(config, family), projections=of_few),
        moe=_experts(read, family, config, blocks),
        stack=Stack(family.layers_per_module, runs, blocks, shared),
        layer_inputs=None if family.layer_inputs is None else family.layer_inputs(config),
        residual=Residual(
            fp32=family.is_on(family.fp32_residual, config),
            streams=size(family.hyper_streams),
            square_mixtures=size(family.square_mixtures),
            mixture_rank=size(family.mixture_rank),
        ),
        parts=tuple(block for one in family.parts for block in one.read(config, layers, read.size)),
    )
    if family.layer_shapes is not None:
        shape = _of_kinds(shape, family, config)
    shape = replace(shape, stated=_stated(table, family, config, shape))
    return replace(shape, **facts_of(shape))


_CLASSIFIER = "ForSequenceClassification"
"""How names of classes end that give labels of whole sequences."""
_LABELS = 2
"""Of a file that names none, as transformers reads it."""


def _labels(config: Config) -> int:
    """The labels of a classifier; 0 of a language model."""
    if (stated := config.get("num_labels")) is None:
        if not any(str(one).endswith(_CLASSIFIER) for one in config.get("architectures") or ()):
            return 0
        stated = len(config.get("id2label") or range(_LABELS))
    checked("num_labels", stated)
    if (name := str(config["model_type"])) not in classified():
        raise ModelConfigError(
            f"num_labels {stated}: transformers' {name} has no classifier of sequences that is built as those of other "
            "types (GenericForSequenceClassification)",
            "num_labels",
            f"leave it out, or choose another model_type: {', '.join(classified())}",
        )
    return stated


def _experts(read: ConfigReader, family: Family, config: Config, blocks: LayerBlocks | None) -> MoeShape | None:
    experts, listed = family.experts, None if blocks is None else blocks.experts
    if experts is None or (listed is None and experts.switch and not family.is_on(experts.switch, config)):
        return None
    return experts_from(read, experts, config, listed, family.layers_per_module)


def _kv_heads(read: ConfigReader, family: Family, config: Config, heads: int) -> int:
    if not family.attends:
        return 0
    if family.kv_heads is not None:
        return family.kv_heads(config, heads)
    return read.size("num_key_value_heads", heads) if family.latent or read.counts("num_key_value_heads") else heads


def _positions(read: ConfigReader, family: Family, config: Config) -> int:
    if not family.attends:
        return 0
    if family.shared_blocks and config.get("use_long_context"):
        return _LONG_CONTEXT
    return read.size("max_position_embeddings")


def _by_modules(config: Config, family: Family) -> Config:
    """The same with a count of modules, where these hold several layers and the configuration counts layers."""
    key, together = family.keys.get("num_hidden_layers"), family.layers_per_module
    count = config.get("num_hidden_layers")
    if together == 1 or key is None or not isinstance(count, int):
        return config
    others = {name: value for name, value in config.items() if name != "num_hidden_layers"}
    return {key: count // together, **others}


def _caps(name: str, config: Config) -> Caps:
    given = [config[one] for one in SCORE_DROPOUTS if one in config]
    return Caps(
        logits=name in CAPPED_LOGITS and bool(config.get(LOGIT_CAP, CAPPED_LOGITS[name])),
        scores=bool(config.get(SCORE_CAP, CAPPED_SCORES.get(name))),
        dropout=any(given) if given else name in DROPPED_SCORES,
    )


def _stated(table: Table, family: Family, config: Config, shape: ModelShape) -> tuple[tuple[str, Hashable], ...]:
    """What the rows of a derived table follow from. A spec may write keys under the names that others give them."""
    named = {key: config[name] for name, key in family.keys.items() if key and name in config and key not in config}
    own = {} if family.values_of_layers is None else family.values_of_layers(config, shape)
    return stated(table, {**config, **named, **({"per_layer_config": None} if own else {})}) + in_layers(own)


def _of_kinds(shape: ModelShape, family: Family, config: Config) -> ModelShape:
    """The same, with the kinds of its layers; where all are of one kind, the whole is."""
    assert family.layer_shapes is not None
    common = LayerShape(
        shape.num_key_value_heads,
        shape.head_dim,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.attention,
    )
    kinds = kinds_of_layers(family.layer_shapes(config, common, shape.num_hidden_layers))
    found = replace(shape, kinds=kinds)
    if len(kinds) == 1:
        ((_, found),) = found.by_kind
    return found


def _user_module_shape(config: Config) -> ModelShape:
    module, read = UserModule.of(config), ConfigReader(config, {}, {})
    hidden, heads, vocabulary = read.size("hidden_size"), read.size("num_attention_heads"), read.size("vocab_size")
    if problems := tuple(module.problems(vocabulary)):
        raise InjectionError(problems)
    return ModelShape(
        model_type="module",
        hidden_size=hidden,
        num_hidden_layers=read.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=read.size("num_key_value_heads", heads),
        head_dim=_head_dim(read, Family(), hidden, heads),
        intermediate_size=read.size("intermediate_size"),
        vocab_size=vocabulary,
        max_position_embeddings=read.size("max_position_embeddings"),
        head=Head(bool(config.get("tie_word_embeddings", False))),
        user_module=module,
    )


_WIDTH_LEFT_OUT = types_with("width_left_out")
"""Types whose class may have no width of dense MLPs."""


def _width(read: ConfigReader, family: Family, name: str, hidden: int, config: Config) -> int:
    """The width of the dense MLP."""
    if not family.attends:
        return 0
    by_layer = config.get("intermediate_size")
    if family.layer_shapes is not None and isinstance(by_layer, list) and by_layer:
        if not all(type(one) is int and one > 0 for one in by_layer):
            said = json.dumps(by_layer)[:60]
            raise ModelConfigError(f"intermediate_size is {said}: it has to list whole numbers", "intermediate_size")
        return int(max(by_layer))  # each layer has its own
    if family.experts is None:
        width = read.size("intermediate_size", family.mlp_ratio and family.mlp_ratio * hidden)
        return width if family.mlp_width is None else family.mlp_width(config, width)
    key, default = family.experts.dense_width
    # Where no layer is dense, a class may have no such key, or none for it.
    missing = name in _WIDTH_LEFT_OUT and not read.has(key)
    return read.size(*(family.experts.width if missing else (key, default)))


def _gate(read: ConfigReader, family: Family, config: Config, hidden: int, heads: int, of_few: MlaShape | None) -> int:
    if not family.query_gate and not (family.gate and family.is_on(family.gate_key, config)):
        return 0
    of_heads = family.gate_of_heads is not None and family.gate_of_heads(config)
    if of_heads:
        return 1
    return of_few.value_dim if of_few else _head_dim(read, family, hidden, heads)


def _head_dim(read: ConfigReader, family: Family, hidden: int, heads: int) -> int:
    if not family.attends:
        return 0
    if read.has("head_dim") and read.counts("head_dim"):
        width = read.size("head_dim")
        if family.hidden_is_heads and heads * width != hidden:
            raise ModelConfigError(
                f"num_attention_heads {heads} x head_dim {width} = {heads * width} is not hidden_size {hidden}, which "
                "transformers' layers of this model type need",
                "head_dim",
            )
        return width
    if hidden % heads:
        raise ModelConfigError(
            f"hidden_size {hidden} / num_attention_heads {heads} is not whole and head_dim is not given",
            "num_attention_heads",
        )
    return hidden // heads


def _sliding_window(config: Config, family: Family) -> int | None:
    if family.window_key is not None and not config.get(family.window_key, False):
        return None
    default = family.defaults.get("sliding_window") if family.window_of is None else family.window_of(config)
    window = config.get("sliding_window", default)
    name = str(config["model_type"])
    if window is not None and not isinstance(window, int) and "sliding_window" in keys_of(name):
        raise ModelConfigError(f"sliding_window is {window!r}: it has to be a whole number or null", "sliding_window")
    if isinstance(window, int) and window < 1 and "sliding_window" in fields_of(name):
        raise ModelConfigError(f"sliding_window is {window}: a window has a token or more", "sliding_window")
    return window if isinstance(window, int) and window > 0 else None
