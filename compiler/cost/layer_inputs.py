"""What a second embedding costs in memory, of which every layer gets a part (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from parcompile.layout.stages import Stage
from parcompile.layout.tensor import padded_vocab_size

from .workload import Workload

NORM_BYTES = 8
"""Of a norm in fp32: its input and, before the weight, its output."""


def parts_bytes(work: Workload) -> float:
    """The parts of all layers for the tokens of a rank, in the type of the weights."""
    inputs = work.shape.layer_inputs
    if inputs is None:
        return 0.0
    share = work.tp if work.sequence_parallel else 1
    return work.split_tokens * work.shape.num_hidden_layers * inputs.width * work.element_bytes / share


def projection_bytes(work: Workload, stage: Stage) -> float:
    """What computing the parts keeps of a micro-batch: the norm of the projected embedding, in front of all layers."""
    return NORM_BYTES / work.element_bytes * parts_bytes(work) if stage.has_embedding else 0.0


def table_gradient_bytes(work: Workload, stage: Stage) -> float:
    """The gradient of a rank's rows of the table, and that of the parts, from which it comes."""
    inputs = work.shape.layer_inputs
    if inputs is None or not stage.has_embedding:
        return 0.0
    rows = padded_vocab_size(inputs.vocab_size, work.tp, work.vocab_divisible_by) / work.tp
    return work.element_bytes * rows * work.shape.num_hidden_layers * inputs.width + parts_bytes(work)
