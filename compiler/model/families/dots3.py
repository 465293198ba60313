"""dots3-note: latent attention of two widths, in windows and over the keys that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from parcompile.model.blocks.indexer import FULL, NONE
from parcompile.model.blocks.latent import MlaShape
from parcompile.model.layers import LayersError, LayerShape, checked, whole
from parcompile.model.shape import ModelShape

_INDEXED, _WINDOW, _WHOLE = "indexed_attention", "sliding_attention", "full_attention"
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_WINDOWED: Mapping[str, int] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Defaults of layers with a window (`Dots3NoteTextConfig`), under keys that begin with `swa_`."""


def _kinds(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The kind of each layer. Files of before have another name for layers with an indexer, and `use_dsa`."""
    chooses = config.get("use_dsa", None if "per_layer_config" in config else True)
    given = config.get("layer_types")
    if given is None:
        seeing = _WHOLE if chooses is False else _INDEXED
        windows = config.get("use_sliding_window", True)
        kinds = [seeing if not windows or layer < 2 or layer % 4 == 1 else _WINDOW for layer in range(num_layers)]
    else:
        kinds = list(given)
    if chooses is not None:
        old, new = (_WHOLE, _INDEXED) if chooses else (_INDEXED, _WHOLE)
        kinds = [new if kind == old else kind for kind in kinds]
    if unknown := sorted(set(map(str, kinds)) - {_INDEXED, _WINDOW, _WHOLE}):
        raise LayersError(
            f"layer_types has {', '.join(unknown)}: the kinds of layers here are {_INDEXED}, {_WINDOW} and {_WHOLE}",
            "layer_types",
        )
    return tuple(kinds)


def _choosing(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    return tuple(FULL if kind == _INDEXED else NONE for kind in _kinds(config, num_layers))


def _layer_shapes(config: Mapping[str, Any], common: LayerShape, num_layers: int) -> Sequence[LayerShape]:
    kinds, given = _kinds(config, num_layers), config.get("per_layer_config")
    window = config.get("sliding_window") or config.get("sliding_window_size", 512)
    found = []
    for layer, kind in enumerate(kinds):
        if given is not None:
            own, named = given.get(str(layer), given.get(layer, {})), f"per_layer_config.{layer}."
        else:
            own, named = _of_windows(config) if kind == _WINDOW else {}, "swa_"
        found.append(_shape(own, named, common, window if kind == _WINDOW else None))
    return found


def _of_windows(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {name: whole(config, f"swa_{name}", default) for name, default in _WINDOWED.items()}
    found["qk_rope_head_dim"] = config.get("swa_qk_rope_head_dim", found["head_dim"] - found["qk_nope_head_dim"])
    return found


def _shape(own: Mapping[str, Any], named: str, common: LayerShape, window: int | None) -> LayerShape:
    """The shape of a layer that has these keys otherwise than the model."""
    if unknown := sorted(set(own) - {*_HEADS, *_LATENT, "head_dim"}):
        raise LayersError(f"{named}{unknown[0]} differs from the model's: layers may differ in their attention", named)
    for name, value in own.items():
        checked(named + name, value)
    assert isinstance(common.attention.projections, MlaShape)
    mla = replace(common.attention.projections, **{name: own[name] for name in _LATENT if name in own})
    heads = own.get("num_attention_heads", common.num_attention_heads)
    kv_heads = own.get("num_key_value_heads", common.num_key_value_heads)
    if heads != kv_heads:
        raise LayersError(
            f"{named}num_key_value_heads {kv_heads} is not num_attention_heads {heads}, as latent attention has it",
            f"{named}num_key_value_heads",
        )
    return replace(
        common,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=mla.value_dim,
        attention=replace(common.attention, sliding_window=window, projections=mla),
    )


def _values_of_layers(config: Mapping[str, Any], shape: ModelShape) -> Mapping[int, Mapping[str, Any]]:
    """What `per_layer_config` says, as the keys of layers with and without a window."""
    if config.get("per_layer_config") is None:
        return {}
    kinds, found = list(_kinds(config, shape.num_hidden_layers)), dict[int, Mapping[str, Any]]()
    for layers, one in shape.by_kind:
        own = {name: getattr(one.attention.projections, name) for name in _LATENT} | dict.fromkeys(
            _HEADS, one.num_attention_heads
        )
        windowed = {**own, "head_dim": one.attention.projections.key_dim if one.attention.projections else 0}
        both = {**own, **{f"swa_{name}": size for name, size in windowed.items()}, "layer_types": kinds}
        found |= dict.fromkeys(layers, both)
    return found


def _dense_between(config: Mapping[str, Any]) -> bool:
    """Whether layers without experts stand behind one with them."""
    every = config.get("moe_layer_freq", 1)
    if config.get("mlp_layer_types") is not None:
        return False
    if isinstance(every, list | tuple):
        return not all(every[config.get("first_k_dense_replace", 1) :])
    return bool(every != 1)
