"""What a rank of each stage sends to other stages in a step, as the runtime's schedule has it: exact.

| group | message | times |
|---|---|---|
| pp | hidden states [b, S/c, h], all streams; with sequence parallelism a share; to the next | micro-batches · chunks |
| pp | their gradients to the stage before | the same |
| pp | beside each of both, where a loss balances experts: two fp32 numbers for each expert | the same |
| embedding | all-reduce of the gradient of a tied embedding, between the first and the last stage | once a step |
"""

from __future__ import annotations

from parcompile.layout.grid import Axis
from parcompile.layout.groups import EMBEDDING
from parcompile.layout.schedule import RECEIVES_AHEAD

from .collectives import Collectives, Sent
from .memory import keeps_both_gradients
from .workload import FRAMEWORKS, Workload

BALANCE_BYTES = 8
"""Of each expert: the sum of its probabilities and how often it was chosen, in fp32."""
_FP32_BYTES = 4


def stage_exchanges(work: Workload, stage: int) -> Collectives:
    """Everything that a rank of a pp rank sends to other stages in a step, by group and kind."""
    found: Collectives = {}
    if work.pp == 1:
        return found
    sends = sum(work.schedule.sends(stage))
    size = hidden_bytes(work)
    balance = BALANCE_BYTES * work.shape.moe.num_experts if work.balances_experts and work.shape.moe else 0
    messages = 1 + bool(balance) + (work.shape.layer_inputs is not None)
    found[Axis.PP, "send"] = Sent(sends * messages, float(sends * (size + balance)))
    if work.shape.tie_word_embeddings and stage in (0, work.pp - 1):
        found[EMBEDDING, "all-reduce"] = Sent(1, float(_embedding_gradient_bytes(work)))
    return found


def busiest_stage(work: Workload) -> int:
    """A stage that sends most: one between two others, where there is one."""
    return 1 if work.pp > 2 else 0


def buffer_bytes(work: Workload, stage: int) -> float:
    """Hidden states and gradients on their way, beside the activations that a stage keeps.

    A receive is posted ahead. Towards the next stage an output is under way and a gradient in use; towards the one
    before, a gradient is under way.
    """
    first, last = (stage == end and work.virtual_stages == 1 for end in (0, work.pp - 1))
    messages = RECEIVES_AHEAD + (0 if last else 2) + (0 if first else 1)
    return messages * hidden_bytes(work) if work.pp > 1 else 0.0


def hidden_bytes(work: Workload) -> float:
    """Hidden states of a micro-batch as one rank hands them on, with the layers' parts of a second embedding."""
    inputs = work.shape.layer_inputs
    further = 0 if inputs is None else work.shape.num_hidden_layers * inputs.width
    streams = work.shape.residual_streams * work.shape.hidden_size * stream_bytes(work)
    whole = work.split_tokens * (streams + further * work.element_bytes)
    return whole / (work.tp if work.sequence_parallel or FRAMEWORKS[work.framework].scatters_exchange else 1)


def stream_bytes(work: Workload) -> int:
    """Of a feature of the hidden states between the layers."""
    return max(work.element_bytes, _FP32_BYTES) if work.shape.wide_stream else work.element_bytes


def _embedding_gradient_bytes(work: Workload) -> int:
    """What one of two ranks sends to add up the gradients of both: all of its own."""
    numel = work.padded_vocabulary // work.tp * work.shape.hidden_size
    both = keeps_both_gradients(work.framework, work.element_bytes, work.gradient_bytes, work.zero_stage)
    return numel * (work.gradient_bytes if both else work.element_bytes)
