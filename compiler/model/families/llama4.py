"""Llama 4: chunked attention, layers without rotary positions, and experts of one product that sees every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Family, Refusal


def _alternates(config: Mapping[str, Any]) -> bool:
    """Whether some layers are dense."""
    count = config.get("num_hidden_layers", 48)
    if (listed := config.get("moe_layers")) is not None:
        return sorted(listed) != list(range(count))
    return int(config.get("interleave_moe_layer_step", 1)) != 1


LLAMA4: Mapping[str, Family] = {
    "llama4_text": Family(
        mlp="feed_forward",
        experts=Experts(
            block="feed_forward",
            router="router",
            transposed=True,
            shared="shared_expert",
            count=("num_local_experts", 16),
            per_token=("num_experts_per_tok", 1),
            width=("intermediate_size", 8192),
            shared_width=("intermediate_size", 8192),
            dense_width=("intermediate_size_mlp", 16384),
        ),
        refusals=(
            Refusal(
                "interleave_moe_layer_step",
                _alternates,
                "dense layers between those with experts are not described (a stage counts its layers by the first "
                "with experts): every layer has to have experts, as those of Llama 4 Scout have",
            ),
        ),
        refused_axes={
            "ep": "transformers has all experts of this type compute all tokens in one product, weighted by zero where "
            "an expert was not chosen: there are no tokens to send to the ranks of chosen experts"
        },
    ),
}
