"""Llama 4: chunked attention, layers without rotary positions, and experts whose scores scale what they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parcompile.model.family import Experts, Family
from parcompile.model.layer_kind import LayersError
from parcompile.model.layer_period import whole


def _routed(config: Mapping[str, Any], count: int) -> list[int]:
    """The layers with experts: those of a list, or the last of each step."""
    if (listed := config.get("moe_layers")) is not None:
        if not isinstance(listed, list | tuple):
            raise LayersError(f"moe_layers is {listed!r}: it has to be a list of layers", "moe_layers")
        return sorted(layer for layer in set(listed) if 0 <= layer < count)
    step = whole(config, "interleave_moe_layer_step", 1, least=1)
    return list(range(step - 1, count, step))


def _share_with_norms(config: Mapping[str, Any], count: int) -> float:
    """Of layers that rotate queries and keys, which are normed behind the rotation."""
    if not config.get("use_qk_norm", True) or not count:
        return 0.0
    rotated = config.get("no_rope_layers")
    if not rotated:
        interval = whole(config, "no_rope_layer_interval", 4, least=1)
        rotated = [(layer + 1) % interval for layer in range(count)]
    return sum(map(bool, rotated)) / len(rotated)


LLAMA4: Mapping[str, Family] = {
    "llama4_text": Family(
        mlp="feed_forward",
        bare_qk_norms=_share_with_norms,
        experts=Experts(
            block="feed_forward",
            shared="shared_expert",
            count=("num_local_experts", 16),
            per_token=("num_experts_per_tok", 1),
            width=("intermediate_size", 8192),
            shared_width=("intermediate_size", 8192),
            dense_width=("intermediate_size_mlp", 16384),
            layers=_routed,
        ),
    ),
}
