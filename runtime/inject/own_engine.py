"""Ring attention for models in engines of one's own: DDP, FSDP2, DeepSpeed's ZeRO. No plan, nothing else is injected.

Such an engine takes all its W ranks for data-parallel ones and averages their gradients. A rank's loss is therefore
W / N times the sum over its tokens, with N the predicted tokens of all ranks: its mean over the ranks is the loss of
the whole batch, and the mean of its gradients that of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parcompile.layout.sequence import ContextParallel, CpImplementation, CpLayout
from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.model.families import FAMILIES
from parcompile.runtime.data.batches import split_rows, with_positions
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.labels import IGNORED_LABEL, shift_labels
from parcompile.runtime.micro_batch import DOCUMENTS, FIRST_SAMPLE, REAL_TOKENS, MicroBatch, working_on
from parcompile.runtime.model.pretrained import parameters_without_memory
from parcompile.runtime.model.text_head import model_class

from .agreement import check_masks
from .attention import CASTS_MASKS, RING, NoMask, attend
from .positions import embeddings_by_length, scaled_by_place
from .ring_place import RingPlace

_CHECKED = "parcompile_checked_tokens"
"""The attribute of an attention: the longest sequence for which its model was checked."""


@dataclass(frozen=True, slots=True)
class OwnRing:
    """The ranks that share sequences, in an engine of one's own; from `register_ring`."""

    group: dist.ProcessGroup | None
    """Of the ring; None: this rank alone."""
    layout: CpLayout
    averaged_over: dist.ProcessGroup | None
    """The W ranks over which the engine averages gradients; None: all ranks."""
    _checked: list[str] = field(default_factory=list)
    """The classes of the models that `check` has found right."""

    @property
    def ranks(self) -> int:
        """Of the ring."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def check(self, model: Any) -> None:
        """That the ring gives what a model of transformers computes; before the engine wraps it.

        Raises:
            RunError: the model does not attend by `parcompile_ring`, or has what the ring does not give; the message
                names the type and the reason.
        """
        config, name = model.config, type(model).__name__
        if not model._can_set_attn_implementation():
            raise _refusal(config, "its attention is not behind transformers' attention interface")
        if config._attn_implementation != RING:
            raise everywhere(
                f"{name} attends by {config._attn_implementation!r}, each rank to its own tokens: build it with "
                f"attn_implementation={RING!r}, or call model.set_attn_implementation({RING!r})"
            )
        _check(config, 1)
        self._checked.append(name)

    def split(self, batch: dict[str, Any], *, tokens: int | None = None, divided_by: int = 1) -> dict[str, Any]:
        """What the model of this rank is called with, from whole sequences, the same on all ranks of the ring.

        `position_ids` that begin anew, or the borders of a flattening collator, mark packed documents, none of which
        sees another; padding on the right, by an `attention_mask`, is a document too. Sequences that the ring does not
        divide are padded.

        Args:
            batch: `input_ids` [B, S], `labels` [B, S] (−100 where nothing is predicted) or `shift_labels` in their
                place; perhaps `position_ids`, `attention_mask`, and other tensors of tokens [B, S, …].
            tokens: the predicted tokens of the optimizer step on all ranks of the engine, each ring counted once; None
                counts those of this batch, in a sum over the ranks that are averaged.
            divided_by: by what the engine divides each loss beside: DeepSpeed's and accelerate's
                `gradient_accumulation_steps`, where `tokens` are those of all of them.

        Raises:
            RunError: no model was checked.
            ValueError: there are no labels, or the padding is not on the right.
        """
        if not self._checked:
            raise everywhere("call check(model) of register_ring, before the engine wraps the model")
        rank = 0 if self.group is None else dist.get_rank(self.group)
        ready = split_rows(
            self._padded(with_positions(batch)), self.layout, self.ranks, rank, batch["input_ids"].device
        )
        ready.pop(REAL_TOKENS, None)
        world = dist.get_world_size(self.averaged_over) if dist.is_initialized() else 1
        if tokens is None:
            count = (ready["shift_labels"] != IGNORED_LABEL).sum().double()
            if world > 1:
                dist.all_reduce(count, group=self.averaged_over)
            tokens = max(int(count), 1)
        # transformers divides the sum of a rank's losses by this.
        ready["num_items_in_batch"] = tokens / (world * divided_by)
        return ready

    def whole_loss(self, loss: Tensor) -> float:
        """The loss of the whole batch, from each rank's own."""
        total = loss.detach().float().clone()
        if not dist.is_initialized():
            return float(total)
        dist.all_reduce(total, group=self.averaged_over)
        return float(total) / dist.get_world_size(self.averaged_over)

    def _padded(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Of a length that the ring divides; what is added is a document of its own, without labels."""
        rows, length = batch["input_ids"].shape
        chunks = self.layout.chunks_per_rank * self.ranks if self.ranks > 1 else 1
        missing = -length % chunks
        if not missing:
            return batch
        whole = dict(batch)
        if "shift_labels" not in whole and "labels" in whole:
            whole["shift_labels"] = shift_labels(whole["labels"], whole.get("position_ids"))
        if whole.get("position_ids") is None:
            whole["position_ids"] = torch.arange(length, device=whole["input_ids"].device).expand(rows, -1)
        fill = {"labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL}
        for name, tensor in whole.items():
            if isinstance(tensor, Tensor) and tensor.dim() >= 2 and tensor.shape[1] == length:
                after = (0, 0) * (tensor.dim() - 2)
                whole[name] = F.pad(tensor, (*after, 0, missing), value=fill.get(name, 0))
        places = torch.arange(missing, device=whole["position_ids"].device)
        whole["position_ids"][:, length:] = places
        return whole

    def place(self, length: int) -> RingPlace:
        """Where `length` tokens of this rank attend."""
        return RingPlace(
            self.group, ContextParallel(CpImplementation.RING, self.ranks), self.layout, length * self.ranks
        )


_registered: list[OwnRing] = []


def register_ring(
    group: dist.ProcessGroup | None,
    *,
    layout: CpLayout | str = CpLayout.ZIGZAG,
    averaged_over: dist.ProcessGroup | None = None,
) -> OwnRing:
    """Makes `attn_implementation="parcompile_ring"` of transformers attend around the ranks of `group`.

    Registered again, the last ring holds for all models.

    Args:
        group: the ranks that share sequences; every rank of the world is in one. None: each rank alone.
        layout: how sequences are dealt to the ranks.
        averaged_over: the ranks over which the engine averages gradients, those of the ring among them; None: all.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    _registered[:] = [OwnRing(group, CpLayout(layout), averaged_over)]
    AttentionInterface.register(RING, _attention)
    AttentionMaskInterface.register(RING, _mask)
    return _registered[0]


def _mask(*, attention_mask: Tensor | None = None, config: Any = None, **_: Any) -> NoMask | None:
    if attention_mask is not None:
        raise everywhere(
            "the model was called with an attention_mask, of which this rank has a part alone: call it with what "
            "`split` of register_ring makes of whole sequences, which turns padding into documents. Models that make a "
            "mask of their own (biogpt) are not supported"
        )
    return NoMask() if getattr(config, "model_type", None) in CASTS_MASKS else None


def _attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    name = type(module).__name__
    if DOCUMENTS not in options:
        raise everywhere(
            f"{name} was called without `documents`: call the model with what `split` of register_ring makes of whole "
            "sequences, or for generation set_attn_implementation('sdpa'). Models that do not hand such arguments on "
            "to their attention (nemotron, stablelm) are not supported"
        )
    if key.shape[2] != query.shape[2]:
        raise everywhere(
            f"{name} attends to {key.shape[2]} keys with {query.shape[2]} queries: parcompile_ring keeps no keys. "
            "Train with use_cache=False, generate with set_attn_implementation('sdpa')"
        )
    place = _registered[0].place(query.shape[2])
    if place.sequence_length > getattr(module, _CHECKED, 0):
        _check(module.config, place.sequence_length)
        setattr(module, _CHECKED, place.sequence_length)
    batch = MicroBatch(
        query.shape[0], query.shape[2], options.pop(DOCUMENTS), first_sample=options.pop(FIRST_SAMPLE, None)
    )
    with working_on(batch):
        return attend(place, module, query, key, *args, **options)


_known: dict[int, tuple[Any, int]] = {}
"""By the identity of a configuration: itself, and the longest sequence for which it was checked."""


def _check(config: Any, length: int) -> None:
    """That the ring gives what the model of a configuration computes.

    Raises:
        RunError: it does not; the message names the type and the reason.
    """
    if _known.get(id(config), (None, 0))[1] >= length:
        return
    if (reason := _unsupported(config, length)) is not None:
        raise _refusal(config, reason)
    _known[id(config)] = config, length


def _refusal(config: Any, reason: str) -> RunError:
    return everywhere(
        f"parcompile_ring does not support this {config.model_type}: {reason}. Train it by a plan, with "
        "parcompile.runtime.initialize, or set another attn_implementation"
    )


def _unsupported(config: Any, length: int) -> str | None:
    kind = config.model_type
    family = FAMILIES.get(kind) if kind in RUNTIME_FAMILIES else None
    if family is None:
        return "the ring was not checked with this model type"
    if family.parts or family.runs or not family.attends:
        return "some layers are no attention, or choose what they attend to: they would see a rank's tokens alone"
    if getattr(config, "output_router_logits", False):
        return "output_router_logits balances experts over a rank's tokens alone (set it to false)"
    copied = type(config).from_dict(config.to_dict())
    with parameters_without_memory():
        model: nn.Module = model_class(copied)(copied)
    if any(True for _ in embeddings_by_length(model)):
        return "its rotary embeddings follow the length of the text (longrope, dynamic), of which a rank sees a part"
    if scaled_by_place(model):
        return "it scales queries by their place in the row (attn_temperature_tuning), of which a rank sees a part"
    try:
        check_masks(model, ".".join(filter(None, (family.base, family.layers))), length)
    except RunError as error:
        return str(error)
    return None
