"""Reads the dimensions out of a Hugging Face `config.json` (a dictionary).

Defaults are those of the family; a key that a family cannot do without is an error.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from .catalogue import refusal
from .derived_rows import by_hand, norm_names
from .families import FAMILIES
from .family import Experts, Family, Latent, Norm, QkNorm
from .indexer import IndexerShape, indexer_shape
from .key_types import mistyped
from .layer_blocks import LayerBlocks
from .layer_kind import LayersError, LayerShape, kinds_of_layers
from .layer_period import LayerPeriod
from .recurrent.problems import LayerListError
from .recurrent.reading import recurrent_shape
from .recurrent.shape import RecurrentShape
from .shape import MlaShape, ModelShape, MoeShape
from .shared_blocks import INPUTS, SharedBlocks, shared_blocks
from .tables import Table, TableError, class_default, stated, table_of
from .user_module import InjectionProblem, UserModule

__all__ = ["FAMILIES", "ModelConfigError", "shape_from_config"]

Config = Mapping[str, Any]

_LONG_CONTEXT = 16384
"""What transformers' Zamba2 makes of `max_position_embeddings` where `use_long_context` is on."""


class ModelConfigError(ValueError):
    """A configuration that does not describe a model.

    `key` is the key at fault, when it is one; `instead` says what to do, where there is more to say than the message.
    """

    def __init__(self, message: str, key: str | None = None, instead: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.instead = instead


class InjectionError(ModelConfigError):
    """Rules for a user module that do not fit its parameters."""

    def __init__(self, problems: tuple[InjectionProblem, ...]) -> None:
        super().__init__("; ".join(problem.message for problem in problems), "injection")
        self.problems = problems


def shape_from_config(config: Config) -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Raises:
        InjectionError: the rules of a user module do not fit it.
        ModelConfigError: an unknown model type, a missing key, or a value that is not a positive whole number.
    """
    if "injection" in config:
        return _user_module_shape(config)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        sentence, instead = refusal(name, config)
        raise ModelConfigError(sentence, "model_type", instead)
    if (wrong := mistyped(name, config)) is not None:
        raise ModelConfigError(wrong[1], wrong[0])
    family = FAMILIES[name]
    read = _Reader(config, family, family.keys)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    for refused in family.refusals:
        if refused.applies(config):
            raise ModelConfigError(f"{refused.key}: {refused.reason}", refused.key)
    table = None if by_hand(name) else table_of(name)
    for key in sorted(family.switches):
        if key in config and config[key] is None and key not in family.null_is_off:
            message = f"{key} is null, which transformers refuses: write true or false, or leave the key out"
            raise ModelConfigError(message, key)
    mla = _mla(read, family.latent, hidden // heads) if family.latent else None
    kv_heads = family.kv_heads(config, heads) if family.kv_heads else read.size("num_key_value_heads", heads)
    norms = family.norms_of(config)
    block_kinds = _block_kinds(family, config)
    blocks = None if block_kinds is None else LayerBlocks.of(block_kinds)
    shared = _shared_blocks(read, family, config)
    if shared is not None:
        blocks = LayerBlocks(attention=shared.layers, mlp=shared.layers, experts=())
    layers = read.size("num_hidden_layers") if block_kinds is None else len(block_kinds)
    runs = None if family.runs is None else family.runs(config, layers)
    shape = ModelShape(
        model_type=name,
        hidden_size=hidden,
        num_hidden_layers=layers if runs is None else runs.total,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=mla.v_head_dim if mla else _head_dim(read, family, hidden * (INPUTS if shared else 1), heads),
        intermediate_size=_width(read, family, name, hidden, config),
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=_LONG_CONTEXT
        if shared and config.get("use_long_context")
        else read.size("max_position_embeddings"),
        tie_word_embeddings=not family.never_tied and family.is_on("tie_word_embeddings", config),
        rotary=not (family.positions or family.fixed_positions),
        alibi=family.is_on(family.alibi, config),
        gated_mlp=family.gated,
        qkv_bias=family.is_on(family.qkv_bias, config),
        attention_output_bias=family.is_on(family.output_bias, config),
        mlp_bias=family.is_on(family.mlp_bias, config),
        head_bias=family.is_on(family.head_bias, config),
        paired_heads=family.paired_heads,
        qk_norm=family.qk_norm is not QkNorm.NONE and family.is_on(family.qk_norm_key or True, config),
        attention_gate=_gate(read, family, config, hidden, heads, mla),
        norm_gate=read.size(*family.norm_gate) if family.norm_gate else 0,
        norms_per_layer=len(norms),
        norm_names=norms,
        norm_bias=family.norm is Norm.WEIGHT_AND_BIAS or family.is_on(family.norm_bias, config),
        sliding_window=_sliding_window(config, family),
        moe=_experts(read, family, config, blocks),
        mla=mla,
        indexer=_indexer(read, family, config),
        runs=runs,
        recurrent=_recurrent(read, family, config, layers),
        blocks=blocks,
        shared_blocks=shared,
        layer_inputs=None if family.layer_inputs is None else family.layer_inputs(config),
        altup=None if family.altup is None else family.altup(config),
        stated=() if table is None else _stated(table, family, config),
    )
    if table is not None:
        norms = norm_names(shape)
        shape = replace(shape, norms_per_layer=len(norms), norm_names=norms)
    return shape if family.layer_shapes is None else _of_kinds(shape, family, config)


def _stated(table: Table, family: Family, config: Config) -> tuple[tuple[str, Hashable], ...]:
    """What the rows of a derived table follow from. A spec may write keys under the names that others give them."""
    own = {key: config[name] for name, key in family.keys.items() if key and name in config and key not in config}
    try:
        return stated(table, {**config, **own})
    except TableError as error:
        raise ModelConfigError(str(error), error.key) from error


def _of_kinds(shape: ModelShape, family: Family, config: Config) -> ModelShape:
    """The same, with the kinds of its layers; where all are of one kind, the whole is."""
    assert family.layer_shapes is not None
    common = LayerShape(**{one.name: getattr(shape, one.name) for one in fields(LayerShape)})
    try:
        kinds = kinds_of_layers(family.layer_shapes(config, common, shape.num_hidden_layers))
    except LayersError as error:
        raise ModelConfigError(str(error), error.key) from error
    found = replace(shape, kinds=kinds)
    if len(kinds) == 1:
        ((_, found),) = found.by_kind
    return found


def _block_kinds(family: Family, config: Config) -> tuple[str, ...] | None:
    if family.layer_blocks is None:
        return None
    try:
        return family.layer_blocks(config)
    except LayerListError as error:
        raise ModelConfigError(str(error), error.key) from error


def _shared_blocks(read: _Reader, family: Family, config: Config) -> SharedBlocks | None:
    if not family.shared_blocks:
        return None
    try:
        return shared_blocks(config, read.size)
    except LayerListError as error:
        raise ModelConfigError(str(error), error.key) from error


def _experts(read: _Reader, family: Family, config: Config, blocks: LayerBlocks | None) -> MoeShape | None:
    if family.experts is None or not _has_experts(read, family, family.experts, config, blocks):
        return None
    return _moe(read, family.experts)


def _has_experts(read: _Reader, family: Family, experts: Experts, config: Config, blocks: LayerBlocks | None) -> bool:
    if blocks is not None:
        return bool(blocks.experts)
    if experts.one_is_dense and read.aliased(*experts.count, alias=experts.count_alias) == 1:
        return False
    if experts.period is not None and not _layers_of_period(read, experts):
        return False
    return not experts.switch or family.is_on(experts.switch, config)


def _recurrent(read: _Reader, family: Family, config: Config, layers: int) -> RecurrentShape | None:
    if family.recurrent is None:
        return None
    try:
        return recurrent_shape(family.recurrent, config, layers, read.size)
    except (LayerListError, LayersError) as error:
        raise ModelConfigError(str(error), error.key) from error


def _indexer(read: _Reader, family: Family, config: Config) -> IndexerShape | None:
    if family.indexer is None:
        return None
    try:
        return indexer_shape(family.indexer, config, read.size("num_hidden_layers"), read.size)
    except LayersError as error:
        raise ModelConfigError(str(error), error.key) from error


def _user_module_shape(config: Config) -> ModelShape:
    module, read = UserModule.of(config), _Reader(config, Family(), {})
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
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        user_module=module,
    )


def _class_defaults(config: Config) -> dict[str, int]:
    """Sizes that the class of a model type has for keys that are left out."""
    name = str(config.get("model_type"))
    found = {key: class_default(name, key) for key in ("num_key_value_heads", "head_dim")}
    return {key: value for key, value in found.items() if value is not None}


class _Reader:
    """Reads sizes under the family's own names and says which key is wrong."""

    def __init__(self, config: Config, family: Family, names: Mapping[str, str | None]) -> None:
        self._config = config
        self._defaults = {**_class_defaults(config), **family.defaults}
        self._names = names

    def size(self, name: str, default: int | None = None) -> int:
        """The value of a key; where it is left out the family's default, and where it is null, too, `default`."""
        key = self._names.get(name, name) or ""
        value = self._config.get(key, self._config.get(name) if key else None)
        if value is None:
            found = default if self.is_null(key or name) else self._defaults.get(name, default)
            if found is None:
                raise ModelConfigError(f"{key or name} is missing", key or name)
            return int(found)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"{key} is {value!r}: it has to be a whole number of 1 or more", key)
        return value

    def aliased(self, name: str, default: int | None, alias: str | None) -> int:
        """The value of a key that has another name, under which it may stand instead."""
        if alias is None or self._config.get(alias) is None:
            return self.size(name, default)
        if self._config.get(name) not in (None, self._config[alias]):
            raise ModelConfigError(f"{name} and {alias} are the same key, and differ", alias)
        return self.size(alias)

    def has(self, name: str) -> bool:
        """Whether there is a value, or the family has a default for a key that is left out."""
        return self._config[name] is not None if name in self._config else name in self._defaults

    def is_null(self, name: str) -> bool:
        """Whether the key is there without a value."""
        return name in self._config and self._config[name] is None

    def layers(self, name: str) -> tuple[int, ...]:
        """A list of layers, which may be left out."""
        found = self._config.get(name)
        return tuple(self._defaults.get(name, ()) if found is None else found)

    def layers_of(self, period: LayerPeriod, num_layers: int) -> tuple[int, ...]:
        """The layers that come once in a period."""
        try:
            return period.layers(self._config, num_layers)
        except LayersError as error:
            raise ModelConfigError(str(error), error.key) from error

    def words(self, name: str) -> tuple[str, ...]:
        """A list of kinds, which may be left out."""
        return tuple(map(str, self._config.get(name) or ()))

    def number(self, name: str, default: int | None) -> int:
        """A whole number of 0 or more."""
        value = self._config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelConfigError(f"{name} is {value!r}: it has to be a whole number of 0 or more", name)
        return value


