"""Dense decoders in the manner of Llama or of GPT, and Muse.

Muse: layers with a window are rotated, full ones are not; queries and keys are normed without a weight.

Experts of Muse Spark take fewer features of a token, between two projections, and what each gives is normed.

Source: the configuration classes and modeling files of muse_glimmer and muse_spark of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Family, Refusal
from parcompile.model.layers import LayerRuns, alternating

# Dense decoders in the manner of Llama: RMSNorm, rotary positions, gated or plain MLPs.

_POSITIVE = "it counts how often layers run: it has to be a whole number of 1 or more"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _passes(cycles: Any) -> bool:
    return cycles is None or (isinstance(cycles, list) and bool(cycles) and all(map(_whole, cycles)))


def _fits(config: Mapping[str, Any]) -> bool:
    layers, runs = config["num_layers_per_stack"], config.get("H_cycles", 2) * (config.get("L_cycles", 3) + 1)
    return _whole(layers) and layers * runs == config.get("num_hidden_layers")


def _cycles(config: Mapping[str, Any], layers: int) -> LayerRuns:
    return alternating(
        config.get("num_layers_per_stack") or layers,
        config.get("H_cycles", 2),
        config.get("L_cycles", 3),
        config.get("L_bp_cycles") or (2,),
    )


DIFFLLAMA = Family(
    paired_heads=True,
    refusals=(
        Refusal(
            "num_key_value_heads",
            lambda config: (config.get("num_key_value_heads") or config.get("num_attention_heads") or 0) % 2 > 0,
            "its heads work in pairs, whose values are the halves of all: it has to be even",
        ),
        Refusal(
            "attention_dropout",
            lambda config: bool(config.get("attention_dropout")),
            "transformers builds no differential attention with dropout: it has to be 0",
        ),
    ),
)
HRM_TEXT = Family(
    runs=_cycles,
    initial_state="z_L_init",
    gate="gate_proj",
    refusals=(
        Refusal("H_cycles", lambda config: not _whole(config.get("H_cycles", 2)), _POSITIVE),
        Refusal("L_cycles", lambda config: not _whole(config.get("L_cycles", 3)), _POSITIVE),
        Refusal(
            "L_bp_cycles",
            lambda config: not _passes(config.get("L_bp_cycles")),
            "it says in how many of the last low cycles gradients pass: it has to be a list of whole numbers of 1 "
            "or more",
        ),
        Refusal(
            "num_layers_per_stack",
            lambda config: config.get("num_layers_per_stack") is not None and not _fits(config),
            "num_hidden_layers beside it counts the runs of all layers: it has to be num_layers_per_stack x "
            "H_cycles x (L_cycles + 1)",
        ),
        Refusal(
            "attention_dropout",
            lambda config: bool(config.get("attention_dropout")),
            "masks are drawn by the number of the layer, which each of its runs has: it has to be 0",
        ),
    ),
    refused_axes={
        "pp": "its two stacks of layers run several times, one after the other: hidden states would pass each "
        "stage many times in a forward pass"
    },
)


# Dense decoders in the manner of GPT: LayerNorm with a bias, mostly an MLP of two linears.


def _modernbert_window(config: Mapping[str, Any]) -> int:
    window = config.get("local_attention", 128)
    return window // 2 if isinstance(window, int) else 0


def _other_head_dim(config: Mapping[str, Any]) -> bool:
    width = config.get("head_dim")
    return bool(
        config.get("qk_layernorm") and width and width != config["hidden_size"] // config["num_attention_heads"]
    )


PHI = Family(
    refusals=(Refusal("qk_layernorm", _other_head_dim, "its norms take heads of hidden_size / num_attention_heads"),)
)
MODERNBERT_DECODER = Family(
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    head="decoder",
    attention="attn",
    window_of=_modernbert_window,
    refusals=(
        Refusal(
            "local_attention",
            lambda config: not config.get("sliding_window") and _modernbert_window(config) < 1,
            "transformers halves it for the window of its layers: it has to be a whole number of 2 or more",
        ),
    ),
    defaults={"intermediate_size": 1152},
)


# Muse: layers with a window are rotated, full ones are not; queries and keys are normed without a weight.

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


MUSE_GLIMMER_TEXT = Family(
    gate="gate_proj",
    weightless_qk_norm_share=lambda _, __: 1.0,
    refusals=_refusals(10000.0),
    defaults={"sliding_window": 2048},
)
MUSE_SPARK_TEXT = Family(
    gate="gate_proj",
    weightless_qk_norm_share=lambda _, __: 1.0,
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
)
