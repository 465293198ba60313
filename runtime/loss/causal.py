"""The loss of a plan: a sum over this rank's tokens, divided so that DeepSpeed's reduction gives the mean over all.

DeepSpeed sums gradients over cp and averages them over dp and over accumulation steps. A rank therefore divides the sum
of its token losses by *tokens of the global batch / (steps · dp)*; every token of the global batch then weighs the
same, wherever masked labels fall.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parcompile.runtime.groups import Mesh
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.runtime.tensor_parallel import vocab_parallel_cross_entropy

from .sequence import over_sequence, own_part


class ParallelCausalLoss:
    """Takes the place of a Hugging Face model's `loss_function`.

    Called with this rank's logits [B, S, V/tp] and `shift_labels` [B, S]: labels that were shifted before the sequence
    was split.

    Args:
        mesh: this rank's place.
        vocab_size: without padding.
        logits_are_cut: over tp.
        z_loss: the weight of the squared log of the softmax's denominator (PaLM, arXiv 2204.02311, section 5).
    """

    def __init__(self, mesh: Mesh, vocab_size: int, *, logits_are_cut: bool = True, z_loss: float = 0.0) -> None:
        self._mesh, self._z_loss = mesh, z_loss
        self._group = mesh.parallel_group("tp") if logits_are_cut else None
        self._vocab_size = vocab_size

    def __call__(self, logits: Tensor, *_: Any, **batch: Any) -> Tensor:
        """The loss of whole sequences (a scalar), whose gradient is this rank's part; see `over_sequence`.

        `reduce_loss` gives the loss of the batch.

        Raises:
            ValueError: `shift_labels` is missing: labels cannot be shifted after the sequence was split.
        """
        return over_sequence(self.part(logits, **batch), self.ring)

    @property
    def ring(self) -> dist.ProcessGroup | None:
        """The ranks that share sequences."""
        return self._mesh.parallel_group("cp")

    def part(
        self,
        logits: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **_: Any,
    ) -> Tensor:
        """What this rank's tokens add to the loss of whole sequences.

        Raises:
            ValueError: as for a call.
        """
        if shift_labels is None:
            raise ValueError("call the model with shift_labels: a split sequence cannot be shifted (see split_batch)")
        losses = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            group=self._group,
            vocab_size=self._vocab_size,
            ignore_index=IGNORED_LABEL,
            z_loss=self._z_loss,
        )
        if num_items_in_batch is None:
            num_items_in_batch = self._tokens_of_whole_sequences(shift_labels)
        return losses.sum() / num_items_in_batch

    def _tokens_of_whole_sequences(self, labels: Tensor) -> Tensor:
        """Predicted tokens of this micro-batch over all cp ranks; at least 1, so that an empty batch gives 0."""
        count = (labels != IGNORED_LABEL).sum().float()
        if self.ring is not None:
            dist.all_reduce(count, group=self.ring)
        return count.clamp(min=1)


def loss_of_step(losses: Sequence[Tensor], micro_batches: int, mesh: Mesh) -> Tensor:
    """The loss of a step's whole batch on all ranks, from the micro-batches that ended on this one.

    Those of a pipeline end on its last stage. Of each loss this rank's part counts: a sum over cp, a mean over dp and
    over micro-batches.
    """
    total = torch.zeros((), device=mesh.device)
    if losses:
        total += torch.stack([own_part(loss).float() for loss in losses]).sum()
        dist.all_reduce(total, group=mesh.group("dp-cp"))
    if mesh.size("pp") > 1:
        dist.broadcast(total, group=mesh.group("pp"), group_src=mesh.size("pp") - 1)
    return total / (micro_batches * mesh.size("dp"))


def reduce_loss(loss: Tensor, mesh: Mesh) -> float:
    """The mean over dp of a loss that the model has returned: each cp rank has that of whole sequences."""
    total = loss.detach().float().clone()
    dist.all_reduce(total, group=mesh.group("dp-cp"))
    return float(total) / mesh.size("dp-cp")
