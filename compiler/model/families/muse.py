"""Muse: layers with a window are rotated, full ones are not; queries and keys are normed without a weight.

Experts of Muse Spark take fewer features of a token, between two projections, and what each gives is normed.

Source: the configuration classes and modeling files of muse_glimmer and muse_spark of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Family, Refusal

Config = Mapping[str, Any]


def _lists_others(config: Config) -> bool:
    listed, layers = config.get("layer_rope_theta"), config.get("num_hidden_layers")
    return isinstance(listed, list) and isinstance(layers, int) and len(listed) != layers


def _rotates_otherwise(base: float, config: Config) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta", config.get("rope_theta", base)) if isinstance(rope, Mapping) else base
    listed = config.get("layer_rope_theta")
    return isinstance(listed, list) and any(one not in (0, base) for one in listed)


def _has_other_layers(config: Config) -> bool:
    return bool(set(config.get("layer_types") or ()) - {"sliding_attention", "full_attention"})


def _refusals(base: float) -> tuple[Refusal, ...]:
    """Those of both models, whose classes rotate by `base` where a configuration does not say."""
    return (
        Refusal("layer_rope_theta", _lists_others, "it has to have an entry for each layer"),
        Refusal(
            "layer_rope_theta",
            lambda config: _rotates_otherwise(base, config),
            "transformers reads of an entry only whether it is 0, and rotates all other layers by rope_theta of "
            "rope_parameters: write 0 or that",
        ),
        Refusal("layer_types", _has_other_layers, "the kinds of layers here are sliding_attention and full_attention"),
        Refusal(
            "sliding_window",
            lambda config: config.get("sliding_window", 0) is None,
            "transformers builds a mask of the window, whatever layers there are: write a whole number",
        ),
        Refusal(
            "attention_dropout",
            lambda config: config.get("attention_dropout", 0) is None,
            "transformers' attention takes no null: write a number, or leave the key out",
        ),
        Refusal(
            "final_logit_softcapping",
            lambda config: config.get("final_logit_softcapping") == 0,
            "transformers divides logits by it: it has to be another number than 0",
        ),
    )


MUSE: Mapping[str, Family] = {
    "muse_glimmer_text": Family(
        gate="gate_proj",
        bare_qk_norms=lambda _, __: 1.0,
        refusals=_refusals(10000.0),
        defaults={"sliding_window": 2048},
    ),
    "muse_spark_text": Family(
        gate="gate_proj",
        bare_qk_norms=lambda _, __: 1.0,
        refusals=(
            *_refusals(500000.0),
            Refusal(
                "tie_word_embeddings",
                lambda config: bool(config.get("tie_word_embeddings")),
                "transformers ties no weights of this type, and would train two: set it to false",
            ),
        ),
        experts=Experts(
            count=("num_local_experts", 256),
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 4096),
            by_layer="mlp_layer_types",
            taken=("moe_hidden_size", 4096),
            normed=True,
        ),
        defaults={"sliding_window": 2048},
    ),
}
