"""Ring attention behind Hugging Face's attention interface.

transformers calls an attention function with query [B, H, S, D] and key, value [B, K, S, D] (not repeated) and wants
[B, S, H, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.context_parallel import ContextParallel, CpImplementation
from parcompile.layout.sequence import CpLayout
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import FIRST_SAMPLE, current, follow_calls
from parcompile.runtime.ring_attention import UspGroups, attention, packed_attention

from .chosen import Chosen, ChosenKeys, Unmasked, hiding
from .chunks import chunk_of, chunked, take_temperatures, tempered
from .rotary import rotate_by_document

NAME = "parcompile"
"""The name under which the attention is registered."""

_CASTING, _CASTS_MASKS = "parcompile_casting", frozenset({"mpt"})
"""The name for models that cast their mask without asking whether there is one, and their types."""

RING = "parcompile_ring"
"""The attribute under which a module keeps its `RingPlace`."""

BESIDE = "parcompile_beside"
"""The attribute of a module some of whose keys stand for windows of tokens: the function that attends to them too."""


@dataclass(frozen=True, slots=True)
class RingPlace:
    """How a model's attention modules attend; `group` is None when one rank holds the whole sequence."""

    group: dist.ProcessGroup | None
    context: ContextParallel
    layout: CpLayout
    sequence_length: int
    levels: UspGroups | None = None
    """The groups of usp, in the place of `group`."""
    tp_index: int = 0
    seed: int = 0
    """The plan's, for dropout."""
    tp: int = 1

    @classmethod
    def of(cls, mesh: Mesh) -> RingPlace:
        """As the plan says."""
        parallelism, length = mesh.plan.spec.parallelism, mesh.plan.spec.training.sequence_length
        levels = None
        if parallelism.cp_implementation is CpImplementation.USP:
            levels = UspGroups(mesh.group("cp-inner"), mesh.group("cp-outer"))
        return cls(
            mesh.parallel_group("cp"),
            parallelism.context,
            parallelism.cp_layout,
            length,
            levels,
            mesh.index("tp"),
            mesh.plan.spec.training.seed,
            mesh.size("tp"),
        )

    @property
    def options(self) -> dict[str, Any]:
        """What names the implementation, its ranks and their tokens."""
        found: dict[str, Any] = {"implementation": self.context.implementation.value, "layout": self.layout}
        if self.levels is not None:
            return found | {"groups": self.levels}
        if self.context.implementation is CpImplementation.DOUBLE_RING:
            found["inner_ranks"] = self.context.inner_ranks
        return found | {"group": self.group}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, chunk: int | None = None, **masks: Any) -> Tensor:
        """Attention over the documents of the micro-batch, with further masks as `ring_attention` takes them."""
        if current().alone:
            return _alone(query, key, value, **masks)
        packing, documents = current().packing, current().documents
        if packing is None:
            if chunk is not None:
                documents = chunked(documents, query.shape[0], self.sequence_length, chunk)
            out: Tensor = attention(query, key, value, **self.options, documents=documents, **masks)
            return out
        if chunk is not None:
            raise RunError(
                "chunked attention counts its chunks in the sequence, which packing changes: do not pack by documents",
                everywhere=True,
            )
        named = {name: given for name, given in self.options.items() if name != "layout"}
        rank = 0 if self.group is None else dist.get_rank(self.group)
        return packed_attention(query, key, value, packing, rank=rank, **named, **masks)

    def hiding(self, indices: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """What hides the keys that an indexer has not chosen; `indices` [B, S, N] are places in the whole sequence."""
        batch, length = current(), key.shape[2]
        if batch.alone:
            return hiding(indices, length, length, dtype)
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        total = length * ranks if batch.packing is None else sum(batch.packing.lengths)
        return hiding(indices, length, total, dtype)

    def dropping(self, dropout: float, name: str, layer: int, first_head: int) -> dict[str, Any]:
        """What dropout needs to draw the same mask in every layout; nothing without dropout.

        A mask depends on the seed, the layer, the sample, the head and the positions, all counted as without any axis.
        `layer` is a number of 31 bits that no other attention of the model has.
        """
        if not dropout:
            return {}
        first_sample = current().first_sample
        if first_sample is None:
            raise RunError(
                f"{name} uses attention dropout {dropout}: call the model with {FIRST_SAMPLE}, the number of the "
                "batch's first sequence in the data, as the engine's loader does, or set attention_dropout to 0",
                everywhere=True,
            )
        return {
            "dropout": dropout,
            "dropout_seed": layer + 1 << 32 | self.seed & 0xFFFFFFFF,
            "first_row": first_sample,
            "first_head": first_head,
        }


def _alone(query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Tensor:
    """Attention of the last tokens over all that are kept, on this rank alone: [B, H, S, D] over [B, K, T, D].

    The queries of the tokens before are zeros, whose results nobody reads: masks count from the first key.
    """
    new, length = query.shape[2], key.shape[2]
    documents = current().documents
    if documents is not None:
        # A window's keys alone are kept: borders count from the first of them.
        documents = [sorted({max(border - row[-1] + length, 0) for border in row}) for row in documents]
    out: Tensor = attention(F.pad(query, (0, 0, length - new, 0)), key, value, group=None, documents=documents, **masks)
    return out[:, :, length - new :]


def use_ring_attention(model: nn.Module, place: RingPlace) -> None:
    """Makes every attention of a Hugging Face model run over the ranks that share its sequences."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # The ring knows its own causal mask. transformers builds none for an attention that has no function for masks, and
    # does not look for documents among the positions, for which the host would wait in every forward pass.
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(_CASTING, _attention)
    AttentionMaskInterface.register(_CASTING, lambda *_, **__: _NoMask())
    for module in model.modules():
        setattr(module, RING, place)
    config: Any = model.config
    name = _CASTING if config.model_type in _CASTS_MASKS else NAME
    if model._can_set_attn_implementation():  # type: ignore[operator]
        model.set_attn_implementation(name)  # type: ignore[operator]
    else:  # a model whose attention `put_on_interface` has replaced
        config._attn_implementation_internal = name
    rotate_by_document(model, place)
    take_temperatures(model)
    follow_calls(model)


class _NoMask:
    """What a model is given that casts its mask: None."""

    def to(self, *_: Any, **__: Any) -> None:
        """No mask."""


def _attention(
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
    place: RingPlace = getattr(module, RING)
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
    length = key.shape[2] if current().alone else place.sequence_length
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
