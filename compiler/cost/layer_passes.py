"""What a layer takes on its way forward and backward, beyond what it keeps for each token."""

from __future__ import annotations

from parcompile.model.catalogue import SCALED_INPUTS, WEIGHTED_IN_TYPE

from .activations import ROW_COPIES
from .kinds import mean_over_layers
from .layer_inputs import NORM_BYTES
from .stage_exchanges import stream_bytes
from .streams import added_bytes
from .workload import Workload

IN_FLIGHT_COPIES = 3
"""Rows of tokens for their experts, in copies that are in memory while experts run or go backward, beyond those that a
layer keeps; counted by preflight."""


def row_copies(work: Workload) -> float:
    """Dealt experts get the rows of all ranks with slices of them; a tensor-parallel rank gets back those it sent.

    What experts give is kept where scores weight it. Where they scale what experts take, a token that travels is kept.
    """
    if work.ep > 1:
        return (work.expert_slices + 1) / work.tp
    return ROW_COPIES - (work.shape.model_type in SCALED_INPUTS)


def in_flight_bytes(work: Workload, *, routed: bool) -> float:
    """Gradients of activations and of one weight while an MLP runs backward, beyond what it has let go of."""
    h, tokens, moe = work.shape.hidden_size, work.local_tokens, work.busiest_shape.moe
    if not routed or moe is None:
        width = max((one.intermediate_size for _, one in work.shape.by_kind), default=0) / work.tp
        return work.element_bytes * (tokens * (h + 2 * width) + h * width)
    h = work.shape.expert_features
    # The first projection's gradient, of all experts in one tensor, when the product and the output are gone.
    projections = 2 if work.shape.gated_mlp else 1
    slices = work.tp if work.ep == 1 else work.expert_slices
    width = moe.intermediate_size / slices
    experts, rows = moe.num_experts / work.ep, moe.num_experts_per_token * tokens * slices / work.tp
    of_weight = work.element_bytes * width * (experts * projections * h - 2 * rows)
    # Rows are weighted by what a router gives in fp32 or casts.
    weighted = work.element_bytes if work.shape.model_type in WEIGHTED_IN_TYPE else 4
    if work.ep == 1:
        # With many tokens the peak is where rows are weighted.
        return max(of_weight, IN_FLIGHT_COPIES * weighted * rows * h)
    came, own = work.element_bytes * rows * h, work.element_bytes * rows / slices * h
    # While experts run, rows stand as they came, and are given back, weighted and put in order; this rank's own are not
    # back. Then what came and what was computed of it are there still, and slices' sums before and behind their way.
    running, back = 4 * came - own, 2 * came + own * (1 + (slices > 1))
    if not work.recomputes_layers:
        back += weighted * rows / slices * h
    elif work.element_bytes < 4:
        # The gradient of the layer's output; in fp32 the first norm keeps the layer's input, which is counted.
        running, back = running + input_bytes(work), back + input_bytes(work)
    return max(of_weight + came - own, running, back)


def input_bytes(work: Workload) -> float:
    """What goes into a layer of a micro-batch: all residual streams of a rank's tokens."""
    share = work.tp if work.sequence_parallel else 1
    return work.shape.residual_streams * work.shape.hidden_size * stream_bytes(work) * work.split_tokens / share


def behind_mlp_bytes(work: Workload) -> float:
    """What a layer keeps behind its MLP, and has let go of when that runs backward.

    These are Gemma's norm, gate and its norm, and what is added to several residual streams.
    """
    shape, inputs = work.shape, work.shape.layer_inputs
    if not work.recomputes_layers:
        return 0.0
    share = work.tp if work.sequence_parallel else 1
    of_token = added_bytes(shape, work.element_bytes)
    if inputs is not None:
        of_token += (2 * NORM_BYTES + work.element_bytes) * shape.hidden_size + 4 * work.element_bytes * inputs.width
    return work.split_tokens * of_token / share


def kept_attention(work: Workload) -> float:
    """Output and log-sum-exp for each token, which recomputation does not compute again."""
    mla = work.shape.mla
    width = mean_over_layers(work.shape, lambda one: one.value_dim) if mla is None else mla.v_head_dim
    return work.shape.num_attention_heads / work.tp * (width * work.element_bytes + 4)
