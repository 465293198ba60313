"""Mixtures of routed experts alone."""

from __future__ import annotations

from collections.abc import Mapping

from parcompile.model.family import Experts, Family

from .traits import by_step

EXPERTS: Mapping[str, Family] = {
    "mixtral": Family(experts=Experts()),
    "qwen3_moe": Family(
        window_key="use_sliding_window",
        experts=Experts(
            count=("num_experts", 128),
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 768),
            layers=by_step,
        ),
        defaults={"sliding_window": 4096},
    ),
    "beam": Family(
        gate="gate_proj",
        experts=Experts(
            count=("num_experts", 256),
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 2560),
            by_layer="mlp_layer_types",
            dense_by_default=3,
        ),
        defaults={"sliding_window": 512},
    ),
    "olmoe": Family(
        hidden_is_heads=True,
        window_only_in="attention",
        experts=Experts(count=("num_experts", 64), per_token=("num_experts_per_tok", 8)),
    ),
    "phimoe": Family(window_only_in="mask", experts=Experts(count=("num_local_experts", 16))),
    "granitemoe": Family(experts=Experts(block="block_sparse_moe")),
    "flex_olmo": Family(experts=Experts(count=("num_experts", 7), per_token=("num_experts_per_tok", 5))),
    "minimax_m2": Family(experts=Experts(count=("num_local_experts", 256), per_token=("num_experts_per_tok", 8))),
    "mellum": Family(
        experts=Experts(
            count=("num_local_experts", 64),
            by_layer="mlp_layer_types",
            per_token=("num_experts_per_tok", 8),
            width=("moe_intermediate_size", 896),
        ),
        defaults={"sliding_window": 1024},
    ),
    "gpt_oss": Family(
        sinks="sinks",
        experts=Experts(interleaved=True, count=("num_local_experts", 128), per_token=("num_experts_per_tok", 4)),
        defaults={"sliding_window": 128},
    ),
}
