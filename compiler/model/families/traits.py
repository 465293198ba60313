"""What several families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Refusal

TIED = {"tie_word_embeddings": True}
FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
EVERY_LAYER = Refusal(
    "moe_layer_freq",
    lambda config: config.get("mlp_layer_types") is None and config.get("moe_layer_freq", 1) != 1,
    "it has to be 1: every layer from the first with experts on has them",
)
UP_ONLY: tuple[str, ...] = ("up_proj",)
FUSED_UP: tuple[str, ...] = ("gate_up_proj",)


def all_heads(_: Mapping[str, Any], heads: int) -> int:
    """As many key and value heads as queries."""
    return heads


def defaults_of(kv_heads: int | None = None, head_dim: int | None = None, **others: Any) -> dict[str, Any]:
    """Defaults of a configuration's keys."""
    found = {"num_key_value_heads": kv_heads, "head_dim": head_dim, **others}
    return {key: value for key, value in found.items() if value is not None}


def routed(
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
