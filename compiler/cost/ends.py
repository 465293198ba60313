"""What the two ends of a forward take: the head with its loss, and the embedding."""

from __future__ import annotations

from parcompile.layout.stages import Stage
from parcompile.model.type_traits import types_with

from .layer_inputs import table_gradient_bytes
from .workload import Workload

LOSS_CHUNK_ELEMENTS = 2**25
"""Logits that the loss holds in fp32 at a time, on an accelerator."""


FP32_LOGITS = types_with("fp32_logits")
"""Model types whose head gives logits in fp32, of which it lets go of those in the type of the weights."""


def ends_bytes(work: Workload, stage: Stage, logits: float, *, recomputed_layer: float, in_flight: float) -> float:
    """What the two ends of a forward add in the runtime: the head's inputs, and the first gradients of backward.

    Logits with their gradient; what the head's backward holds (the gradients of logits, weight and input; under
    sequence parallelism the gathered input and its gradient, each twice while they are laid out anew); the gradients in
    front of the last norm (three in fp32, and two in the type of the weights where that is another); what is in flight
    in the last MLP, or with full recomputation a layer: these do not stand in memory together, the largest counts. The
    gradient of a tied head waits for that of the embedding. Logits and layers are counted elsewhere, so what is
    returned may be negative.
    """
    width, hidden = work.element_bytes, work.split_tokens * work.shape.hidden_size
    share = work.tp if work.sequence_parallel else 1
    weight = width * work.shape.hidden_size * work.padded_vocabulary / work.tp
    waiting = weight if _is_tied(work, stage) else 0.0
    chunk = loss_chunk_bytes(work, logits)
    counted, loss = 2 * width * logits + chunk, 2 * _logit_bytes(work) * logits + chunk
    normed = head = 0.0
    if stage.has_head:
        normed = hidden * (4 + 2 * width) / share
        inputs = hidden * (4 + 1 / share) if share > 1 else hidden
        # What a cap multiplies is kept beside the logits.
        loss += width * logits * work.shape.capped_logits
        head = max(loss, width * (logits + inputs) + weight)
    if work.recomputes_layers:
        return max(recomputed_layer + waiting, normed + head) - recomputed_layer - counted
    first = hidden * ((2 * width if width < 4 else 0) + 3 * 4) / share
    return max(normed + head, normed + first + waiting, in_flight + waiting) - counted


def embedding_backward_bytes(work: Workload, stage: Stage) -> float:
    """The gradient of the embedding, when all else is gone; of a tied one, that of the head and the sum of both too."""
    if not stage.has_embedding:
        return 0.0
    weight, tied = work.element_bytes * work.shape.hidden_size * work.padded_vocabulary / work.tp, _is_tied(work, stage)
    # A second embedding goes backward first; the gradient of a tied head waits meanwhile.
    return max(weight * (3 if tied else 1), table_gradient_bytes(work, stage) + weight * tied)


def loss_chunk_bytes(work: Workload, logits: float) -> float:
    """The logits that the loss has in fp32 at a time."""
    return 4 * min(logits, LOSS_CHUNK_ELEMENTS) if work.framework == "deepspeed" else 0.0


def _logit_bytes(work: Workload) -> int:
    """Of a logit and of its gradient."""
    return max(work.element_bytes, 4) if work.shape.model_type in FP32_LOGITS else work.element_bytes


def _is_tied(work: Workload, stage: Stage) -> bool:
    return work.shape.tie_word_embeddings and stage.has_embedding and stage.has_head
