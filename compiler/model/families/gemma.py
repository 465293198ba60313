"""Gemma 4: sliding and full layers of different head widths, keys that are values too or another layer's.

Its later layers may attend with the keys and values that the last layer of their kind before them has computed, and
every layer may get a part of a second embedding.

Source: `Gemma4TextConfig` and modeling_gemma4.py of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from parcompile.model.layers import KeysAndValues, LayersError, LayerShape
from parcompile.model.shape import LayerInputs, ModelShape

Config = Mapping[str, Any]

_SLIDING, _FULL = "sliding_attention", "full_attention"
_OWN_KEYS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""What layers may have of their own, and the keys that say so for all full layers."""


def kinds_of_attention(config: Config, count: int, interval: int, *, last_is_full: bool) -> list[str]:
    """Of each layer "sliding_attention" or "full_attention"; without a list every `interval`th one is full.

    Raises:
        LayersError: the list does not fit.
    """
    listed = config.get("layer_types")
    kinds = [_SLIDING if (layer + 1) % interval else _FULL for layer in range(count)] if listed is None else [*listed]
    if others := sorted({str(kind) for kind in kinds} - {_SLIDING, _FULL}):
        raise LayersError(
            f"layer_types has {', '.join(others)}: the kinds of layers here are {_SLIDING} and {_FULL}", "layer_types"
        )
    if last_is_full:
        kinds[-1] = _FULL  # as transformers makes it
    return kinds


def first_with_keys_of_others(config: Config, kinds: Sequence[str], default: int) -> int:
    """The first layer that attends with keys and values of an earlier one; their number where none does.

    Raises:
        LayersError: no earlier layer is of the same kind.
    """
    shared = config.get("num_kv_shared_layers", default)
    if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared <= len(kinds):
        raise LayersError(
            f"num_kv_shared_layers is {shared!r}: it has to be a whole number from 0 to {len(kinds)}",
            "num_kv_shared_layers",
        )
    first = len(kinds) - shared
    if shared and set(kinds[:first]) != set(kinds):
        raise LayersError(
            f"num_kv_shared_layers {shared} of {len(kinds)} layers: the {first} layers before them have no "
            f"{' or '.join(sorted(set(kinds) - set(kinds[:first])))}, whose keys and values they would use",
            "num_kv_shared_layers",
        )
    return first


def _overrides(config: Config, kinds: Sequence[str]) -> list[Mapping[str, Any]]:
    """What each layer has in the place of `head_dim` and `num_key_value_heads`."""
    stored = config.get("per_layer_config")
    if stored is None:
        full = {"head_dim": config.get("global_head_dim", 512)}
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        full |= {} if heads is None else {"num_key_value_heads": heads}
        return [full if kind == _FULL else {} for kind in kinds]
    by_layer = {int(layer): values for layer, values in stored.items()}
    found = [by_layer.get(layer, {}) for layer in range(len(kinds))]
    if outside := sorted(by_layer.keys() - set(range(len(kinds)))):
        raise LayersError(f"per_layer_config has layer {outside[0]}: there are {len(kinds)} layers", "per_layer_config")
    for layer, values in enumerate(found):
        if others := sorted(values.keys() - _OWN_KEYS.keys()):
            raise LayersError(
                f"per_layer_config gives layer {layer} {', '.join(others)}: only {' and '.join(sorted(_OWN_KEYS))} of "
                "a layer are described",
                "per_layer_config",
            )
        alike = kinds.index(kinds[layer])
        if values != found[alike]:
            raise LayersError(
                f"per_layer_config gives layers {alike} and {layer}, both {kinds[layer]}, different values: "
                "transformers has one rotary embedding for each kind",
                "per_layer_config",
            )
    return found


def _layers(config: Config, common: LayerShape, count: int) -> list[LayerShape]:
    kinds = kinds_of_attention(config, count, 6, last_is_full=True)
    first = first_with_keys_of_others(config, kinds, 0)
    found, attention = [], common.attention
    of_all = replace(attention, sliding_window=None)
    for layer, (kind, own) in enumerate(zip(kinds, _overrides(config, kinds), strict=True)):
        for key, value in own.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                stated = "per_layer_config" if config.get("per_layer_config") else _OWN_KEYS[key]
                raise LayersError(
                    f"{stated} gives layer {layer} {key} {value!r}: it has to be a whole number of 1 or more", stated
                )
        shape = replace(common, **own, attention=attention if kind == _SLIDING else of_all)
        if layer >= first:
            wide = 2 if config.get("use_double_wide_mlp") else 1
            found.append(
                replace(
                    shape,
                    attention=replace(shape.attention, keys_and_values=KeysAndValues.OF_ANOTHER_LAYER),
                    intermediate_size=wide * shape.intermediate_size,
                )
            )
        elif config.get("attention_k_eq_v") and kind == _FULL:
            found.append(replace(shape, attention=replace(of_all, keys_and_values=KeysAndValues.KEYS_ARE_VALUES)))
        else:
            found.append(shape)
    return found


def _values_of_layers(config: Config, shape: ModelShape) -> Mapping[int, Mapping[str, Any]]:
    """What `per_layer_config` says, as the keys of layers with and without a window."""
    if config.get("per_layer_config") is None:
        return {}
    found: dict[int, Mapping[str, Any]] = {}
    for layers, one in shape.by_kind:
        heads = dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), one.num_key_value_heads)
        widths = dict.fromkeys(("head_dim", "global_head_dim"), one.head_dim)
        found |= {layer: {**heads, **widths} for layer in layers}
    return found


def _inputs(config: Config) -> LayerInputs | None:
    width = config.get("hidden_size_per_layer_input", 256)
    return LayerInputs(config.get("vocab_size_per_layer_input", 262_144), width) if width else None


def _gemma3n_layers(config: Config, common: LayerShape, count: int) -> list[LayerShape]:
    kinds = kinds_of_attention(config, count, 5, last_is_full=False)
    first = first_with_keys_of_others(config, kinds, 15)
    widths, sparsity = config.get("intermediate_size"), config.get("activation_sparsity_pattern")
    if not isinstance(widths, list):
        widths = [common.intermediate_size] * count
    for key, values in (("intermediate_size", widths), ("activation_sparsity_pattern", sparsity)):
        if isinstance(values, list) and len(values) != count:
            raise LayersError(f"{key} has {len(values)} entries for {count} layers: write one for each", key)
    if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths):
        raise LayersError(
            f"intermediate_size is {widths}: widths have to be whole numbers of 1 or more", "intermediate_size"
        )
    return [
        replace(
            common,
            intermediate_size=width,
            attention=replace(
                common.attention,
                sliding_window=common.attention.sliding_window if kind == _SLIDING else None,
                keys_and_values=KeysAndValues.OWN if layer < first else KeysAndValues.OF_ANOTHER_LAYER,
            ),
        )
        for layer, (kind, width) in enumerate(zip(kinds, widths, strict=True))
    ]