def _width(read: _Reader, family: Family, name: str, hidden: int, config: Config) -> int:
    """The width of the dense MLP."""
    by_layer = config.get("intermediate_size")
    if family.layer_shapes is not None and isinstance(by_layer, list) and by_layer:
        return int(max(by_layer))  # each layer has its own
    if family.experts is None:
        width = read.size("intermediate_size", family.mlp_ratio and family.mlp_ratio * hidden)
        return width if family.mlp_width is None else family.mlp_width(config, width)
    key, default = family.experts.dense_width
    # Where no layer is dense, a class may have no such key, or none for it.
    missing = name in {"solar_open", "kolibri1", "cohere2_moe", "qwen3_5_moe_text"} and not read.has(key)
    return read.size(*(family.experts.width if missing else (key, default)))


def _gate(read: _Reader, family: Family, config: Config, hidden: int, heads: int, mla: MlaShape | None) -> int:
    if not family.query_gate and not (family.gate and family.is_on(family.gate_key, config)):
        return 0
    of_heads = family.gate_of_heads is not None and family.gate_of_heads(config)
    if of_heads:
        return 1
    return mla.v_head_dim if mla else _head_dim(read, family, hidden, heads)


def _head_dim(read: _Reader, family: Family, hidden: int, heads: int) -> int:
    if family.own_head_dim and read.has("head_dim"):
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
    return window if isinstance(window, int) and window > 0 else None


