"""Ring attention behind Hugging Face's attention interface.

transformers calls an attention function with query [B, H, S, D] and key, value [B, K, S, D] (not repeated) and wants
[B, S, H, D].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parcompile.model.family import types_with
from parcompile.runtime.errors import RunError
from parcompile.runtime.micro_batch import current, follow_calls

from .chosen import Chosen, ChosenKeys, Unmasked
from .ring_place import RingPlace, chunk_of
from .rotary import rotate_by_document
from .temperatures import take_temperatures, tempered

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
    name = _CASTING if config.model_type in CASTS_MASKS else NAME
    if model._can_set_attn_implementation():  # type: ignore[operator]
        model.set_attn_implementation(name)  # type: ignore[operator]
    else:  # a model whose attention `put_on_interface` has replaced
        config._attn_implementation_internal = name
    rotate_by_document(model, place)
    take_temperatures(model)
    follow_calls(model)


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
        raise RunError(
            f"{name} passes an attention mask; the ring masks by position, window and document only", everywhere=True
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        both = getattr(getattr(module, "config", None), "use_bidirectional_attention", None)
        way_out = f" (use_bidirectional_attention is {both!r}: set it to false)" if both else ""
        raise RunError(
            f"{name} attends in both directions; the runtime trains causal models only{way_out}", everywhere=True
        )
    layer = getattr(module, "layer_idx", None)
    if dropout and layer is None:
        raise RunError(f"{name} uses attention dropout {dropout} and has no layer_idx to draw it by", everywhere=True)
    whole = current().alone or (place.is_alone and current().packing is None)
    length = key.shape[2] if whole else place.sequence_length
    covered = not sliding_window or sliding_window >= length
    chunk = chunk_of(module)
    if chunk is not None and chunk >= length:
        chunk = None
    if chunk is not None and current().alone:
        raise RunError(
            f"generate() beyond attention_chunk_size {chunk} tokens is not injected: give shorter prompts and fewer "
            "new tokens, or write the model with `parcompile checkpoint export DIR --hf OUT` and generate with "
            "AutoModelForCausalLM.from_pretrained(OUT)",
            everywhere=True,
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
