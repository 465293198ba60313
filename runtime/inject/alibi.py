"""ALiBi biases (arXiv 2108.12409) for any attention: scores q · k plus slope × position of the key.

A query sees no difference between biases by the position of a key and by its distance: the softmax takes the same from
all its scores. The bias is a product of what a query has (the slope of its head) and what a key has (its position), so
that a few more features of both hold it, and every kernel, ring and mask works as it does without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.runtime.micro_batch import current
from parcompile.runtime.transport.backend import OnDevice

from .attention import RING

_SLOPES = "parcompile_slopes"
_FEATURES = 8
"""More features of queries and keys: two are used, and kernels want multiples of 8."""
_STEP = 256
"""Positions are a multiple of this and a rest: bfloat16 has 8 digits, and holds both."""


def slopes_of(module: nn.Module, build: Callable[[], Tensor], device: torch.device) -> Tensor:
    """The slopes of this rank's heads [H]; `build` gives those of all heads, once."""
    held: OnDevice | None = vars(module).get(_SLOPES)
    if held is None:
        place: Any = getattr(module, RING)
        whole = build().float()
        held = OnDevice(whole.chunk(place.tp)[place.tp_index] if place.tp > 1 else whole)
        vars(module)[_SLOPES] = held
    return held(device)


def biased(query: Tensor, key: Tensor, slopes: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Query [B, H, S, D] and key [B, K, T, D] with features whose scaled product is the bias.

    Args:
        query: of this rank's tokens.
        key: of the same tokens, or in generation of all tokens so far.
        slopes: of this rank's query heads [H].
        scaling: what the attention multiplies scores by.
    """
    positions = current().positions
    if current().alone or positions is None:
        positions = torch.arange(key.shape[2], device=key.device).unsqueeze(0)
    rest = positions % _STEP
    by_key = torch.stack((positions - rest, rest), -1).to(key.dtype)  # [1 or B, T, 2]
    by_key = by_key[:, None].expand(*key.shape[:3], 2)
    by_query = (slopes / scaling).to(query.dtype)
    by_query = by_query[None, :, None, None].expand(*query.shape[:3], 2)
    return _longer(query, by_query), _longer(key, by_key)


def _longer(heads: Tensor, features: Tensor) -> Tensor:
    zeros = heads.new_zeros(*heads.shape[:3], _FEATURES - features.shape[-1])
    return torch.cat((heads, features, zeros), -1)
