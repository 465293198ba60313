"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Family, Latent, Refusal

from .traits import by_frequency, routed


def _unscaled(config: Mapping[str, Any]) -> bool:
    """Whether a configuration of Mistral 4 states a rotary embedding that does not scale its queries."""
    rope = config.get("rope_parameters")
    keys = ("llama_4_scaling_beta", "original_max_position_embeddings")
    return isinstance(rope, Mapping) and any(rope.get(key) is None for key in keys)


def _angles_differ(config: Mapping[str, Any]) -> bool:
    """Whether transformers computes angles for another number of features than Mistral 4 rotates."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return False  # its class has a rotary embedding that fits
    rotated, passed = config.get("qk_rope_head_dim", 64), config.get("qk_nope_head_dim", 64)
    width = config.get("head_dim") or rotated + passed
    part = rope.get("partial_rotary_factor", rotated / (rotated + passed))
    return bool(int(width if rope.get("rope_type") == "default" else width * part) != rotated)


LATENT: Mapping[str, Family] = {
    "deepseek_v2": Family(latent=Latent(), experts=routed(64, None, 1407, dense_layers=0, shared=2)),
    "deepseek_v3": Family(latent=Latent(), experts=routed(256, 8, 2048, dense_layers=3)),
    "youtu": Family(latent=Latent(), defaults={"num_key_value_heads": 16}),
    "minicpm3": Family(latent=Latent(768, 256, 64, 32, None)),
    "glm4_moe_lite": Family(
        latent=Latent(768, 512, 192, 64, 256),
        experts=routed(64, 4, 1536, by_layer="mlp_layer_types", dense_by_default=1),
    ),
    "mistral4": Family(
        latent=Latent(1024, 256, 64, 64, 128),
        experts=routed(128, 4, 2048, dense_layers=0),
        refusals=(
            Refusal(
                "rope_parameters",
                _unscaled,
                "it has to have llama_4_scaling_beta and original_max_position_embeddings: transformers scales every "
                "query of this model type by them",
            ),
            Refusal(
                "rope_parameters",
                _angles_differ,
                "head_dim x partial_rotary_factor (all of head_dim where rope_type is 'default') has to be "
                "qk_rope_head_dim: transformers computes angles for so many features, and rotates qk_rope_head_dim",
            ),
        ),
    ),
    "axk1": Family(
        latent=Latent(),
        experts=routed(
            192,
            8,
            2048,
            by_layer="mlp_layer_types",
            dense_layers=1,
            norm_after="post_mlp_layernorm",
            layers=by_frequency(1),
        ),
        refusals=(
            Refusal(
                "q_lora_rank",
                lambda config: config.get("q_lora_rank", 1) is None,
                "transformers compresses the queries of this model type always: it has to be a number",
            ),
        ),
    ),
}
