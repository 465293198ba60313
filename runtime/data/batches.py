"""Batches: each rank gets its sequences (dp) and its tokens of them (cp), with positions and shifted labels.

The order of the data does not depend on the layout: step s trains on samples s·B … (s+1)·B − 1 whatever dp is, so that
any two layouts see the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.attention import DOCUMENTS, FIRST_SAMPLE
from parcompile.runtime.loss import IGNORED
from parcompile.runtime.ring_attention import document_borders, local_positions, split_sequence

Batch = dict[str, Any]

_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of the chance of attention dropout in configurations of Hugging Face."""


def shift_labels(labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Labels [B, S] moved one token to the left: position i predicts token i + 1, the last one nothing.

    With positions that begin anew for each packed document, the last token of a document predicts nothing either.
    """
    shifted = torch.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    if position_ids is not None:
        shifted[:, :-1][position_ids[:, 1:] != position_ids[:, :-1] + 1] = IGNORED
    return shifted


def split_batch(batch: Batch, mesh: Mesh) -> Batch:
    """This cp rank's part of a batch of whole sequences, ready for the model.

    Packed documents are known by `position_ids` that begin anew: no token attends to another document. Padding on the
    right, given by an `attention_mask`, becomes a document of its own that predicts nothing.

    Args:
        batch: `input_ids` [B, S] and `labels` [B, S] (−100 where nothing is predicted), or `shift_labels` in their
            place; `position_ids` [B, S] if they are not 0 … S − 1. Other per-token tensors [B, S, …] are split with
            them.
        mesh: this rank's place.

    Raises:
        ValueError: the sequences are not as long as the plan says, there are no labels, or the padding is not on the
            right.
    """
    ids, planned = batch["input_ids"], mesh.plan.spec.training.sequence_length
    if ids.dim() != 2 or ids.shape[1] != planned:
        raise ValueError(f"input_ids have shape {tuple(ids.shape)}, the plan says [B, sequence_length {planned}]")
    whole = dict(batch)
    positions, mask = whole.pop("position_ids", None), whole.pop("attention_mask", None)
    if "shift_labels" not in whole:
        if "labels" not in whole:
            raise ValueError("the batch has neither labels nor shift_labels")
        whole["shift_labels"] = shift_labels(whole["labels"], positions)
    documents = None if positions is None else document_borders(positions)
    if mask is not None and not bool(mask.bool().all()):
        whole["shift_labels"] = _without_padding(whole["shift_labels"], mask)
        documents = _with_padding(documents, mask)
    layout, cp, rank = mesh.plan.spec.parallelism.cp_layout, mesh.size("cp"), mesh.index("cp")
    if positions is None:
        positions = local_positions(layout, cp, rank, planned).expand(ids.shape[0], -1)
    else:
        positions = split_sequence(positions, 1, layout, cp, rank)
    local = {
        name: split_sequence(tensor, 1, layout, cp, rank)
        if tensor.dim() >= 2 and tensor.shape[1] == planned
        else tensor
        for name, tensor in whole.items()
    }
    local["position_ids"] = positions
    # transformers computes a loss only when it is given labels; ours looks at the shifted ones.
    local["labels"] = local["shift_labels"]
    ready: Batch = {name: tensor.to(mesh.device, non_blocking=True).contiguous() for name, tensor in local.items()}
    if documents is not None and any(len(borders) > 2 for borders in documents):
        ready[DOCUMENTS] = documents
    return ready


def _without_padding(shifted: Tensor, mask: Tensor) -> Tensor:
    """Padding neither predicts nor is predicted."""
    real = mask.bool()
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError("attention_mask has padding before or between tokens: pad on the right")
    predicted = torch.zeros_like(real)
    predicted[:, :-1] = real[:, 1:]
    return shifted.masked_fill(~predicted, IGNORED)


def _with_padding(documents: list[list[int]] | None, mask: Tensor) -> list[list[int]]:
    """The borders of documents, with the padding as one more."""
    length = mask.shape[1]
    rows = documents or [[0, length]] * len(mask)
    found = []
    for borders, real in zip(rows, mask.sum(1).tolist(), strict=True):
        kept = [border for border in borders if border < real]
        found.append(sorted({0, *kept, int(real), length}))
    return found


class PlanLoader:
    """Yields this rank's micro-batches, step after step, without end: the data set is walked round and round.

    Args:
        dataset: a sequence of samples, each a dict of tensors [S] (`input_ids`, `labels`) or one tensor of token ids
            [S], which are their own labels.
        mesh: this rank's place.
        first_step: the step to begin with, after a resume.
    """

    def __init__(self, dataset: Sequence[Any], mesh: Mesh, first_step: int = 0) -> None:
        if len(dataset) == 0:
            raise ValueError("the data set is empty")
        self._dataset = dataset
        self._mesh = mesh
        self.step = first_step

    def __iter__(self) -> Iterator[Batch]:
        """Micro-batches; the first of a step counts the step's tokens over dp."""
        while True:
            micro_batches = [self._whole(micro) for micro in range(self._steps)]
            divisor = self._divisor(micro_batches)
            for micro, batch in enumerate(micro_batches):
                ready = {**self._part(batch), "num_items_in_batch": divisor}
                if self._drops_attention:
                    ready[FIRST_SAMPLE] = self._first_sample(micro)
                yield ready
            self.step += 1

    @property
    def _steps(self) -> int:
        return self._mesh.plan.spec.training.gradient_accumulation_steps

    @property
    def _drops_attention(self) -> bool:
        config = self._mesh.plan.spec.model.hf_config
        return any(config.get(name) for name in _ATTENTION_DROPOUTS)

    def _first_sample(self, micro: int) -> int:
        """The number of the first sequence of this dp rank's micro-batch."""
        training, dp = self._mesh.plan.spec.training, self._mesh.size("dp")
        in_step = (micro * dp + self._mesh.index("dp")) * training.micro_batch_size
        return self.step * training.global_batch_size + in_step

    def _samples(self, micro: int) -> list[Any]:
        """Those of this dp rank's micro-batch."""
        first, size = self._first_sample(micro), self._mesh.plan.spec.training.micro_batch_size
        return [self._dataset[index % len(self._dataset)] for index in range(first, first + size)]

    def _part(self, batch: Batch) -> Batch:
        """This rank's tokens of it."""
        return split_batch(batch, self._mesh)

    def _whole(self, micro: int) -> Batch:
        """The whole sequences of this dp rank's micro-batch."""
        batch = stack(self._samples(micro))
        if "labels" in batch:
            batch["shift_labels"] = shift_labels(batch.pop("labels"), batch.get("position_ids"))
        if "attention_mask" in batch:
            batch["shift_labels"] = _without_padding(batch["shift_labels"], batch["attention_mask"])
        return batch

    def _divisor(self, micro_batches: list[Batch]) -> Tensor:
        """Predicted tokens of the global batch / (steps · dp); see `parcompile.runtime.loss`."""
        count = torch.stack([(batch["shift_labels"] != IGNORED).sum() for batch in micro_batches]).sum().float()
        count = count.to(self._mesh.device)
        dp = self._mesh.size("dp")
        if dp > 1:
            dist.all_reduce(count, group=self._mesh.group("dp"))
        return count.clamp(min=1) / (self._steps * dp)


def stack(samples: Sequence[Any]) -> Batch:
    """Samples [S] as a batch [B, S]; token ids alone are their own labels."""
    rows = [{"input_ids": one, "labels": one} if isinstance(one, Tensor) else one for one in samples]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
