"""The parameters of layers with shared transformer blocks, and how tensor parallelism cuts them."""

from __future__ import annotations

from dataclasses import dataclass

from .recurrent import RecurrentShape
from .recurrent.state_space_rows import mamba2_rows
from .rows import Rows
from .shared_blocks import BLOCK, INNER, INPUTS, SharedBlocks
from .table import Part, Split, column, row


@dataclass(frozen=True, slots=True)
class SharedSizes:
    """The sizes of a block."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_bias: bool


def shared_rows(rows: Rows, shared: SharedBlocks, states: RecurrentShape, sizes: SharedSizes) -> None:
    """Adds the rows of all layers, in the order in which they register their parameters."""
    h = sizes.hidden
    every = range(rows.layers[0], rows.layers[-1] + 1)
    plain = rows.of(tuple(layer for layer in every if layer not in shared.layers))
    if plain.layers:
        mamba2_rows(plain, "mamba", h, states)
        plain.norm("input_layernorm", h)
    hybrid = rows.of(shared.layers)
    hybrid.add("linear.weight", (h, h), sequence_parallel=True)
    mamba2_rows(hybrid, f"{INNER}.mamba", h, states)
    hybrid.norm(f"{INNER}.input_layernorm", h)
    _attention(rows, shared, sizes)
    _mlp(rows, shared, sizes)
    blocks = rows.of(shared.first_layers)
    blocks.norm(f"{BLOCK}.input_layernorm", INPUTS * h)
    blocks.norm(f"{BLOCK}.pre_ff_layernorm", h)


def _attention(rows: Rows, shared: SharedBlocks, sizes: SharedSizes) -> None:
    name, taken, blocks = f"{BLOCK}.self_attn", INPUTS * sizes.hidden, rows.of(shared.first_layers)
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    cuts = {"q": (queries, sizes.heads), "k": (keys, sizes.kv_heads), "v": (keys, sizes.kv_heads)}
    for kind, (size, heads) in cuts.items():
        blocks.linear(f"{name}.{kind}_proj", size, taken, column(size, heads))
    blocks.linear(f"{name}.o_proj", sizes.hidden, queries, row(queries, sizes.heads))
    if shared.attention_adapters:
        for kind, (size, heads) in cuts.items():
            adapter = f"{name}.linear_{kind}_adapter_list"
            _adapters(rows, shared, adapter, (size, taken), column(size, heads))


def _mlp(rows: Rows, shared: SharedBlocks, sizes: SharedSizes) -> None:
    name, blocks, h, f = f"{BLOCK}.feed_forward", rows.of(shared.first_layers), sizes.hidden, sizes.intermediate
    both = Split(0, (Part(f, f),) * 2)
    blocks.linear(f"{name}.gate_up_proj", 2 * f, h, both, bias=sizes.mlp_bias)
    blocks.linear(f"{name}.down_proj", h, f, row(f), bias=sizes.mlp_bias)
    _adapters(rows, shared, f"{name}.gate_up_proj_adapter_list", (2 * f, h), both)


def _adapters(rows: Rows, shared: SharedBlocks, name: str, size: tuple[int, int], split: Split) -> None:
    """Those of every use, which stand in the block: named under the layer that uses the block first."""
    for place, _, first in shared.uses:
        own = rows.of((first,))
        # Every rank computes it for its own rows of the second matrix: the gradient is a part.
        own.add(f"{name}.{place}.0.weight", (shared.adapter_rank, size[1]), partial=True)
        own.linear(f"{name}.{place}.1", size[0], shared.adapter_rank, split)