def _moe(read: _Reader, experts: Experts) -> MoeShape:
    width = read.size(*experts.width)
    shared = 0
    if experts.shared_count:
        alias = experts.shared_alias
        shared = read.number(*experts.shared_count)
        if alias is not None and read.has(alias):
            if read.has(experts.shared_count[0]) and read.number(alias, 0) != shared:
                message = f"{experts.shared_count[0]} and {alias} are the same key, and differ"
                raise ModelConfigError(message, alias)
            shared = read.number(alias, 0)
    if experts.shared_count and not shared and not experts.shared_is_optional:
        key = experts.shared_count[0]
        raise ModelConfigError(f"{key} is 0: transformers builds a shared expert of width 0, which is not cut", key)
    shared_width = shared * width
    if experts.beside_mlp:
        shared, shared_width = 1, read.size(*experts.dense_width)  # every token passes the MLP, as a shared expert
    if experts.shared_width:
        shared_width = (read.number if experts.shared_is_optional else read.size)(*experts.shared_width) or 0
        shared_width *= max(shared, 1)
    layers = _layers_of_period(read, experts)
    return MoeShape(
        num_experts=read.aliased(*experts.count, alias=experts.count_alias),
        num_experts_per_token=read.aliased(*experts.per_token, alias=experts.chosen_alias),
        intermediate_size=width,
        num_shared_experts=shared or int(shared_width > 0),
        shared_intermediate_size=shared_width,
        first_moe_layer=layers[0] if layers else _first_moe_layer(read, experts),
        layers=layers,
    )


