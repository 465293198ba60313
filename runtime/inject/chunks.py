"""Chunked attention (Llama 4): a query sees the keys of its chunk of the sequence, as if chunks were documents.

Layers without rotary positions scale their queries by their place in the sequence instead, which transformers counts
on its own in each call; here it is counted in each document, over all context-parallel ranks.

Source: `create_chunked_causal_mask` and `Llama4TextAttention` of transformers 5.23.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parcompile.runtime.micro_batch import current

from .token_places import token_order

if TYPE_CHECKING:
    from .attention import RingPlace

_TUNED = "parcompile_temperature"


def chunk_of(module: nn.Module) -> int | None:
    """The tokens of a chunk, for an attention that sees no further."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None or kinds[layer] != "chunked_attention":
        return None
    size: int | None = config.attention_chunk_size  # type: ignore[union-attr]
    return size


def take_temperatures(model: nn.Module) -> None:
    """Takes the scaling of queries out of the layers that scale them by their place, for `tempered`."""
    for own in scaled_by_place(model):
        own.attn_temperature_tuning = False
        setattr(own, _TUNED, (float(own.floor_scale), float(own.attn_scale)))


def scaled_by_place(model: nn.Module) -> list[Any]:
    """The attentions of a model that scale their queries by their place in a row, whatever its documents."""
    return [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    ]


def tempered(module: nn.Module, query: Tensor, place: RingPlace) -> Tensor:
    """The query [B, H, S, D] scaled by its place in its document, where the layer does so."""
    tuned = getattr(module, _TUNED, None)
    if tuned is None:
        return query
    if current().alone:
        positions = torch.arange(query.shape[2]).unsqueeze(0)
    else:
        order = token_order(place, query.shape[2], 0, query.device)
        positions = order.places - order.starts
    floor, scale = tuned
    factors = torch.log1p(torch.floor((positions.to(query.device).float() + 1.0) / floor)) * scale + 1.0
    scaled: Tensor = (query * factors[:, None, :, None]).to(query.dtype)
    return scaled


def chunked(documents: list[list[int]] | None, rows: int, length: int, chunk: int) -> list[list[int]]:
    """Borders of the documents of each row and of their chunks: each document begins with a chunk of its own."""
    return [
        sorted({edge for start, end in pairwise(borders) for edge in (*range(start, end, chunk), end)})
        for borders in documents or [[0, length]] * rows
    ]
