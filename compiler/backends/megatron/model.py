"""Megatron-LM's arguments that describe a model; see `megatron`."""

from __future__ import annotations

from parcompile.spec import Spec

Value = int | float | str | bool | list[str] | list[int]
Arguments = dict[str, Value]
"""Flags without their dashes; True is a flag without a value."""


def model_arguments(spec: Spec) -> Arguments:
    """Layers, experts and latent attention."""
    return {**_model(spec), **_mixture(spec), **_latent_attention(spec)}


def _model(spec: Spec) -> Arguments:
    shape, config = spec.model.shape, spec.model.hf_config
    found: Arguments = {
        "num-layers": shape.num_hidden_layers,
        "hidden-size": shape.hidden_size,
        "ffn-hidden-size": shape.intermediate_size,
        "num-attention-heads": shape.num_attention_heads,
        "max-position-embeddings": max(shape.max_position_embeddings, spec.training.sequence_length),
        "vocab-size": shape.vocab_size,
        "make-vocab-size-divisible-by": spec.parallelism.make_vocab_size_divisible_by,
        "normalization": "LayerNorm" if shape.norm_bias else "RMSNorm",
        "norm-epsilon": float(
            config.get("rms_norm_eps", config.get("layer_norm_epsilon", 1e-5 if shape.norm_bias else 1e-6))
        ),
        "init-method-std": float(config.get("initializer_range", 0.02)),
        "attention-dropout": float(config.get("attn_pdrop", config.get("attention_dropout", 0.0))),
        "hidden-dropout": float(config.get("resid_pdrop", 0.0)),
    }
    if shape.mla is None:
        found["kv-channels"] = shape.head_dim
        if shape.num_key_value_heads != shape.num_attention_heads:
            found["group-query-attention"] = True
            found["num-query-groups"] = shape.num_key_value_heads
    if shape.rotary:
        found["position-embedding-type"] = "rope"
        found["rotary-base"] = int(config.get("rope_theta", 10000))
        found["rotary-percent"] = float(config.get("partial_rotary_factor", 1.0))
    else:
        found["position-embedding-type"] = "learned_absolute"
    flags = {
        "swiglu": shape.gated_mlp,
        "disable-bias-linear": not shape.mlp_bias,
        "add-qkv-bias": shape.qkv_bias and not shape.attention_output_bias,
        "qk-layernorm": shape.qk_norm,
        "untie-embeddings-and-output-weights": not shape.tie_word_embeddings,
    }
    return found | {name: True for name, on in flags.items() if on}


def _mixture(spec: Spec) -> Arguments:
    moe, layers = spec.model.shape.moe, spec.model.shape.num_hidden_layers
    if moe is None:
        return {}
    found: Arguments = {
        "num-experts": moe.num_experts,
        "moe-router-topk": moe.num_experts_per_token,
        "moe-ffn-hidden-size": moe.intermediate_size,
    }
    if moe.num_shared_experts:
        found["moe-shared-expert-intermediate-size"] = moe.num_shared_experts * moe.intermediate_size
    if moe.first_moe_layer:
        found["moe-layer-freq"] = f"([0]*{moe.first_moe_layer}+[1]*{layers - moe.first_moe_layer})"
    return found


def _latent_attention(spec: Spec) -> Arguments:
    mla = spec.model.shape.mla
    if mla is None:
        return {}
    queries: Arguments = {} if mla.q_lora_rank is None else {"q-lora-rank": mla.q_lora_rank}
    return {
        "multi-latent-attention": True,
        **queries,
        "kv-lora-rank": mla.kv_lora_rank,
        "qk-head-dim": mla.qk_nope_head_dim,
        "qk-pos-emb-head-dim": mla.qk_rope_head_dim,
        "v-head-dim": mla.v_head_dim,
    }
