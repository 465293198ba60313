"""Transformer blocks that several layers use in turn, in front of their Mamba-2 layer (Zamba2, arXiv 2411.15242).

Hybrid layers use the blocks one after the other, and begin again with the first. A block attends over the hidden states
beside the embeddings of the tokens. Its result goes through a projection of the layer into the layer's Mamba-2 module.
Each use has low-rank adapters of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parcompile.model.layers import LayersError

from .blocks.block import Size
from .layers import STATE, counted
from .tables import OLDER_KINDS

HYBRID = "hybrid"
"""What the list of layers calls a layer with a shared block."""

BLOCK, INNER = "shared_transformer", "mamba_decoder"
"""The modules of such a layer: the shared block, and the layer's own Mamba-2 layer."""

FOLLOWING = frozenset({"hybrid_layer_ids", "attention_hidden_size", "attention_head_dim", "head_dim"})
"""Keys whose values follow from others; transformers writes them, and takes a file's over what follows."""

INPUTS = 2
"""What a block's attention takes of each token: the hidden states and the embedding."""

_DEFAULT = (STATE, *((STATE,) * 5 + (HYBRID,)) * 7, *(STATE,) * 4, HYBRID, *(STATE,) * 3, HYBRID, STATE, STATE)
"""The layers of transformers' class where a configuration lists none."""

_LATE = "layer_types"
"""Another name of the list, which the class takes when it has listed the hybrid layers already."""

_OLDER = {old: kind for old, kind in OLDER_KINDS.items() if kind == STATE}


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Which layers use a shared block, how many blocks there are, and the adapters of a use."""

    layers: tuple[int, ...]
    count: int
    """Of blocks that some layer uses."""
    adapter_rank: int
    attention_adapters: bool
    """Queries, keys and values have adapters too, not the MLP alone."""

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The layer under which each block's parameters are named: the first that uses it."""
        return self.layers[: self.count]

    @property
    def uses(self) -> Iterator[tuple[int, int, int]]:
        """Of each use its place among the uses, the layer, and the first layer that uses the same block."""
        for place, layer in enumerate(self.layers):
            yield place, layer, self.layers[place % self.count]

    def matmul_parameters(self, hidden: int, intermediate: int) -> int:
        """Parameters that multiply each token in one use beside attention and MLP: projection and adapters."""
        adapters = hidden + 2 * intermediate + (3 * 2 * INPUTS * hidden if self.attention_adapters else 0)
        return hidden**2 + self.adapter_rank * adapters


def zamba2_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of each layer of a Zamba2, "linear_attention" or "hybrid".

    Raises:
        LayersError: a kind that nobody knows, no hybrid layer, another number of layers than the list has, or a
            name of the list under which transformers takes it too late.
    """
    key = "layers_block_type"
    given = _DEFAULT if config.get(key) is None else config[key]
    if config.get(_LATE) is not None and config.get(key) is None:
        raise LayersError(
            f"{_LATE}: transformers reads which layers use shared blocks from {key} only: write the list there", _LATE
        )
    if not isinstance(given, list | tuple) or not given:
        raise LayersError(f"{key} is {given!r}: write the kind of each layer", key)
    if unknown := sorted({str(one) for one in given} - {*_OLDER, STATE, HYBRID}):
        raise LayersError(f"{key} has {', '.join(unknown)}: the kinds are mamba, {STATE} and {HYBRID}", key)
    kinds = tuple(_OLDER.get(str(one), str(one)) for one in given)
    if HYBRID not in kinds:
        raise LayersError(f"{key} has no {HYBRID} layer: no layer would attend", key)
    counted(config, len(kinds), key)
    return kinds


def shared_blocks(config: Mapping[str, Any], size: Size) -> SharedBlocks:
    """The shared blocks of a configuration.

    Raises:
        LayersError: what follows from other keys has another value, or sizes do not fit each other.
    """
    layers = tuple(place for place, kind in enumerate(zamba2_kinds(config)) if kind == HYBRID)
    hidden, heads = size("hidden_size", None), size("num_attention_heads", None)
    if INPUTS * hidden % heads:
        raise LayersError(
            f"{INPUTS} x hidden_size {hidden} / num_attention_heads {heads} is not whole", "num_attention_heads"
        )
    adapters, kv_heads = bool(config.get("use_shared_attention_adapter")), size("num_key_value_heads", heads)
    if adapters and kv_heads != heads:
        raise LayersError(
            f"num_key_value_heads {kv_heads} is not num_attention_heads {heads}: with use_shared_attention_adapter "
            "transformers gives keys and values adapters as wide as all query heads",
            "num_key_value_heads",
        )
    follow = {"hybrid_layer_ids": list(layers), "attention_hidden_size": INPUTS * hidden}
    for key in sorted(FOLLOWING):
        value = follow.get(key, INPUTS * hidden // heads)
        if config.get(key) not in (None, value):
            raise LayersError(f"{key} is {config[key]!r}, but {value} follows from the other keys", key)
    count = min(size("num_mem_blocks", 1), len(layers))
    return SharedBlocks(layers, count, size("adapter_rank", 128), adapters)
