"""Mixtures of routed experts, alone or with a shared expert or an MLP beside them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Family, Refusal
from parcompile.model.layers import whole

from .added import by_step, routed

# Mixtures of routed experts alone.

QWEN3_MOE = Family(
    window_key="use_sliding_window",
    experts=Experts(
        count=("num_experts", 128),
        per_token=("num_experts_per_tok", 8),
        width=("moe_intermediate_size", 768),
        layers=by_step,
    ),
    defaults={"sliding_window": 4096},
)


# Mixtures of experts with a shared expert, or an MLP, beside the routed ones.


def _of_ernie(config: Mapping[str, Any], count: int) -> list[int]:
    """The last layer of each moe_layer_interval, from moe_layer_start_index to moe_layer_end_index."""
    step = whole(config, "moe_layer_interval", 1, least=1)
    first = whole(config, "moe_layer_start_index", 1, least=0)
    last = whole(config, "moe_layer_end_index", -1, least=-1)
    end = count - 1 if last == -1 else last
    return [layer for layer in range(count) if (layer + 1) % step == 0 and first <= layer <= end]


QWEN2_MOE = Family(
    window_key="use_sliding_window",
    window_only_in="mask",
    experts=Experts(
        shared="shared_expert",
        count=("num_experts", 60),
        per_token=("num_experts_per_tok", 4),
        width=("moe_intermediate_size", 1408),
        shared_width=("shared_expert_intermediate_size", 5632),
        layers=by_step,
    ),
    defaults={"sliding_window": 4096},
)
DEEPSEEK_OCR2_TEXT = Family(
    hidden_is_heads=True,
    experts=routed(64, None, 1407, by_layer="mlp_layer_types", shared=2),
    refusals=(
        Refusal(
            "first_k_dense_replace",
            lambda config: (
                not config.get("mlp_layer_types") and not isinstance(config.get("first_k_dense_replace", 1), int)
            ),
            "it has to be a whole number where no mlp_layer_types lists the kind of each layer",
        ),
        Refusal(
            "mlp_layer_types",
            lambda config: not config.get("mlp_layer_types"),
            "it has to list the kind of each layer, dense or sparse: transformers builds no model without it",
        ),
    ),
)
ERNIE4_5_MOE = Family(
    experts=Experts(
        shared="shared_experts",
        shared_is_optional=True,
        count=("moe_num_experts", 64),
        per_token=("moe_k", 6),
        width=("moe_intermediate_size", 1536),
        shared_count=("moe_num_shared_experts", 2),
        dense_layers=("moe_layer_start_index", 1),
        layers=_of_ernie,
    )
)
LAGUNA = Family(
    gate="g_proj",
    gate_of_heads=lambda config: config.get("gating", True) in (True, "per-head"),
    experts=Experts(
        shared="shared_experts",
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
                set(config.get("num_attention_heads_per_layer") or ()) - {config.get("num_attention_heads")} != set()
            ),
            "layers with different numbers of heads are not described: all have to be num_attention_heads",
        ),
    ),
    defaults={"sliding_window": 512},
)
FLINT = Family(
    sinks="sinks",
    experts=Experts(
        shared="shared_expert",
        count=("num_experts", 256),
        per_token=("num_experts_per_tok", 6),
        width=("moe_intermediate_size", 512),
        shared_width=("shared_expert_intermediate_size", 1024),
        layers=functools.partial(by_step, dense=(0, 1)),
    ),
    defaults={"sliding_window": 513},
)
MINIMAX_M3_VL_TEXT = Family(
    experts=Experts(
        shared="shared_experts",
        count=("num_local_experts", 128),
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
                config.get("mlp_layer_types") is None
                and not (isinstance(listed := config.get("moe_layer_freq") or [True], list) and all(listed))
            ),
            "write the kinds of layers as mlp_layer_types",
        ),
    ),
)
