"""The loss of a plan over all its ranks.

A loss whose value is that of whole sequences and whose gradient is this rank's part of them.

The value is summed over cp while the program goes on: whoever looks at it waits, backward does not.

The loss of a plan: a sum over this rank's tokens, divided so that DeepSpeed's reduction gives the mean over all.

DeepSpeed sums gradients over cp and averages them over dp and over accumulation steps. A rank therefore divides the sum
of its token losses by *tokens of the global batch / (steps · dp)*; every token of the global batch then weighs the
same, wherever masked labels fall.

Log-probabilities, entropy and divergence of single tokens, for losses of one's own (preference optimisation, policy
gradients, distillation): no rank holds the logits of all words or of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parcompile.runtime.collectives import gather_from_group, linear_map
from parcompile.runtime.errors import everywhere
from parcompile.runtime.groups import Mesh
from parcompile.runtime.labels import IGNORED_LABEL
from parcompile.runtime.ring_attention import local_positions
from parcompile.runtime.tensor_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_kl_divergence,
)


class SequenceLoss(Tensor):
    """A scalar that is being summed over ranks. Functions of torch that read its value wait for the sum.

    Collectives of `torch.distributed` read memory at once: give them `loss.detach()`, which waits.
    """

    part: Tensor
    """What this rank has added, with its graph."""
    _work: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_VALUE:
                return func(*args, **(kwargs or {}))
            positional, named = tree_map_only(SequenceLoss, _arrived, (args, kwargs or {}))
            found = func(*positional, **named)
            return _of(found, args[0].part.detach(), None) if func is Tensor.detach else found


_WITHOUT_VALUE = frozenset(
    {
        *(Tensor.backward, Tensor.register_hook, Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point),
        *(
            getattr(Tensor, name).__get__
            for name in ("requires_grad", "grad_fn", "shape", "dtype", "device", "is_leaf", "is_meta", "layout")
        ),
        torch.ones_like,
    }
)
"""What may be asked before the sum is there."""


def over_sequence(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The loss of whole sequences from each rank's part of it; `group` holds the ranks that share them, if any do."""
    if group is None:
        return part
    # To memory of its own, in which the sum will be; the gradient stays this rank's.
    whole = linear_map(part, Tensor.clone, lambda gradient: gradient)
    if torch.compiler.is_compiling():
        dist.all_reduce(whole.detach(), group=group)
        return whole
    return _of(whole, part, dist.all_reduce(whole.detach(), group=group, async_op=True))


def own_part(loss: Tensor) -> Tensor:
    """This rank's part of a loss, which is there at once."""
    return loss.part if isinstance(loss, SequenceLoss) else loss


def without_waiting(loss: Tensor) -> Tensor:
    """The same tensor for backward: its gradient is right, its value need not be there yet."""
    if not isinstance(loss, SequenceLoss):
        return loss
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(Tensor)


def _of(whole: Tensor, part: Tensor, work: Any) -> SequenceLoss:
    loss = whole.as_subclass(SequenceLoss)
    loss.part, loss._work = part, work
    return loss


def _arrived(loss: SequenceLoss) -> Tensor:
    """A plain tensor, whose value is there."""
    if loss._work is not None:
        loss._work.wait()
        loss._work = None
    return loss.as_subclass(Tensor)


_COMPUTES_WITH_LOGITS = (
    "the model computes with its logits before the loss, so that they are whole: set the key to false"
)


