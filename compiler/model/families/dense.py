"""Dense decoders in the manner of Llama: RMSNorm, rotary positions, gated or plain MLPs."""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.model.family import Family, Norm, QkNorm, Refusal

from .traits import FOUR_NORMS, FUSED_UP, POST_NORMS, TIED, UP_ONLY, defaults_of

_INTERNLM3_BIAS = ("attention_bias", "qkv_bias", "mlp_bias", "bias")

DENSE: Mapping[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias"),
    "cwm": Family(
        qkv_bias=False, output_bias=False, mlp_bias="mlp_bias", defaults=defaults_of(8, 128, sliding_window=8192)
    ),
    "iquestcoder": Family(mlp_bias="mlp_bias", defaults=defaults_of(8, 128)),
    "ministral3": Family(qkv_bias=False, output_bias=False, defaults=defaults_of(8, 128)),
    "vaultgemma": Family(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        defaults=defaults_of(4, 256, sliding_window=4096, **TIED),
    ),
    "hunyuan_v1_dense": Family(qk_norm=QkNorm.HEAD, qk_norm_names=("query_layernorm", "key_layernorm")),
    "diffllama": Family(
        paired_heads=True,
        head_vectors=("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),
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
    ),
    "mistral": Family(qkv_bias=False, output_bias=False, defaults=defaults_of(8, sliding_window=4096)),
    "ministral": Family(qkv_bias=False, output_bias=False, defaults=defaults_of(8, sliding_window=4096)),
    "qwen2": Family(
        qkv_bias=True,
        output_bias=False,
        own_head_dim=True,
        window_key="use_sliding_window",
        defaults=defaults_of(32, sliding_window=4096),
    ),
    "qwen3": Family(
        qk_norm=QkNorm.HEAD,
        window_key="use_sliding_window",
        defaults=defaults_of(32, 128, sliding_window=4096),
    ),
    "gemma": Family(defaults=defaults_of(16, 256, **TIED)),
    "gemma2": Family(norms=FOUR_NORMS, defaults=defaults_of(4, 256, sliding_window=4096, **TIED)),
    "gemma3_text": Family(
        norms=FOUR_NORMS,
        qk_norm=QkNorm.HEAD,
        # The published configurations of multimodal models leave out more than others do.
        defaults=defaults_of(
            4,
            256,
            sliding_window=4096,
            num_attention_heads=8,
            vocab_size=262208,
            max_position_embeddings=131072,
            **TIED,
        ),
    ),
    "phi3": Family(qkv=("qkv_proj",), output_first=True, up=FUSED_UP, qkv_bias=False, output_bias=False),
    "olmo": Family(norm=Norm.NOTHING),
    "olmo2": Family(qk_norm=QkNorm.WHOLE, norms=POST_NORMS),
    "olmo3": Family(qk_norm=QkNorm.WHOLE, norms=POST_NORMS, defaults=defaults_of(sliding_window=4096)),
    "cohere": Family(
        qk_norm=QkNorm.HEADS, qk_norm_key="use_qk_norm", norms=("input_layernorm",), defaults=defaults_of(**TIED)
    ),
    "cohere_compass_text": Family(norms=("input_layernorm",), defaults=defaults_of(sliding_window=4096, **TIED)),
    "bitnet": Family(sub_norms=("attn_sub_norm", "ffn_sub_norm"), hidden_is_heads=True, defaults=defaults_of(5)),
    "cohere2": Family(norms=("input_layernorm",), defaults=defaults_of(sliding_window=4096, **TIED)),
    "glm": Family(up=FUSED_UP, output_bias=False, defaults=defaults_of(2, 128, attention_bias=True)),
    "glm4": Family(
        up=FUSED_UP,
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        output_bias=False,
        defaults=defaults_of(2, 128, attention_bias=True),
    ),
    "granite": Family(mlp_bias="mlp_bias"),
    "smollm3": Family(mlp_bias="mlp_bias", window_key="use_sliding_window", defaults=defaults_of(4, **TIED)),
    "helium": Family(hidden_is_heads=True, output_bias=False, mlp_bias="mlp_bias", defaults=defaults_of(20, 128)),
    "internlm3": Family(
        qkv_bias=_INTERNLM3_BIAS, output_bias=_INTERNLM3_BIAS, mlp_bias=_INTERNLM3_BIAS, defaults=defaults_of(2, 128)
    ),
    "seed_oss": Family(
        output_bias="attention_out_bias", mlp_bias="mlp_bias", defaults=defaults_of(8, 128, attention_bias=True)
    ),
    "exaone4": Family(
        qk_norm=QkNorm.HEAD,
        norms=POST_NORMS,
        qkv_bias=False,
        output_bias=False,
        defaults=defaults_of(32, sliding_window=4096),
    ),
    "ernie4_5": Family(
        qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", defaults=defaults_of(2, 128, **TIED)
    ),
    "arcee": Family(up=UP_ONLY, gated=False, mlp_bias="mlp_bias"),
    "apertus": Family(
        qk_norm=QkNorm.HEAD,
        up=UP_ONLY,
        gated=False,
        activation=("act_fn.alpha_p", "act_fn.alpha_n"),
        norms=("attention_layernorm", "feedforward_layernorm"),
    ),
    "nanochat": Family(up=("fc1",), gated=False, down="fc2", norm=Norm.NOTHING),
    "hyperclovax": Family(
        mlp_bias="mlp_bias",
        more_norms=("use_post_norm", True, ("post_norm1", "post_norm2")),
        defaults={"use_post_norm": True},
    ),
    "granite_swa": Family(
        sinks="sinks",
        mlp_bias="mlp_bias",
        defaults=defaults_of(4, sliding_window=128, **TIED),
    ),
}
