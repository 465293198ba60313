"""Layers without rotary positions that scale their queries by their place in the sequence instead (Llama 4).

transformers counts the places of a row on its own in each call; here they are counted in each document, over all
context-parallel ranks.

Source: `Llama4TextAttention` of transformers 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parcompile.runtime.micro_batch import current

from .ring_place import RingPlace, token_order

_TUNED = "parcompile_temperature"


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
