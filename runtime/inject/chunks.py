"""Chunked attention (Llama 4): a query sees the keys of its chunk of the sequence, as if chunks were documents.

Layers without rotary positions scale their queries by their place in the sequence instead, which transformers counts
on its own in each call; here it is counted over all context-parallel ranks.

Source: `create_chunked_causal_mask` and `Llama4TextAttention` of transformers 5.23.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.sequence import CpLayout
from parcompile.runtime.errors import RunError
from parcompile.runtime.micro_batch import current
from parcompile.runtime.ring_attention import local_positions

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
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            own: Any = module
            own.attn_temperature_tuning = False
            setattr(own, _TUNED, (float(own.floor_scale), float(own.attn_scale)))


def tempered(module: nn.Module, query: Tensor, layout: CpLayout, group: dist.ProcessGroup | None) -> Tensor:
    """The query [B, H, S, D] scaled by its place in the sequence, where the layer does so.

    Raises:
        RunError: tokens are packed, whose places in the sequence are not known.
    """
    tuned = getattr(module, _TUNED, None)
    if tuned is None:
        return query
    if current().packing is not None:
        raise RunError(
            f"{type(module).__name__} scales queries by their place in the sequence, which packing changes: set "
            "attn_temperature_tuning to false, or do not pack by documents",
            everywhere=True,
        )
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if current().alone:
        positions = torch.arange(query.shape[2])
    else:
        positions = local_positions(layout, ranks, rank, query.shape[2] * ranks)
    floor, scale = tuned
    factors = torch.log1p(torch.floor((positions.to(query.device).float() + 1.0) / floor)) * scale + 1.0
    scaled: Tensor = (query * factors[:, None]).to(query.dtype)
    return scaled


def chunked(documents: list[list[int]] | None, rows: int, length: int, chunk: int) -> list[list[int]]:
    """Borders of the documents of each row and of their chunks: each document begins with a chunk of its own."""
    return [
        sorted({edge for start, end in pairwise(borders) for edge in (*range(start, end, chunk), end)})
        for borders in documents or [[0, length]] * rows
    ]
