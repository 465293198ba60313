"""Multi-head latent attention, and experts of one maker's own: LongCat-Flash, MiMo-V2-Flash, Llama 4.

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

from parcompile.model.family import Experts, Family, Latent, Refusal
from parcompile.model.layers import LayersError, LayerShape, whole

from .added import all_heads, by_frequency, routed
from .gemma import kinds_of_attention

# Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), dense or with experts.


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


MISTRAL4 = Family(
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
)
AXK1 = Family(
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
)


# LongCat-Flash (arXiv 2509.01322): two layers in one module, whose experts stand beside both.


def _counts_differ(config: Mapping[str, Any]) -> bool:
    count, modules = config.get("num_hidden_layers"), config.get("num_layers")
    return isinstance(count, int) and (count % 2 > 0 if modules is None else count != 2 * modules)


def _heads_differ(config: Mapping[str, Any]) -> bool:
    wanted = config.get("qk_nope_head_dim", 128) + config.get("qk_rope_head_dim", 64)
    return config.get("qk_head_dim") not in (None, wanted)


LONGCAT_FLASH = Family(
    keys={
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
    },
    layers_per_module=2,
    mlp="mlps",
    latent=Latent(),
    kv_heads=all_heads,
    experts=Experts(
        count=("n_routed_experts", 512),
        identities=("zero_expert_num", 256),
        per_token=("moe_topk", 12),
        width=("moe_intermediate_size", 2048),
        dense_width=("intermediate_size", 12288),
        beside="mlps",
        shared_width=("intermediate_size", 12288),
    ),
    refusals=(
        Refusal(
            "num_hidden_layers",
            _counts_differ,
            "transformers counts two layers for each of num_layers: it has to be twice that, or left out",
        ),
        Refusal(
            "num_key_value_heads",
            lambda config: config.get("num_key_value_heads") not in (None, config.get("num_attention_heads", 64)),
            "every head has its own key and value: it has to be num_attention_heads",
        ),
        Refusal(
            "moe_topk",
            lambda config: config.get("moe_topk") == 1,
            "transformers computes nothing where a token chooses one expert: it has to be 2 or more",
        ),
        Refusal("qk_head_dim", _heads_differ, "it has to be qk_nope_head_dim + qk_rope_head_dim"),
        Refusal(
            "head_dim",
            lambda config: config.get("head_dim", 64) != config.get("qk_rope_head_dim", 64),
            "transformers computes angles for so many features: it has to be qk_rope_head_dim",
        ),
        Refusal(
            "router_bias",
            lambda config: bool(config.get("router_bias")),
            "transformers builds a bias that its router never adds: it has to be false",
        ),
        *(
            Refusal(
                key,
                lambda config, key=key: config.get(key) is False,  # type: ignore[misc]
                "transformers scales compressed queries and keys always: it has to be true",
            )
            for key in ("mla_scale_q_lora", "mla_scale_kv_lora")
        ),
        Refusal(
            "zero_expert_type",
            lambda config: config.get("zero_expert_type", "identity") != "identity",
            "transformers' zero experts pass on what they take: it has to be 'identity'",
        ),
    ),
)


# MiMo-V2-Flash: layers with a window have twice the kv heads of full ones, and attention sinks; values are narrower.

Config = Mapping[str, Any]


def _layers(config: Config, common: LayerShape, count: int) -> list[LayerShape]:
    listed = config.get("layer_types")
    default = ["sliding_attention" if layer and (layer + 1) % 6 else "full_attention" for layer in range(count)]
    kinds = kinds_of_attention({"layer_types": default if listed is None else listed}, count, 6, last_is_full=False)
    width, window = config.get("v_head_dim", 128), common.attention.sliding_window
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise LayersError(f"v_head_dim is {width!r}: it has to be a whole number of 1 or more", "v_head_dim")
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


MIMO_V2_FLASH = Family(
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
)


# Llama 4: chunked attention, layers without rotary positions, and experts whose scores scale what they take.


def _routed(config: Mapping[str, Any], count: int) -> list[int]:
    """The layers with experts: those of a list, or the last of each step."""
    if (listed := config.get("moe_layers")) is not None:
        if not isinstance(listed, list | tuple):
            raise LayersError(f"moe_layers is {listed!r}: it has to be a list of layers", "moe_layers")
        return sorted(layer for layer in set(listed) if 0 <= layer < count)
    step = whole(config, "interleave_moe_layer_step", 1, least=1)
    return list(range(step - 1, count, step))


def _share_with_norms(config: Mapping[str, Any], count: int) -> float:
    """Of layers that rotate queries and keys, which are normed behind the rotation."""
    if not config.get("use_qk_norm", True) or not count:
        return 0.0
    rotated = config.get("no_rope_layers")
    if not rotated:
        interval = whole(config, "no_rope_layer_interval", 4, least=1)
        rotated = [(layer + 1) % interval for layer in range(count)]
    return sum(map(bool, rotated)) / len(rotated)


LLAMA4_TEXT = Family(
    mlp="feed_forward",
    weightless_qk_norm_share=_share_with_norms,
    experts=Experts(
        block="feed_forward",
        shared="shared_expert",
        count=("num_local_experts", 16),
        per_token=("num_experts_per_tok", 1),
        width=("intermediate_size", 8192),
        shared_width=("intermediate_size", 8192),
        dense_width=("intermediate_size_mlp", 16384),
        layers=_routed,
    ),
)
