"""Ring attention behind Hugging Face's attention interface.

transformers calls an attention function with query [B, H, S, D] and key, value [B, K, S, D] (not repeated) and wants
[B, S, H, D].

ALiBi biases (arXiv 2108.12409) are slope × position of the key. A query sees no difference between these and biases by
the distance: the softmax takes the same from all its scores. The bias is a product of what a query has (the slope of
its head) and what a key has (its position), so that a few more features of both hold it, and every kernel, ring and
mask works as it does without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parcompile.model.family import types_with
from parcompile.runtime.errors import everywhere
from parcompile.runtime.micro_batch import current, follow_calls
from parcompile.runtime.transport.backend import OnDevice

from .positions import rotate_by_document, take_temperatures, tempered
from .ring_place import Chosen, ChosenKeys, RingPlace, Unmasked, chunk_of

NAME = "parcompile"
"""The name under which the attention is registered."""

_CASTING, CASTS_MASKS = "parcompile_casting", types_with("casts_masks")
"""The name for models that cast their mask without asking whether there is one, and their types."""

RING = "parcompile_ring"
"""The attribute under which a module keeps its `RingPlace`."""

BESIDE = "parcompile_beside"
"""The attribute of a module some of whose keys stand for windows of tokens: the function that attends to them too."""


def use_ring_attention(model: nn.Module, place: RingPlace) -> None:
    """Makes every attention of a Hugging Face model run over the ranks that share its sequences."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # The ring knows its own causal mask. transformers builds none for an attention that has no function for masks, and
    # does not look for documents among the positions, for which the host would wait in every forward pass.
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(_CASTING, _attention)
    AttentionMaskInterface.register(_CASTING, lambda *_, **__: NoMask())
    for module in model.modules():
        setattr(module, RING, place)
    config: Any = model.config
    name = name_for(config)
    if model._can_set_attn_implementation():  # type: ignore[operator]
        model.set_attn_implementation(name)  # type: ignore[operator]
    else:  # a model whose attention `put_on_interface` has replaced
        config._attn_implementation_internal = name
    rotate_by_document(model, place)
    take_temperatures(model)
    follow_calls(model)


def name_for(config: Any) -> str:
    """The name under which a model of this configuration finds the attention."""
    return _CASTING if config.model_type in CASTS_MASKS else NAME


class NoMask:
    """What a model is given that casts its mask: None."""

    def to(self, *_: Any, **__: Any) -> None:
        """No mask."""


def _attention(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, None]:
    return attend(getattr(module, RING), module, *args, **options)


def attend(
    place: RingPlace,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls an attention function with, at a place in the ring: [B, S, H, D].

    Raises:
        RunError: the attention masks otherwise than the ring, or drops weights without what they are drawn by.
    """
    name = type(module).__name__
    if isinstance(attention_mask, Tensor) and hasattr(module, BESIDE):
        assert scaling is not None
        return getattr(module, BESIDE)(place, query, key, attention_mask, scaling, sliding_window, s_aux), None
    if attention_mask is not None and not isinstance(attention_mask, Unmasked | ChosenKeys):
        raise everywhere(f"{name} passes an attention mask; the ring masks by position, window and document only")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        both = getattr(getattr(module, "config", None), "use_bidirectional_attention", None)
        way_out = f" (use_bidirectional_attention is {both!r}: set it to false)" if both else ""
        raise everywhere(f"{name} attends in both directions; the runtime trains causal models only{way_out}")
    layer = getattr(module, "layer_idx", None)
    if dropout and layer is None:
        raise everywhere(f"{name} uses attention dropout {dropout} and has no layer_idx to draw it by")
    whole = current().alone or (place.is_alone and current().packing is None)
    length = key.shape[2] if whole else place.sequence_length
    covered = not sliding_window or sliding_window >= length
    chunk = chunk_of(module)
    if chunk is not None and chunk >= length:
        chunk = None
    if chunk is not None and current().alone:
        raise everywhere(
            f"generate() beyond attention_chunk_size {chunk} tokens is not injected: give shorter prompts and fewer "
            "new tokens, or write the model with `parcompile checkpoint export DIR --hf OUT` and generate with "
            "AutoModelForCausalLM.from_pretrained(OUT)"
        )
    query = tempered(module, query, place)
    if isinstance(attention_mask, Chosen):
        indices = attention_mask.indices
    chosen = {} if indices is None else {"bias": place.hiding(indices, key, query.dtype)}
    if isinstance(attention_mask, ChosenKeys):
        chosen = {"bias": attention_mask.hiding(query.dtype)}
    out = place.attend(
        query,
        key,
        value,
        chunk=chunk,
        causal=True,
        scale=scaling,
        window=None if covered else sliding_window,
        sinks=s_aux,
        softcap=softcap,
        **chosen,
        **place.dropping(dropout, name, layer or 0, query.shape[1] * place.tp_index),
    )
    # Models view it as [B, S, H D], as they may what transformers gives.
    return out.transpose(1, 2).contiguous(), None


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
