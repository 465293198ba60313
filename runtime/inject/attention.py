"""Ring attention behind Hugging Face's attention interface.

transformers calls an attention function with query [B, H, S, D] and key, value [B, K, S, D] (not repeated) and wants
[B, S, H, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from parcompile.layout.sequence import CpLayout

from ..errors import RunError
from ..ring_attention import ring_attention

NAME = "parcompile"
"""The name under which the attention is registered."""

_ATTRIBUTE = "parcompile_ring"

_UNSUPPORTED = {
    "sliding_window": "a sliding window",
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
}
"""Arguments that change the attention and that the ring does not compute yet: refused, never ignored."""


@dataclass(frozen=True, slots=True)
class RingPlace:
    """The ring of an attention module; `group` is None when one rank holds the whole sequence."""

    group: dist.ProcessGroup | None
    layout: CpLayout
    sequence_length: int


def use_ring_attention(model: nn.Module, place: RingPlace) -> None:
    """Makes every attention of a Hugging Face model run around the ring."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    # The ring knows its own causal mask: no [S, S] mask is ever built.
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    for module in model.modules():
        setattr(module, _ATTRIBUTE, place)
    model.set_attn_implementation(NAME)  # type: ignore[operator]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    place: RingPlace = getattr(module, _ATTRIBUTE)
    name = type(module).__name__
    if attention_mask is not None:
        raise RunError(
            f"{name} passes an attention mask; the ring computes plain causal attention only", everywhere=True
        )
    if dropout:
        raise RunError(f"{name} uses attention dropout {dropout}; set attention_dropout to 0", everywhere=True)
    for argument, meaning in _UNSUPPORTED.items():
        given = kwargs.get(argument)
        covers = argument == "sliding_window" and isinstance(given, int) and given >= place.sequence_length
        if given is not None and not covers:
            raise RunError(f"{name} uses {meaning} ({argument}), which the ring does not compute", everywhere=True)
    out = ring_attention(query, key, value, group=place.group, layout=place.layout, causal=True, scale=scaling)
    return out.transpose(1, 2), None
