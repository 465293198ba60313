"""MiMo-V2-Flash: layers with a window have twice the kv heads of full ones, and attention sinks; values are narrower.

Source: `MiMoV2FlashConfig` and modeling_mimo_v2_flash.py of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parcompile.model.family import Experts, Family
from parcompile.model.layer_kind import LayersError, LayerShape

from .gemma import kinds_of_attention

Config = Mapping[str, Any]


def _layers(config: Config, common: LayerShape, count: int) -> list[LayerShape]:
    listed = config.get("layer_types")
    default = ["sliding_attention" if layer and (layer + 1) % 6 else "full_attention" for layer in range(count)]
    kinds = kinds_of_attention({"layer_types": default if listed is None else listed}, count, 6, last_is_full=False)
    width, window = config.get("v_head_dim", 128), common.sliding_window
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise LayersError(f"v_head_dim is {width!r}: it has to be a whole number of 1 or more", "v_head_dim")
    if config.get("sliding_window_size") is not None:
        window = config["sliding_window_size"] + 1  # as transformers reads the published file
    full = replace(common, value_head_dim=width, sliding_window=None, sinks=False)
    windowed = replace(full, num_key_value_heads=2 * common.num_key_value_heads, sliding_window=window, sinks=True)
    _agrees(config, kinds, full, windowed)
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


def _agrees(config: Config, kinds: list[str], full: LayerShape, windowed: LayerShape) -> None:
    """Keys of the published file that transformers does not read say what it builds, or are refused."""
    built = {
        "swa_num_key_value_heads": windowed.num_key_value_heads,
        "swa_head_dim": full.head_dim,
        "swa_v_head_dim": full.value_head_dim,
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


MIMO: Mapping[str, Family] = {
    "mimo_v2_flash": Family(
        sinks="sinks",
        layer_shapes=_layers,
        experts=Experts(
            count=("n_routed_experts", 256),
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 2048),
            by_layer="mlp_layer_types",
            dense_by_default=1,
        ),
        defaults={"sliding_window": 129},
    ),
}