class ParallelCausalLoss:
    """Takes the place of a Hugging Face model's `loss_function`.

    Called with this rank's logits [B, S, V/tp] and `shift_labels` [B, S]: labels that were shifted before the sequence
    was split.

    Args:
        mesh: this rank's place.
        vocab_size: without padding.
        logits_are_cut: over tp.
        z_loss: the weight of the squared log of the softmax's denominator (PaLM, arXiv 2204.02311, section 5).
        defers_logits: the head leaves its product to this loss (`linear_cross_entropy`).
    """

    def __init__(
        self,
        mesh: Mesh,
        vocab_size: int,
        *,
        logits_are_cut: bool = True,
        z_loss: float = 0.0,
        defers_logits: bool = False,
    ) -> None:
        self._mesh, self._z_loss, self._defers_logits = mesh, z_loss, defers_logits
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
            RunError: the head leaves its product to this loss, and the model has computed with its logits.
        """
        if shift_labels is None:
            raise ValueError("call the model with shift_labels: a split sequence cannot be shifted (see split_batch)")
        if num_items_in_batch is None:
            num_items_in_batch = self._tokens_of_whole_sequences(shift_labels)
        if self._defers_logits:
            summed_loss = getattr(logits, "summed_loss", None)
            if summed_loss is None:
                raise everywhere(f"training.linear_cross_entropy: {_COMPUTES_WITH_LOGITS}")
            return cast(Tensor, summed_loss(shift_labels, self._z_loss)) / num_items_in_batch
        losses = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            group=self._group,
            vocab_size=self._vocab_size,
            ignore_index=IGNORED_LABEL,
            z_loss=self._z_loss,
        )
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


# Single tokens, for losses of one's own: B rows, S tokens of this cp rank, v = (padded V)/tp columns of this tp rank.


def log_probs(logits: Tensor, shift_labels: Tensor, mesh: Mesh) -> Tensor:
    """The log-probability of each token's label in nats, [B, S] in float32 (float64 for float64 logits).

    The same on all ranks of tp, differentiable in the logits. A loss that each cp rank computes from its own tokens is
    its part of the sum over cp; one that looks at whole sequences takes `whole_sequences` of the result.

    Args:
        logits: [B, S, v], as the engine's model returns them.
        shift_labels: [B, S], as `split_batch` and the loaders give them: position i has the label of token i + 1. Where
            it is −100 the result is 0, without a gradient.
        mesh: this rank's place.

    Raises:
        ValueError: shapes do not match, or a label is outside the vocabulary (looked for on the CPU only).
    """
    size = mesh.plan.spec.model.shape.vocab_size
    return -vocab_parallel_cross_entropy(logits, shift_labels, group=mesh.parallel_group("tp"), vocab_size=size)


def entropy(logits: Tensor, mesh: Mesh, shift_labels: Tensor | None = None) -> Tensor:
    """The entropy of each token's distribution in nats, [B, S]; arguments, dtype and errors as for `log_probs`.

    With `shift_labels`, tokens without a label count 0.
    """
    size = mesh.plan.spec.model.shape.vocab_size
    found = vocab_parallel_entropy(logits, group=mesh.parallel_group("tp"), vocab_size=size)
    return _of_labels(found, shift_labels)


def kl_divergence(logits: Tensor, reference: Tensor, mesh: Mesh, shift_labels: Tensor | None = None) -> Tensor:
    """The divergence D(model ‖ reference) of each token in nats, [B, S], over the whole vocabulary.

    Differentiable in both: with the teacher's logits first and the student's second it is the loss of distillation.
    Dtype and errors as for `log_probs`.

    Args:
        logits: [B, S, v], as the engine's model returns them.
        reference: [B, S, v], those of another model that is injected by the same plan.
        mesh: this rank's place.
        shift_labels: [B, S]; tokens without a label count 0.

    Raises:
        ValueError: shapes do not match.
    """
    size = mesh.plan.spec.model.shape.vocab_size
    found = vocab_parallel_kl_divergence(logits, reference, group=mesh.parallel_group("tp"), vocab_size=size)
    return _of_labels(found, shift_labels)


def whole_sequences(values: Tensor, mesh: Mesh) -> Tensor:
    """Values of this cp rank's tokens [B, S] to those of all tokens [B, S · cp] in order, on every cp rank.

    Every cp rank then computes the same loss from them; its gradient is this rank's part, which DeepSpeed adds up. For
    batches that the plan's layout has split (`split_batch`, `PlanLoader`), not those of `PackedPlanLoader`.
    """
    group, cp = mesh.parallel_group("cp"), mesh.size("cp")
    if group is None:
        return values
    whole, layout = gather_from_group(values, 1, group), mesh.plan.spec.parallelism.cp_layout
    order = torch.cat([local_positions(layout, cp, rank, whole.shape[1]) for rank in range(cp)])
    return whole.index_select(1, torch.argsort(order).to(whole.device))


def _of_labels(values: Tensor, shift_labels: Tensor | None) -> Tensor:
    if shift_labels is None:
        return values
    if shift_labels.shape != values.shape:
        raise ValueError(f"shift_labels {tuple(shift_labels.shape)} do not match {tuple(values.shape)} tokens")
    return values.masked_fill(shift_labels == IGNORED_LABEL, 0.0)
