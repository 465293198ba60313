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