def _layers_of_period(read: _Reader, experts: Experts) -> tuple[int, ...] | None:
    if experts.period is None:
        return None
    return read.layers_of(experts.period, read.size("num_hidden_layers"))


def _first_moe_layer(read: _Reader, experts: Experts) -> int:
    """The layers before it are dense; other patterns are refused: a stage is counted by its first and last layer."""
    if experts.by_layer and (kinds := read.words(experts.by_layer)):
        first = next((layer for layer, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if "dense" in kinds[first:]:
            raise ModelConfigError(
                f"{experts.by_layer} has dense layers behind sparse ones: they have to come first", experts.by_layer
            )
        return first
    if experts.beside_mlp:
        return 0
    if experts.dense_layers:
        return read.number(*experts.dense_layers)
    if experts.dense_by_default:
        return experts.dense_by_default
    dense = sorted(read.layers("mlp_only_layers"))
    if dense != list(range(len(dense))):
        raise ModelConfigError(
            f"mlp_only_layers {dense}: dense layers have to come before those with experts", "mlp_only_layers"
        )
    if read.number("decoder_sparse_step", 1) != 1:
        raise ModelConfigError(
            "decoder_sparse_step has to be 1: every layer from the first with experts on has them",
            "decoder_sparse_step",
        )
    return len(dense)


def _mla(read: _Reader, latent: Latent, width: int) -> MlaShape:
    defaults = {**asdict(latent), "v_head_dim": latent.v_head_dim or width}
    sizes = {name: read.size(name, default) for name, default in defaults.items() if name != "q_lora_rank"}
    at_once = read.is_null("q_lora_rank") or (latent.q_lora_rank is None and not read.has("q_lora_rank"))
    rank = None if at_once else read.size("q_lora_rank", latent.q_lora_rank)
    return MlaShape(q_lora_rank=rank, **sizes)
