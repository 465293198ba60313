"""Dense decoders in the manner of Llama or of GPT, Muse, and decoders before Llama.

Muse: layers with a window are rotated, full ones are not; queries and keys are normed without a weight.

Experts of Muse Spark take fewer features of a token, between two projections, and what each gives is normed.

Source: the configuration classes and modeling files of muse_glimmer and muse_spark of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.layers import LayerRuns, alternating

# Dense decoders in the manner of Llama: RMSNorm, rotary positions, gated or plain MLPs.


def _cycles(config: Mapping[str, Any], layers: int) -> LayerRuns:
    return alternating(
        config.get("num_layers_per_stack") or layers,
        config.get("H_cycles", 2),
        config.get("L_cycles", 3),
        config.get("L_bp_cycles") or (2,),
    )


# Dense decoders in the manner of GPT: LayerNorm with a bias, mostly an MLP of two linears.


def _modernbert_window(config: Mapping[str, Any]) -> int:
    window = config.get("local_attention", 128)
    return window // 2 if isinstance(window, int) else 0


# Muse: layers with a window are rotated, full ones are not; queries and keys are normed without a weight.

Config = Mapping[str, Any]


def _rotates_otherwise(config: Config, *, base: float) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta", config.get("rope_theta", base)) if isinstance(rope, Mapping) else base
    listed = config.get("layer_rope_theta")
    return isinstance(listed, list) and any(one not in (0, base) for one in listed)


# Decoders before Llama: learned or fixed positions, or scores that fall with the distance (ALiBi, arXiv 2108.12409).


def _kinds_differ(config: Mapping[str, Any]) -> bool:
    """Of GPT-Neo: pairs of kinds and how often these are repeated, `[[["global", "local"], 12]]`."""
    listed, layers = config.get("attention_types"), config.get("num_hidden_layers", 24)
    pairs: Any = [[["global", "local"], 12]] if listed is None else listed
    try:
        return bool(sum(len(kinds) * times for kinds, times in pairs) != config.get("num_layers", layers))
    except (TypeError, ValueError):
        return True


def _multiplied(config: Mapping[str, Any], hidden_size: int) -> int:
    return int(config.get("intermediate_multiple_size", 4)) * hidden_size


def _falcon_kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("new_decoder_architecture"):
        return int(config.get("num_kv_heads") or heads)
    return 1 if config.get("multi_query", True) else heads


def _bigcode_kv_heads(config: Mapping[str, Any], heads: int) -> int:
    return 1 if config.get("multi_query", True) else heads


def _no_fours(config: Mapping[str, Any]) -> bool:
    return int(config.get("n_head", config.get("num_attention_heads", 16))) % 4 > 0
