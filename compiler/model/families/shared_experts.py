"""Mixtures of routed experts, alone or with a shared expert or an MLP beside them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Family, Refusal
from parcompile.model.layer_runs import whole

from .traits import by_step, routed

# Mixtures of routed experts alone.

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


# Mixtures of experts with a shared expert, or an MLP, beside the routed ones.


def _of_ernie(config: Mapping[str, Any], count: int) -> list[int]:
    """The last layer of each moe_layer_interval, from moe_layer_start_index to moe_layer_end_index."""
    step = whole(config, "moe_layer_interval", 1, least=1)
    first = whole(config, "moe_layer_start_index", 1, least=0)
    last = whole(config, "moe_layer_end_index", -1, least=-1)
    end = count - 1 if last == -1 else last
    return [layer for layer in range(count) if (layer + 1) % step == 0 and first <= layer <= end]


_GRANITE = Experts(
    block="block_sparse_moe", beside="shared_mlp", shared_is_optional=True, shared_width=("shared_intermediate_size", 0)
)

SHARED_EXPERTS: Mapping[str, Family] = {
    "qwen2_moe": Family(
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
    ),
    "glm4_moe": Family(experts=routed(128, 8, 1408, dense_layers=1)),
    "deepseek_ocr2_text": Family(
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
    ),
    "solar_open": Family(experts=routed(128, 8, 1280)),
    "dots1": Family(experts=routed(None, None, 1408, dense_layers=0), defaults={"sliding_window": 4096}),
    "exaone_moe": Family(
        experts=routed(
            64,
            8,
            1024,
            dense_layers=1,
            count_key="num_experts",
            by_layer="mlp_layer_types",
            shared_key="num_shared_experts",
        ),
        defaults={"sliding_window": 4096},
    ),
    "ernie4_5_moe": Family(
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
    ),
    "hunyuan_v1_moe": Family(
        experts=Experts(
            shared="shared_mlp",
            count=("num_experts", 1),
            per_token=("moe_topk", 1),
            shared_width=("intermediate_size", None),
        )
    ),
    "hy_v3": Family(
        experts=routed(
            192,
            8,
            1536,
            count_key="num_experts",
            shared_key="num_shared_experts",
            by_layer="mlp_layer_types",
            dense_by_default=1,
        )
    ),
    "cohere2_moe": Family(
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
        defaults={"sliding_window": 4096},
    ),
    "granitemoeshared": Family(
        experts=_GRANITE,
    ),
    "granitemoe_swa": Family(sinks="sinks", experts=_GRANITE, defaults={"sliding_window": 128}),
    "afmoe": Family(
        gate="gate_proj",
        experts=Experts(
            shared="shared_experts",
            count=("num_experts", 64),
            per_token=("num_experts_per_tok", 6),
            width=("moe_intermediate_size", 1408),
            shared_count=("num_shared_experts", 2),
            dense_layers=("num_dense_layers", 1),
        ),
        defaults={"sliding_window": 1024},
    ),
    "laguna": Family(
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
                    set(config.get("num_attention_heads_per_layer") or ()) - {config.get("num_attention_heads")}
                    != set()
                ),
                "layers with different numbers of heads are not described: all have to be num_attention_heads",
            ),
        ),
        defaults={"sliding_window": 512},
    ),
    "flint": Family(
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
    ),
    "kolibri1": Family(
        experts=Experts(
            shared="shared_experts",
            count=("num_local_experts", 384),
            per_token=("num_experts_per_tok", 6),
            width=("moe_intermediate_size", 512),
            shared_width=("shared_expert_intermediate_size", 512),
        ),
        defaults={"sliding_window": 513},
    ),
    "aria_text": Family(
        experts=Experts(
            shared="shared_experts",
            count=("moe_num_experts", 8),
            per_token=("moe_topk", 2),
            shared_count=("moe_num_shared_experts", 2),
        )
    ),
    "minimax_m3_vl_text": Family(
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
                    config.get("mlp_layer_types") is None and not all(config.get("moe_layer_freq") or (True,))
                ),
                "write the kinds of layers as mlp_layer_types",
            ),
        ),
    ),
}

FAMILIES: Mapping[str, Family] = {**EXPERTS, **SHARED_EXPERTS}
