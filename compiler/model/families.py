"""What distinguishes the model families: names, fused weights, biases, norms, and defaults of their configurations.

A family is data: how its parameters differ from Llama's, under the names that transformers gives them. The rows of
`parcompile.model.parameters` follow from it.

Source: the modeling files and configuration classes of transformers 5.23; the tests compare every family with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Experts, Family, Latent, Norm, QkNorm, Refusal

_TIED = {"tie_word_embeddings": True}
_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_UP_ONLY: tuple[str, ...] = ("up_proj",)
_FUSED_UP: tuple[str, ...] = ("gate_up_proj",)
_INTERNLM3_BIAS = ("attention_bias", "qkv_bias", "mlp_bias", "bias")


def _defaults(kv_heads: int | None = None, head_dim: int | None = None, **others: Any) -> dict[str, Any]:
    found = {"num_key_value_heads": kv_heads, "head_dim": head_dim, **others}
    return {key: value for key, value in found.items() if value is not None}


def _routed(
    count: int | None,
    per_token: int | None,
    width: int,
    *,
    dense_layers: int | None = None,
    shared: int = 1,
    count_key: str = "n_routed_experts",
    count_alias: str | None = "num_local_experts",
    shared_key: str = "n_shared_experts",
    by_layer: str | None = None,
    dense_by_default: int = 0,
    norm_after: str = "",
    router_first: bool = False,
) -> Experts:
    """DeepSeek's way: routed experts, shared ones beside them as one MLP, dense layers first."""
    return Experts(
        router_first=router_first,
        norm_after=norm_after,
        dense_by_default=dense_by_default,
        shared="shared_experts",
        count=(count_key, count),
        count_alias=count_alias,
        by_layer=by_layer,
        per_token=("num_experts_per_tok", per_token),
        width=("moe_intermediate_size", width),
        shared_count=(shared_key, shared),
        dense_layers=None if dense_layers is None else ("first_k_dense_replace", dense_layers),
    )


