"""Sparse attention over the keys that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parcompile.model.family import Family, Latent, Refusal
from parcompile.model.indexer import Indexer, every_fourth, scheduled_kinds

from .traits import all_heads, by_frequency, routed

_COUNTS = ("n_routed_experts", "num_local_experts")


def _another_count(config: Mapping[str, Any]) -> bool:
    """Whether the old key of the number of experts, which transformers puts before the others, says something else."""
    old = config.get("num_experts")
    return old is not None and all(config.get(key) != old for key in _COUNTS)


def _other_layers(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    return kinds is not None and any(kind != "indexed_attention" for kind in kinds)


def _narrow_head(rotary: int, head: int) -> Callable[[Mapping[str, Any]], bool]:
    return lambda config: config.get("index_head_dim", head) < config.get("qk_rope_head_dim", rotary)


def _refusals(latent: Latent, indexer: Indexer, *others: Refusal) -> tuple[Refusal, ...]:
    return (
        *others,
        Refusal(
            "q_lora_rank",
            lambda config: "q_lora_rank" in config and config["q_lora_rank"] is None,
            "it is null, and the indexer takes the compressed queries: write their width",
        ),
        Refusal(
            "layer_types",
            _other_layers,
            "transformers runs the indexer in every layer of this type whatever the list says: write "
            '"indexed_attention" for each layer, or leave it out',
        ),
        Refusal(
            "index_head_dim",
            _narrow_head(latent.qk_rope_head_dim, indexer.head_dim),
            "it is less than qk_rope_head_dim, the part of the indexer's heads that is rotated",
        ),
    )


_OLD_COUNT = Refusal(
    "num_experts",
    _another_count,
    "it is the old name of n_routed_experts, which says something else: write n_routed_experts alone",
)
_GROUPS = Refusal(
    "n_group",
    lambda config: (config.get("n_group") is None) != (config.get("topk_group") is None),
    "n_group and topk_group are given together, or neither is",
)

_KEYS_OF_QUERIES = Refusal(
    "num_key_value_heads",
    lambda config: (
        config.get("num_key_value_heads") is not None
        and config["num_key_value_heads"] != config.get("num_attention_heads", 32)
    ),
    "transformers makes it num_attention_heads whatever it says: write that, or leave it out",
)
_CLAMP = Refusal(
    "swiglu_limit",
    lambda config: isinstance(config.get("swiglu_limit"), int | float) and config["swiglu_limit"] <= 0,
    "transformers 5.23 clamps experts by it, while its documentation says that 0 or less leaves them as they are: "
    "write a large number in place of it",
)

_V32, _GLM, _AX = Latent(), Latent(2048, 512, 192, 64, 256), Latent(384, 128, 64, 32, 64)
_HY = Latent(1536, 512, 192, 64, 256)
_V32_INDEXER, _GLM_INDEXER, _AX_INDEXER = Indexer(), Indexer(heads=32, kinds=scheduled_kinds), Indexer(heads=16)
_HY_INDEXER = Indexer(heads=16, kinds=every_fourth)

INDEXED: Mapping[str, Family] = {
    "deepseek_v32": Family(
        latent=_V32,
        indexer=_V32_INDEXER,
        experts=routed(256, 8, 2048, dense_layers=3, by_layer="mlp_layer_types"),
        refusals=_refusals(_V32, _V32_INDEXER, _OLD_COUNT),
    ),
    "glm_moe_dsa": Family(
        latent=_GLM,
        indexer=_GLM_INDEXER,
        experts=routed(256, 8, 2048, dense_layers=3, by_layer="mlp_layer_types"),
        refusals=_refusals(_GLM, _GLM_INDEXER, _OLD_COUNT),
    ),
    "axk2": Family(
        latent=_AX,
        indexer=_AX_INDEXER,
        gate="q_gate_proj",
        query_gate=True,
        norm_gate=("gated_norm_rank", 16),
        experts=routed(128, 8, 512, dense_layers=1, by_layer="mlp_layer_types", layers=by_frequency(1)),
        refusals=_refusals(_AX, _AX_INDEXER, _GROUPS),
    ),
    "hy_v4": Family(
        latent=_HY,
        indexer=_HY_INDEXER,
        kv_heads=all_heads,
        gate="gate_proj",
        sinks="sinks",
        hyper_streams=("hc_mult", 4),
        experts=routed(256, 8, 768, by_layer="mlp_layer_types", dense_by_default=1),
        refusals=_refusals(_HY, _HY_INDEXER, _KEYS_OF_QUERIES, _CLAMP),
    ),
}
