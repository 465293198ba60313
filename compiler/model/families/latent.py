"""Multi-head latent attention and mixtures of experts, those of LongCat-Flash, MiMo-V2-Flash and Llama 4 among them.

LongCat-Flash (arXiv 2509.01322): two layers in one module, whose experts stand beside both.

A module attends, passes an MLP, attends again and passes a second MLP. Its experts take what the first MLP takes, and
their sum joins behind the second one. Some experts give back what they take.

MiMo-V2-Flash: layers with a window have twice the kv heads of full ones, and attention sinks; values are narrower.

Source: `MiMoV2FlashConfig` and modeling_mimo_v2_flash.py of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parcompile.model.layers import LayersError, LayerShape, whole

from .gemma import kinds_of_attention

# Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), dense or with experts.


def _angles_differ(config: Mapping[str, Any]) -> bool:
    """Whether transformers computes angles for another number of features than Mistral 4 rotates."""
    rope = config.get("rope_parameters") or {}  # its class has those of yarn then
    rotated, passed = config.get("qk_rope_head_dim", 64), config.get("qk_nope_head_dim", 64)
    width = whole(config, "head_dim", None) if config.get("head_dim") else rotated + passed
    part = rope.get("partial_rotary_factor", rotated / (rotated + passed))
    return bool(int(width if rope.get("rope_type") == "default" else width * part) != rotated)


# MiMo-V2-Flash: layers with a window have twice the kv heads of full ones, and attention sinks; values are narrower.

Config = Mapping[str, Any]


def _layers(config: Config, common: LayerShape, count: int) -> list[LayerShape]:
    listed = config.get("layer_types")
    default = ["sliding_attention" if layer and (layer + 1) % 6 else "full_attention" for layer in range(count)]
    kinds = kinds_of_attention({"layer_types": default if listed is None else listed}, count, 6, last_is_full=False)
    width, window = whole(config, "v_head_dim", 128), common.attention.sliding_window
    read = config.get("sliding_window_size")
    if read is not None and (isinstance(read, bool) or not isinstance(read, int)):
        raise LayersError(f"sliding_window_size is {read!r}: it has to be a whole number", "sliding_window_size")
    if read is not None:
        window = read + 1  # as transformers reads the published file
    attention = replace(common.attention, value_head_dim=width)
    full = replace(common, attention=replace(attention, sliding_window=None, sinks=False))
    windowed = replace(
        common,
        num_key_value_heads=2 * common.num_key_value_heads,
        attention=replace(attention, sliding_window=window, sinks=True),
    )
    _agrees(config, kinds, full, windowed)
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


def _agrees(config: Config, kinds: list[str], full: LayerShape, windowed: LayerShape) -> None:
    """Keys of the published file that transformers does not read say what it builds, or are refused."""
    built = {
        "swa_num_key_value_heads": windowed.num_key_value_heads,
        "swa_head_dim": full.head_dim,
        "swa_v_head_dim": full.attention.value_head_dim,
        "swa_num_attention_heads": config.get("num_attention_heads"),
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    for key, value in built.items():
        stated = config.get(key)
        if stated is not None and stated != value:
            raise LayersError(
                f"{key} is {stated!r}, which transformers does not read: it builds the model with {value!r}", key
            )


# Llama 4: chunked attention, layers without rotary positions, and experts whose scores scale what they take.


def _routed(config: Mapping[str, Any], count: int) -> list[int]:
    """The layers with experts: those of a list, or the last of each step."""
    if (listed := config.get("moe_layers")) is not None:
        if not isinstance(listed, list | tuple):
            raise LayersError(f"moe_layers is {listed!r}: it has to be a list of layers", "moe_layers")
        return sorted(layer for layer in set(listed) if 0 <= layer < count)
    step = whole(config, "interleave_moe_layer_step", 1)
    return list(range(step - 1, count, step))


def _with_norms(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Layers that rotate queries and keys, which are normed behind the rotation."""
    if not config.get("use_qk_norm", True):
        return ()
    rotated = config.get("no_rope_layers")
    if not rotated:
        interval = whole(config, "no_rope_layer_interval", 4)
        rotated = [(layer + 1) % interval for layer in range(count)]
    return tuple(layer for layer, one in enumerate(rotated[:count]) if one)


# Mixtures of routed experts, alone or with a shared expert or an MLP beside them.


def _of_ernie(config: Mapping[str, Any], count: int) -> list[int]:
    """The last layer of each moe_layer_interval, from moe_layer_start_index to moe_layer_end_index."""
    step = whole(config, "moe_layer_interval", 1)
    first = whole(config, "moe_layer_start_index", 1, least=0)
    last = whole(config, "moe_layer_end_index", -1, least=-1)
    end = count - 1 if last == -1 else last
    return [layer for layer in range(count) if (layer + 1) % step == 0 and first <= layer <= end]


def _unlisted(config: Mapping[str, Any]) -> bool:
    return not config.get("mlp_layer_types") and not isinstance(config.get("first_k_dense_replace", 1), int)


def _dense_between(config: Mapping[str, Any]) -> bool:
    listed = config.get("moe_layer_freq") or [True]
    return config.get("mlp_layer_types") is None and not (isinstance(listed, list) and all(listed))
