"""The spec that the rules' examples change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

BASE: Mapping[str, Any] = {
    "version": 1,
    "model": {"preset": "llama-3-8b"},
    "cluster": {"nodes": 1, "gpus_per_node": 8, "accelerator": "h200"},
    "training": {"sequence_length": 8192, "global_batch_size": 64, "micro_batch_size": 1},
}
"""Breaks no rule."""

SHARING: Mapping[str, Any] = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 1,
}
"""A model the first of each four layers of which chooses keys; the other three take its choice."""

HYBRID: Mapping[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 3584,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
"""A model three quarters of whose layers carry a state in the place of attention."""

PAIRED: Mapping[str, Any] = {
    "model_type": "longcat_flash",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
"""A model of 8 layers, of which two each are one module."""

SHARED_KEYS: Mapping[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 3584,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "num_kv_shared_layers": 6,
}
"""A model whose last layers use the keys and values of earlier ones; every sixth layer is a full one."""


def example_spec(part: Mapping[str, Any]) -> dict[str, Any]:
    """`BASE` with the keys of `part` in its place.

    Sections are merged; the model is replaced, and so is a cluster that says how many GPUs a node has.
    """
    spec: dict[str, Any] = copy.deepcopy(dict(BASE))
    for key, value in part.items():
        if isinstance(value, dict) and key != "model" and "gpus_per_node" not in value:
            spec[key] = {**spec.get(key, {}), **value}
        else:
            spec[key] = copy.deepcopy(value)
    return spec
