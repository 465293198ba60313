"""A tiny configuration of every family, with what makes it special switched on: windows, soft-caps, biases, norms."""

from __future__ import annotations

from typing import Any

from parcompile.model.hf_config import FAMILIES

_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}

_INDEXED = {"index_n_heads": 3, "index_head_dim": 6, "index_topk": 5}

_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64}
_OLD = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}

TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}

_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}

_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 6, "mamba_chunk_size": 4}
_GEMMA4_LAYERS = {
    "num_hidden_layers": 4,
    "head_dim": 4,
    "global_head_dim": 8,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    # A norm behind each block, and behind the gate of a layer's input, makes rounding of small values large.
    "rms_norm_eps": 1.0,
}
_GEMMA4 = {
    **_GEMMA4_LAYERS,
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 67,
}

_KIMI_DELTA = {
    **{key: value for key, value in _LATENT.items() if key != "q_lora_rank"},
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}

_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "ministral": {"head_dim": 8, **_MIXED},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 8, **_MIXED, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, **_MIXED, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 5},
    "olmo": {"clip_qkv": 0.8},
    "olmo3": _MIXED,
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {**_MIXED, "logit_scale": 0.5},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "granite": {
        "embedding_multiplier": 1.5,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "starcoder2": {"sliding_window": 5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "nemotron": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "gpt_neox": {"rotary_pct": 0.5},
    "internlm3": {"head_dim": 8},
    "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "exaone4": _MIXED,
    "ernie4_5": {"head_dim": 8},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": 5},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "lm_head_bias": True},
    "granitemoe": {"num_local_experts": 4, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "deepseek_v3": {**_ROUTED, **_LATENT, "n_group": 2, "first_k_dense_replace": 1},
    "cwm": {"head_dim": 8, **_MIXED},
    "iquestcoder": {"head_dim": 8},
    "ministral3": {"head_dim": 8},
    "vaultgemma": {"head_dim": 8, **_MIXED, "query_pre_attn_scalar": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "persimmon": {"num_key_value_heads": 4},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "mellum": {"num_local_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 8, **_MIXED},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        **_MIXED,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
    "glm4_moe": {"use_qk_norm": True, **_ROUTED},
    "solar_open": {"head_dim": 8, **_ROUTED},
    "dots1": {**_ROUTED, "n_group": 2, "first_k_dense_replace": 1},
    "exaone_moe": {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, **_MIXED},
    "deepseek_v2": {**_ROUTED, **_LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "n_group": 2, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v32": {**_ROUTED, **_LATENT, **_INDEXED, "n_group": 2, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**_ROUTED, **_LATENT, **_INDEXED, "n_group": 2, "mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_text": {
        **_ROUTED,
        **_LATENT,
        **_INDEXED,
        "head_dim": 12,
        "shared_experts_intermediate_size": 20,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 5,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 10,
        "swa_kv_lora_rank": 14,
        "swa_head_dim": 10,
        "swa_qk_nope_head_dim": 6,
        "swa_v_head_dim": 6,
    },
    "axk2": {**_ROUTED, **_LATENT, **_INDEXED, "gated_norm_rank": 3, "mlp_layer_types": ["dense", "sparse"]},
    "hy_v4": {
        **_ROUTED,
        **_LATENT,
        **_INDEXED,
        "hc_mult": 3,
        "pad_token_id": 0,
        "swiglu_limit": 0.5,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mistral4": {
        **_ROUTED,
        **_LATENT,
        "n_group": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "axk1": {**_ROUTED, **_LATENT, "n_group": 2, "mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "use_bias": True},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "hy_v3": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "mlp_bias": True,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "hyperclovax": {
        "head_dim": 8,
        "embedding_multiplier": 1.5,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "cohere2_moe": {
        "num_experts": 4,
        "num_shared_experts": 2,
        "head_dim": 8,
        "prefix_dense_intermediate_size": 40,
        **_MIXED,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoeshared": {
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "granite_swa": {**_MIXED, "attention_multiplier": 0.3, "layer_rope_theta": [10000.0, 0]},
    "granitemoe_swa": {**_MIXED, "num_local_experts": 4, "shared_intermediate_size": 40, "attention_multiplier": 0.3},
    "afmoe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "mup_enabled": True,
        **_MIXED,
    },
    "laguna": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        **_MIXED,
        "shared_expert_intermediate_size": 40,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "flint": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        **_MIXED,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "kolibri1": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        **_MIXED,
        "shared_expert_intermediate_size": 40,
    },
    "aria_text": {"moe_num_experts": 4, "head_dim": 8, "mlp_bias": True},
    "minimax_m3_vl_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "dense_intermediate_size": 40,
        "shared_intermediate_size": 24,
        "rotary_dim": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_bias": True, "block_multiple_of": 8},
    "hrm_text": {"head_dim": 8, "attention_bias": True, "embedding_scale": 1.5},
    "lfm3": {
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "head_dim": 8,
        "conv_bias": True,
        "conv_L_cache": 3,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    },
    "qwen3_next": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
        "layer_types": ["linear_attention", "full_attention"],
        **_GATED_DELTA,
    },
    "kimi_linear": {**_KIMI_DELTA, "linear_num_heads": 2, "linear_head_dim": 6, "q_lora_rank": None},
    "bailing_hybrid": {**_KIMI_DELTA, "head_dim": 6},
    "minimax": {
        "head_dim": 10,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_attn_alpha_factor": 0.7,
        "linear_attn_beta_factor": 1.3,
        "full_attn_alpha_factor": 0.8,
        "mlp_beta_factor": 1.2,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], **_GATED_DELTA},
    "qwen3_5_text": {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], **_GATED_DELTA},
    "qwen3_5_moe_text": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
        **_GATED_DELTA,
    },
    "bamba": {"attn_layer_indices": [1], **_MAMBA2},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 6,
        "mamba_dt_rank": 3,
    },
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 2,
        "adapter_rank": 3,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 6,
        "chunk_size": 4,
        "tie_word_embeddings": True,
        # A norm of what the attention alone gives, with no residual stream in it, makes its rounding large: with
        # weights twice as large, a change of each by its last bit changes the gradient norm of one process by 2e-4.
        "rms_norm_eps": 0.1,
        "initializer_range": 0.1,
    },
    "falcon_h1": {
        **_MAMBA2,
        "mamba_d_ssm": 64,
        "mamba_rms_norm": True,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
        "mlp_multipliers": [0.9, 1.1],
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.5,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "num_hidden_layers": 4,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 6,
        "chunk_size": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
        "rescale_prenorm_residual": False,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 6, "time_step_rank": 3},
    "falcon_mamba": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 6,
        "time_step_rank": 3,
        "intermediate_size": 48,
        "mixer_rms_eps": 0.01,
    },
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "state_size": 6,
        "chunk_size": 4,
        "time_step_limit": [0.01, 2.0],
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.5,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        **_MAMBA2,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size_mlp": 40,
        "head_dim": 8,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 6,
        "floor_scale": 4,
    },
    "mimo_v2_flash": {
        "head_dim": 12,
        "v_head_dim": 8,
        "num_key_value_heads": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 5,
        "routed_scaling_factor": None,
    },
    "gemma3n_text": {
        **{key: value for key, value in _GEMMA4_LAYERS.items() if key != "global_head_dim"},
        "num_kv_shared_layers": 2,
        "intermediate_size": [48, 40, 48, 48],
        "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0],
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 57,
        "laurel_rank": 6,
        "altup_num_inputs": 3,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {**_GEMMA4_LAYERS, "attention_k_eq_v": True},
    "cohere_compass_text": {**_MIXED, "logit_scale": 0.5, "rope_parameters": TWO_ROPES},
    "bitnet": {"hidden_act": "silu"},
    "gpt2": {**_GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {**_GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "gpt_neox_japanese": {**_OLD, "intermediate_multiple_size": 2, "rotary_pct": 0.5, "attention_dropout": 0.0},
    "openai-gpt": {**_GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "ctrl": {**_GPT, "dff": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "modernbert-decoder": {
        **_OLD,
        "intermediate_size": 48,
        "local_attention": 10,
        "layer_types": ["full_attention", "sliding_attention"],
        "norm_bias": True,
        "classifier_bias": True,
        "pad_token_id": 1,
    },
    "diffllama": {"head_dim": 8},
    "beam": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        **_MIXED,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
    },
    "opt": {**_OLD, "ffn_dim": 48, "dropout": 0.0, "pad_token_id": 1, "word_embed_proj_dim": 32},
    "biogpt": {
        **_OLD,
        "intermediate_size": 48,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 1,
    },
    "xglm": {
        "d_model": 32,
        "num_layers": 2,
        "attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 1,
    },
    "falcon": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "ffn_hidden_size": 48,
        "max_position_embeddings": 64,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
}

OWN_KEYS = (
    *("gpt2", "gpt_bigcode", "gptj", "gpt_neo", "opt", "biogpt", "xglm", "falcon", "bloom", "mpt"),
    *("codegen", "gpt_neox_japanese", "openai-gpt", "ctrl", "modernbert-decoder"),
    *("mamba", "falcon_mamba", "mamba2"),
)
"""Families whose configurations have other keys than Llama's."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text, experts": (
        "gemma4_text",
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_unified_text, shared keys": (
        "gemma4_unified_text",
        {
            "num_hidden_layers": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "num_kv_shared_layers": 2,
        },
    ),
    "falcon, multi-query": ("falcon", {"new_decoder_architecture": False}),
    "falcon, ALiBi": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "alibi": True,
            "parallel_attn": False,
            "multi_query": False,
            "num_kv_heads": None,
            "bias": True,
        },
    ),
    "gpt_bigcode, every head": ("gpt_bigcode", {"multi_query": False}),
    "zamba2, 2 groups": (
        "zamba2",
        {
            "mamba_ngroups": 2,
            "add_bias_linear": True,
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "num_key_value_heads": 2,
            "num_mem_blocks": 1,
        },
    ),
    "bamba, 2 groups": ("bamba", {"mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    "falcon_h1, no norm": (
        "falcon_h1",
        {"mamba_rms_norm": False, "mamba_n_groups": 2, "projectors_bias": True, "mamba_proj_bias": True},
    ),
    "falcon_h1, gate before the norm": ("falcon_h1", {"mamba_norm_before_gate": False}),
    "granitemoehybrid, no experts": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 4},
    ),
    "jamba, dense": (
        "jamba",
        {
            "num_experts": 1,
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "mamba, 48 channels": (
        "mamba",
        {
            "intermediate_size": 48,
            "time_step_rank": "auto",
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "mamba2, 2 groups": (
        "mamba2",
        {"n_groups": 2, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "bloom, 6 heads": ("bloom", {"hidden_size": 48, "n_head": 6}),
    "glm_moe_dsa, shared choice": (
        "glm_moe_dsa",
        {"num_hidden_layers": 4, "mlp_layer_types": ["dense", *["sparse"] * 3], "index_topk_pattern": "FSFS"},
    ),
    "mpt, 6 heads": ("mpt", {"d_model": 48, "n_heads": 6, "attn_config": {"clip_qkv": 0.8}}),
}
"""Other layouts of a family's parameters, or another way to attend: `benchmarks/models.py` runs them too."""


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """`config.json` of a tiny model of the family, or of a variant."""
    if family in VARIANTS:
        family, varied = VARIANTS[family]
        changes = {**varied, **changes}
    # Tests name sizes as Llama does.
    names = FAMILIES[family].keys
    changes = {key: value for name, value in changes.items() if (key := names.get(name, name)) is not None}
    common: dict[str, Any] = {"vocab_size": 61, "initializer_range": 0.2} if family in OWN_KEYS else _COMMON
    return {"model_type": family, **common, **_SPECIAL.get(family, {}), **changes}


ONE_LAYOUT = (
    *("qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "olmo_hybrid", "minimax", "kimi_linear", "bailing_hybrid"),
    *("bamba", "falcon_h1", "jamba", "nemotron_h", "granitemoehybrid", "zamba2", "mamba", "falcon_mamba", "mamba2"),
    *("glm_moe_dsa", "axk2", "dots3_note_text", "mistral4"),
    *("glm4_moe_lite", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "cohere2_moe", "kolibri1", "granitemoeshared"),
    *("bitnet", "cohere_compass_text", "gemma4_unified_text", "gemma3n_text", "mimo_v2_flash", "lfm3", "hrm_text"),
    *("codegen", "gpt_neox_japanese", "openai-gpt", "ctrl", "modernbert-decoder", "diffllama", "beam"),
    *("gpt_bigcode", "gptj", "gpt_neo", "biogpt", "xglm", "falcon", "mpt"),
    *("laguna", "flint", "aria_text", "minimax_m3_vl_text", "stablelm", "granite_swa", "granitemoe_swa"),
)
"""Relatives that the tests run in one layout only."""

RELATIVES = (
    *ONE_LAYOUT,
    *("cwm", "iquestcoder", "ministral3", "vaultgemma", "jais2", "hunyuan_v1_dense", "persimmon"),
    *("flex_olmo", "minimax_m2", "mellum", "glm4_moe", "solar_open", "dots1", "exaone_moe", "deepseek_v2", "minicpm3"),
    "hy_v4",
)
"""Families that differ from others in what is one's own of several already: the tests run them in few layouts, the
others in each; `benchmarks/models.py` runs all in each."""

__all__ = ["FAMILIES", "ONE_LAYOUT", "RELATIVES", "tiny_config"]
