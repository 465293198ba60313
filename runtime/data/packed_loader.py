"""Micro-batches of packed documents: long ones are dealt to all cp ranks, short ones stay whole on one.

The order of the data does not depend on the layout: a sample is as many documents as the plan's `sequence_length` has
room for, and step s trains on samples s·B … (s+1)·B − 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parcompile.runtime.groups import Mesh
from parcompile.runtime.micro_batch import TOKEN_PLACES
from parcompile.runtime.ring_attention import PackedCollator, PackingCosts, batches_of_tokens
from parcompile.runtime.transport.backend import to_device

from .batches import Batch
from .loader import PlanLoader
from .samples import tensors_of


class PackedPlanLoader(PlanLoader):
    """Yields this rank's micro-batches of documents, step after step, without end, for the engine or the model.

    Every micro-batch is packed for itself: its attention is even on all cp ranks, whatever the lengths are. Ranks are
    padded to be equally long, so that they may hold a few tokens more than the plan says.

    Args:
        documents: a sequence of documents, each token ids [n], or a mapping of tensors, arrays or lists [n, …] with
            `input_ids` and perhaps `labels`; n is at most the plan's sequence length.
        mesh: this rank's place.
        first_step: the step to begin with, after a resume.
        padding_id: the token that fills up.
        lengths: of the documents, where they are known; else every document is read once.

    Raises:
        ValueError: there are no documents, or one is empty or longer than the plan's sequences.
    """

    def __init__(
        self,
        documents: Sequence[Any],
        mesh: Mesh,
        first_step: int = 0,
        *,
        padding_id: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> None:
        spec = mesh.plan.spec
        room = spec.training.sequence_length
        if lengths is None:
            lengths = [len(tensors_of(documents[number], number)["input_ids"]) for number in range(len(documents))]
        for number, length in enumerate(lengths):
            if not 0 < length <= room:
                raise ValueError(f"document {number} has {length} tokens: expected 1 to sequence_length {room}")
        packs = list(batches_of_tokens(range(len(lengths)), room, length_of=lambda number: lengths[number]))
        super().__init__(packs, mesh, first_step)
        self._documents = documents
        self._collate = PackedCollator(
            mesh.size("cp"),
            mesh.index("cp"),
            padding_id,
            layout=spec.parallelism.cp_layout,
            costs=PackingCosts.of_hidden_size(spec.model.shape.hidden_size),
        )

    def _whole(self, micro: int) -> Batch:
        documents = []
        packs = [self._dataset[number] for number in self._numbers(micro)]
        for sample, numbers in enumerate(packs, self._first_sample(micro)):
            start = 0
            for document in map(self._document, numbers):
                positions = torch.arange(start, start + len(document["input_ids"]))
                places = torch.stack([torch.full_like(positions, sample), positions], 1)
                documents.append({**document, TOKEN_PLACES: places})
                start += len(positions)
        # The first token of a document is predicted by none.
        predicted = [document["labels"][1:] for document in documents]
        return {"documents": documents, "shift_labels": torch.cat(predicted)}

    def _document(self, number: int) -> dict[str, Tensor]:
        document = tensors_of(self._documents[number], number)
        mask = document.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise ValueError(f"document {number} is padded (its attention_mask has zeros): give it without padding")
        return document

    def _part(self, batch: Batch) -> Batch:
        packed = self._collate(batch["documents"])
        device = self._mesh.device
        return {name: to_device(part, device) if isinstance(part, Tensor) else part for name, part in packed.items()}
