"""What several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parcompile.model.family import Experts
from parcompile.model.layers import LayersError, whole


def by_step(config: Mapping[str, Any], count: int, *, dense: tuple[int, ...] = ()) -> list[int]:
    """The last layer of each `decoder_sparse_step`, without those of `mlp_only_layers`; `dense` is its default."""
    step, listed = whole(config, "decoder_sparse_step", 1, least=1), config.get("mlp_only_layers")
    without = dense if listed is None else listed
    if not isinstance(without, list | tuple):
        raise LayersError(f"mlp_only_layers is {listed!r}: it has to be a list of layers", "mlp_only_layers")
    return [layer for layer in range(step - 1, count, step) if layer not in without]


def by_frequency(first: int) -> Callable[[Mapping[str, Any], int], list[int]]:
    """The first layer of each `moe_layer_freq`, from `first_k_dense_replace` on, of which `first` is the default."""

    def layers(config: Mapping[str, Any], count: int) -> list[int]:
        step = whole(config, "moe_layer_freq", 1, least=1)
        dense = whole(config, "first_k_dense_replace", first, least=0)
        return [layer for layer in range(0, count, step) if layer >= dense]

    return layers


def all_heads(_: Mapping[str, Any], heads: int) -> int:
    """As many key and value heads as queries."""
    return heads


def routed(
    count: int | None,
    per_token: int | None,
    width: int,
    *,
    dense_layers: int | None = None,
    shared: int = 1,
    count_key: str = "n_routed_experts",
    shared_key: str = "n_shared_experts",
    by_layer: str | None = None,
    dense_by_default: int = 0,
    norm_after: str = "",
    layers: Callable[[Mapping[str, Any], int], Sequence[int]] | None = None,
) -> Experts:
    """DeepSeek's way: routed experts, shared ones beside them as one MLP, dense layers first."""
    return Experts(
        norm_after=norm_after,
        dense_by_default=dense_by_default,
        shared="shared_experts",
        count=(count_key, count),
        by_layer=by_layer,
        layers=layers,
        per_token=("num_experts_per_tok", per_token),
        width=("moe_intermediate_size", width),
        shared_count=(shared_key, shared),
        dense_layers=None if dense_layers is None else ("first_k_dense_replace", dense_layers),
    )