FAMILIES: Mapping[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "cwm": Family(
        qkv_bias=False, output_bias=False, mlp_bias="mlp_bias", defaults=_defaults(8, 128, sliding_window=8192)
    ),
    "iquestcoder": Family(mlp_bias="mlp_bias", defaults=_defaults(8, 128)),
    "ministral3": Family(qkv_bias=False, output_bias=False, defaults=_defaults(8, 128)),
    "vaultgemma": Family(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        defaults=_defaults(4, 256, sliding_window=4096, **_TIED),
    ),
    "jais2": Family(
        up=_UP_ONLY,
        gated=False,
        norm=Norm.WEIGHT_AND_BIAS,
        mlp_bias="mlp_bias",
        defaults=_defaults(attention_bias=True, mlp_bias=True),
    ),
    "hunyuan_v1_dense": Family(qk_norm=QkNorm.HEAD, qk_norm_names=("query_layernorm", "key_layernorm")),
    "persimmon": Family(
        final_norm="final_layernorm",
        qkv=("query_key_value",),
        heads_interleaved=True,
        output="dense",
        qk_norm=QkNorm.HEAD,
        qk_norm_key="qk_layernorm",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        qk_norm_holds=Norm.WEIGHT_AND_BIAS,
        up=("dense_h_to_4h",),
        gated=False,
        down="dense_4h_to_h",
        norm=Norm.WEIGHT_AND_BIAS,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        own_head_dim=False,
        defaults={"qk_layernorm": True},
    ),
    "mistral": Family(qkv_bias=False, output_bias=False, defaults=_defaults(8, sliding_window=4096)),
    "ministral": Family(qkv_bias=False, output_bias=False, defaults=_defaults(8, sliding_window=4096)),
    "qwen2": Family(
        qkv_bias=True,
        output_bias=False,
        own_head_dim=True,
        window_key="use_sliding_window",
        defaults=_defaults(32, sliding_window=4096),
    ),
    "qwen3": Family(
        qk_norm=QkNorm.HEAD,
        window_key="use_sliding_window",
        defaults=_defaults(32, 128, sliding_window=4096),
    ),
    "gemma": Family(defaults=_defaults(16, 256, **_TIED)),
    "gemma2": Family(norms=_FOUR_NORMS, defaults=_defaults(4, 256, sliding_window=4096, **_TIED)),
    "gemma3_text": Family(
        norms=_FOUR_NORMS,
        qk_norm=QkNorm.HEAD,
        # The published configurations of multimodal models leave out more than others do.
        defaults=_defaults(
            4,
            256,
            sliding_window=4096,
            num_attention_heads=8,
            vocab_size=262208,
            max_position_embeddings=131072,
            **_TIED,
        ),
    ),
    "phi": Family(
        final_norm="final_layernorm",
        output="dense",
        qk_norm=QkNorm.HEAD,
        qk_norm_key="qk_layernorm",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        qk_norm_holds=Norm.WEIGHT_AND_BIAS,
        up=("fc1",),
        gated=False,
        down="fc2",
        norms=("input_layernorm",),
        norm=Norm.WEIGHT_AND_BIAS,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    ),
    "phi3": Family(qkv=("qkv_proj",), output_first=True, up=_FUSED_UP, qkv_bias=False, output_bias=False),
    "olmo": Family(norm=Norm.NOTHING),
    "olmo2": Family(qk_norm=QkNorm.WHOLE, norms=_POST_NORMS),
    "olmo3": Family(qk_norm=QkNorm.WHOLE, norms=_POST_NORMS, defaults=_defaults(sliding_window=4096)),
    "cohere": Family(
        qk_norm=QkNorm.HEADS, qk_norm_key="use_qk_norm", norms=("input_layernorm",), defaults=_defaults(**_TIED)
    ),
    "cohere2": Family(norms=("input_layernorm",), defaults=_defaults(sliding_window=4096, **_TIED)),
    "glm": Family(up=_FUSED_UP, output_bias=False, defaults=_defaults(2, 128, attention_bias=True)),
    "glm4": Family(
        up=_FUSED_UP,
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        output_bias=False,
        defaults=_defaults(2, 128, attention_bias=True),
    ),
    "granite": Family(mlp_bias="mlp_bias"),
    "starcoder2": Family(
        up=("c_fc",),
        gated=False,
        down="c_proj",
        norm=Norm.WEIGHT_AND_BIAS,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        defaults=_defaults(2, use_bias=True, **_TIED),
    ),
    "smollm3": Family(mlp_bias="mlp_bias", window_key="use_sliding_window", defaults=_defaults(4, **_TIED)),
    "nemotron": Family(up=_UP_ONLY, gated=False, norm=Norm.WEIGHT_AND_BIAS, mlp_bias="mlp_bias"),
    "helium": Family(hidden_is_heads=True, output_bias=False, mlp_bias="mlp_bias", defaults=_defaults(20, 128)),
    "gpt_neox": Family(
        base="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        order=("norms", "attention", "mlp"),
        attention="attention",
        qkv=("query_key_value",),
        heads_interleaved=True,
        output="dense",
        up=("dense_h_to_4h",),
        gated=False,
        down="dense_4h_to_h",
        norm=Norm.WEIGHT_AND_BIAS,
        mlp_bias=True,
        defaults={"attention_bias": True},
        own_head_dim=False,
    ),
    "internlm3": Family(
        qkv_bias=_INTERNLM3_BIAS, output_bias=_INTERNLM3_BIAS, mlp_bias=_INTERNLM3_BIAS, defaults=_defaults(2, 128)
    ),
    "seed_oss": Family(
        output_bias="attention_out_bias", mlp_bias="mlp_bias", defaults=_defaults(8, 128, attention_bias=True)
    ),
    "exaone4": Family(
        qk_norm=QkNorm.HEAD,
        norms=_POST_NORMS,
        qkv_bias=False,
        output_bias=False,
        defaults=_defaults(32, sliding_window=4096),
    ),
    "ernie4_5": Family(
        qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", defaults=_defaults(2, 128, **_TIED)
    ),
    "arcee": Family(up=_UP_ONLY, gated=False, mlp_bias="mlp_bias"),
    "apertus": Family(
        qk_norm=QkNorm.HEAD,
        up=_UP_ONLY,
        gated=False,
        activation=("act_fn.alpha_p", "act_fn.alpha_n"),
        norms=("attention_layernorm", "feedforward_layernorm"),
    ),
    "nanochat": Family(up=("fc1",), gated=False, down="fc2", norm=Norm.NOTHING, defaults=_defaults(6)),
    "mixtral": Family(
        qkv_bias=False, output_bias=False, experts=Experts(count_alias="num_experts"), defaults=_defaults(8)
    ),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        output_bias=False,
        window_key="use_sliding_window",
        window_only_in="mask",
        experts=Experts(
            shared="shared_expert",
            shared_gate="shared_expert_gate",
            count=("num_experts", 60),
            per_token=("num_experts_per_tok", 4),
            width=("moe_intermediate_size", 1408),
            shared_width=("shared_expert_intermediate_size", 5632),
        ),
        defaults=_defaults(16, qkv_bias=True, sliding_window=4096),
    ),
    "qwen3_moe": Family(
        qk_norm=QkNorm.HEAD,
        window_key="use_sliding_window",
        experts=Experts(
            router_first=False,
            count=("num_experts", 128),
            count_alias="num_local_experts",
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 768),
        ),
        defaults=_defaults(4, sliding_window=4096),
    ),
    "olmoe": Family(
        hidden_is_heads=True,
        qk_norm=QkNorm.WHOLE,
        window_only_in="attention",
        experts=Experts(
            count=("num_experts", 64), count_alias="num_local_experts", per_token=("num_experts_per_tok", 8)
        ),
        defaults=_defaults(16),
    ),
    "phimoe": Family(
        norm=Norm.WEIGHT_AND_BIAS,
        head_bias="lm_head_bias",
        window_only_in="mask",
        experts=Experts(router="router", count=("num_local_experts", 16)),
        defaults=_defaults(8),
    ),
    "granitemoe": Family(
        order=("attention", "norms", "mlp"), experts=Experts(block="block_sparse_moe", router="router")
    ),
    "flex_olmo": Family(
        qk_norm=QkNorm.WHOLE,
        norms=_POST_NORMS,
        experts=Experts(
            count=("num_experts", 7), count_alias="num_local_experts", per_token=("num_experts_per_tok", 5)
        ),
    ),
    "minimax_m2": Family(
        qk_norm=QkNorm.WHOLE,
        qkv_bias=False,
        output_bias=False,
        experts=Experts(
            count=("num_local_experts", 256), count_alias="num_experts", per_token=("num_experts_per_tok", 8)
        ),
        defaults=_defaults(8, 128),
    ),
    "mellum": Family(
        qk_norm=QkNorm.HEAD,
        experts=Experts(
            router_first=False,
            count=("num_local_experts", 64),
            count_alias="num_experts",
            by_layer="mlp_layer_types",
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 896),
        ),
        defaults=_defaults(4, 128, sliding_window=1024),
    ),
    "gpt_oss": Family(
        sinks="sinks",
        experts=Experts(
            router="router",
            router_bias=True,
            bias=True,
            transposed=True,
            interleaved=True,
            count=("num_local_experts", 128),
            count_alias="num_experts",
            per_token=("num_experts_per_tok", 4),
        ),
        defaults=_defaults(8, 64, attention_bias=True, sliding_window=128),
    ),
    "glm4_moe": Family(
        qk_norm=QkNorm.HEAD,
        qk_norm_key="use_qk_norm",
        output_bias=False,
        experts=_routed(128, 8, 1408, dense_layers=1),
        defaults=_defaults(8),
    ),
    "solar_open": Family(output_bias=False, experts=_routed(128, 8, 1280), defaults=_defaults(8, 128)),
    "dots1": Family(
        qk_norm=QkNorm.HEAD,
        experts=_routed(None, None, 1408, dense_layers=0),
        defaults=_defaults(32, sliding_window=4096),
    ),
    "exaone_moe": Family(
        qk_norm=QkNorm.HEAD,
        qkv_bias=False,
        output_bias=False,
        experts=_routed(
            64,
            8,
            1024,
            dense_layers=1,
            count_key="num_experts",
            count_alias=None,
            by_layer="mlp_layer_types",
            shared_key="num_shared_experts",
        ),
        defaults=_defaults(32, sliding_window=4096),
    ),
    "deepseek_v2": Family(
        latent=Latent(),
        mlp_bias="mlp_bias",
        experts=_routed(64, None, 1407, dense_layers=0, shared=2, count_alias="num_experts"),
    ),
    "deepseek_v3": Family(latent=Latent(), experts=_routed(256, 8, 2048, dense_layers=3)),
    "youtu": Family(latent=Latent(), defaults=_defaults(16, **_TIED)),
    "minicpm3": Family(latent=Latent(768, 256, 64, 32, 64), mlp_bias="mlp_bias", defaults=_defaults(**_TIED)),
    "glm4_moe_lite": Family(
        latent=Latent(768, 512, 192, 64, 256),
        experts=_routed(64, 4, 1536, by_layer="mlp_layer_types", dense_by_default=1),
    ),
    "axk1": Family(
        latent=Latent(),
        experts=_routed(192, 8, 2048, by_layer="mlp_layer_types", dense_layers=1, norm_after="post_mlp_layernorm"),
        refusals=(
            Refusal(
                "moe_layer_freq",
                lambda config: config.get("mlp_layer_types") is None and config.get("moe_layer_freq", 1) != 1,
                "it has to be 1: every layer from the first with experts on has them",
            ),
        ),
    ),
    "ernie4_5_moe": Family(
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        head_bias="use_bias",
        own_head_dim=False,
        experts=Experts(
            shared="shared_experts",
            shared_is_optional=True,
            correction="gate.moe_statics.e_score_correction_bias",
            correction_dims=2,
            count=("moe_num_experts", 64),
            count_alias="num_experts",
            per_token=("moe_k", 6),
            chosen_alias="num_experts_per_tok",
            width=("moe_intermediate_size", 1536),
            shared_count=("moe_num_shared_experts", 2),
            dense_layers=("moe_layer_start_index", 1),
        ),
        refusals=(
            Refusal(
                "moe_layer_end_index",
                lambda config: -1 < config.get("moe_layer_end_index", 27) < config.get("num_hidden_layers", 28) - 1,
                "dense layers behind those with experts are not described: it has to be the last layer, or -1",
            ),
            Refusal(
                "moe_layer_interval",
                lambda config: config.get("moe_layer_interval", 1) != 1,
                "it has to be 1: every layer from the first with experts on has them",
            ),
        ),
        defaults=_defaults(4, **_TIED),
    ),
    "hunyuan_v1_moe": Family(
        qk_norm=QkNorm.HEAD,
        qk_norm_names=("query_layernorm", "key_layernorm"),
        experts=Experts(
            router="gate.wg",
            shared="shared_mlp",
            count=("num_experts", 1),
            count_alias="num_local_experts",
            per_token=("moe_topk", 1),
            chosen_alias="num_experts_per_tok",
            shared_width=("intermediate_size", None),
        ),
    ),
    "hy_v3": Family(
        qk_norm=QkNorm.HEAD,
        mlp_bias="mlp_bias",
        experts=_routed(
            192,
            8,
            1536,
            count_key="num_experts",
            shared_key="num_shared_experts",
            by_layer="mlp_layer_types",
            dense_by_default=1,
            router_first=True,
        ),
        defaults=_defaults(8, 128),
    ),
    "hyperclovax": Family(
        mlp_bias="mlp_bias",
        more_norms=("use_post_norm", True, ("post_norm1", "post_norm2")),
        defaults={"use_post_norm": True},
    ),
    "cohere2_moe": Family(
        norms=("input_layernorm",),
        experts=Experts(
            shared="shared_experts",
            shared_is_optional=True,
            count=("num_experts", 8),
            per_token=("num_experts_per_tok", 2),
            shared_count=("num_shared_experts", 0),
            by_layer="mlp_layer_types",
            dense_layers=("first_k_dense_replace", 0),
            dense_width=("prefix_dense_intermediate_size", None),
        ),
        defaults=_defaults(64, 128, sliding_window=4096, **_TIED),
    ),
    "granitemoeshared": Family(
        order=("attention", "norms", "mlp"),
        experts=Experts(
            block="block_sparse_moe",
            router="router",
            beside="shared_mlp",
            shared_is_optional=True,
            shared_width=("shared_intermediate_size", 0),
        ),
    ),
    "granite_swa": Family(
        sinks="sinks",
        own_head_dim=False,
        mlp_bias="mlp_bias",
        defaults=_defaults(4, sliding_window=128, **_TIED),
    ),
    "granitemoe_swa": Family(
        sinks="sinks",
        own_head_dim=False,
        order=("attention", "norms", "mlp"),
        experts=Experts(
            block="block_sparse_moe",
            router="router",
            beside="shared_mlp",
            shared_is_optional=True,
            shared_width=("shared_intermediate_size", 0),
        ),
        defaults=_defaults(sliding_window=128),
    ),
    "afmoe": Family(
        qk_norm=QkNorm.HEAD,
        gate="gate_proj",
        order=("attention", "norms", "mlp"),
        norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        experts=Experts(
            router="router.gate",
            shared="shared_experts",
            shared_first=True,
            correction="expert_bias",
            correction_first=True,
            count=("num_experts", 64),
            per_token=("num_experts_per_tok", 6),
            width=("moe_intermediate_size", 1408),
            shared_count=("num_shared_experts", 2),
            dense_layers=("num_dense_layers", 1),
        ),
        defaults=_defaults(16, 128, sliding_window=1024),
    ),
    "laguna": Family(
        qk_norm=QkNorm.HEAD,
        gate="g_proj",
        gate_of_heads=lambda config: config.get("gating", True) in (True, "per-head"),
        experts=Experts(
            router_first=False,
            shared="shared_experts",
            correction="gate.e_score_correction_bias",
            count=("num_experts", 256),
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 512),
            shared_width=("shared_expert_intermediate_size", 512),
            by_layer="mlp_layer_types",
            dense_by_default=1,
        ),
        refusals=(
            Refusal(
                "num_attention_heads_per_layer",
                lambda config: (
                    set(config.get("num_attention_heads_per_layer") or ()) - {config.get("num_attention_heads")}
                    != set()
                ),
                "layers with different numbers of heads are not described: all have to be num_attention_heads",
            ),
        ),
        defaults=_defaults(8, 128, sliding_window=512),
    ),
    "flint": Family(
        sinks="sinks",
        qk_norm=QkNorm.HEAD,
        experts=Experts(
            router_first=False,
            shared="shared_expert",
            count=("num_experts", 256),
            per_token=("num_experts_per_tok", 6),
            width=("moe_intermediate_size", 512),
            shared_width=("shared_expert_intermediate_size", 1024),
        ),
        defaults=_defaults(4, 128, sliding_window=513, mlp_only_layers=(0, 1)),
    ),
    "kolibri1": Family(
        qk_norm=QkNorm.HEAD,
        qkv_bias=False,
        output_bias=False,
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        experts=Experts(
            router_first=False,
            shared="shared_experts",
            count=("num_local_experts", 384),
            count_alias="num_experts",
            per_token=("num_experts_per_tok", 6),
            width=("moe_intermediate_size", 512),
            shared_width=("shared_expert_intermediate_size", 512),
        ),
        defaults=_defaults(4, 128, sliding_window=513),
    ),
    "aria_text": Family(
        mlp_bias="mlp_bias",
        experts=Experts(
            router="router",
            shared="shared_experts",
            transposed=True,
            count=("moe_num_experts", 8),
            per_token=("moe_topk", 2),
            shared_count=("moe_num_shared_experts", 2),
        ),
    ),
    "minimax_m3_vl_text": Family(
        qk_norm=QkNorm.HEAD,
        qkv_bias=False,
        output_bias=False,
        up=_FUSED_UP,
        experts=Experts(
            shared="shared_experts",
            count=("num_local_experts", 128),
            count_alias="num_experts",
            per_token=("num_experts_per_tok", 4),
            width=("intermediate_size", 3072),
            shared_width=("shared_intermediate_size", 3072),
            by_layer="mlp_layer_types",
            dense_width=("dense_intermediate_size", 12288),
        ),
        refusals=(
            Refusal(
                "layer_types",
                lambda config: "minimax_m3_sparse" in (config.get("layer_types") or ()),
                "minimax_m3_sparse layers choose blocks of keys by an indexer, which neither the tables nor the ring "
                "know: only full_attention is described",
            ),
            Refusal(
                "sparse_attention_config",
                lambda config: (
                    config.get("layer_types") is None
                    and any((config.get("sparse_attention_config") or {}).get("sparse_attention_freq") or ())
                ),
                "its sparse layers choose blocks of keys by an indexer, which neither the tables nor the ring know",
            ),
            Refusal(
                "moe_layer_freq",
                lambda config: (
                    config.get("mlp_layer_types") is None and not all(config.get("moe_layer_freq") or (True,))
                ),
                "write the kinds of layers as mlp_layer_types",
            ),
        ),
        defaults=_defaults(4, 128),
    ),
    "stablelm": Family(
        qkv_bias="use_qkv_bias",
        output_bias=False,
        own_head_dim=False,
        norm=Norm.WEIGHT_AND_BIAS,
        norms=("input_layernorm",),
        more_norms=("use_parallel_residual", False, ("post_attention_layernorm",)),
        refusals=(
            Refusal(
                "qk_layernorm",
                lambda config: bool(config.get("qk_layernorm")),
                "a LayerNorm of its own for each head is not described: set it to false",
            ),
        ),
    ),
    "gpt2": Family(
        base="transformer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        refusals=(
            Refusal(
                "add_cross_attention",
                lambda config: bool(config.get("add_cross_attention")),
                "it makes gpt2 a decoder behind an encoder",
            ),
        ),
        defaults=_TIED,
    ),
}
"""The model types whose parameters the compiler knows exactly."""
