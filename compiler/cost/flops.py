"""Floating-point operations of a step, and model FLOPs utilisation.

Convention of this project: 6 operations for each parameter in a matrix product (head included, embedding not) and
token, plus 12 · S · L · a · dh for attention without halving it for the causal mask (arXiv 2204.02311, appendix B).
What is recomputed does not count. A layer that carries a state adds three times the operations of its recurrence in the
place of attention. What chooses keys does not count either: attention counts as if every key were seen. Keys that stand
for windows of tokens count beside those of the tokens.
Of packed documents S is the length of a document.
"""

from __future__ import annotations

import functools

from parcompile.model.blocks import Block
from parcompile.model.families import family_of
from parcompile.model.shape import ModelShape, mean_over_layers

from .blocks import head_parameters, mixture_parameters

CONVENTION = (
    "6 N + 12 L a dh S per token (arXiv 2204.02311, appendix B): head counted, no causal discount, no recompute"
)


def attention_matmul_parameters(shape: ModelShape) -> int:
    """Parameters of the attention of one layer that multiply each token."""
    h, heads = shape.hidden_size, shape.num_attention_heads
    if shape.attention.projections is not None:
        gated_queries = family_of(shape.model_type).query_gate
        return shape.attention.projections.matmul_parameters(h, heads, shape.heads.gate, gated_queries=gated_queries)
    if shape.heads.low_rank is not None:
        attention = shape.heads.low_rank.numel(h, heads, shape.head_dim) + h * shape.head_dim
        return attention + (
            0 if shape.attention.compressed is None else shape.attention.compressed.numel(h, shape.head_dim)
        )
    projected, kv_heads = shape.attention.keys_and_values.value, shape.num_key_value_heads
    keys, values = kv_heads * ("k" in projected), kv_heads * ("v" in projected)
    taken = shape.attention_inputs * (shape.head_dim * (heads + keys) + shape.value_dim * values)
    return taken + h * heads * (shape.value_dim + shape.heads.gate)


def layer_matmul_parameters(shape: ModelShape, *, moe: bool = False) -> float:
    """Parameters of one layer that multiply each token: routed experts count as often as a token visits them.

    Where some experts give back what they take, every choice counts as equally frequent.

    Of layers of different shapes the mean.
    """
    if shape.kinds:
        return mean_over_layers(shape, lambda one: layer_matmul_parameters(one, moe=moe))
    h, attention = shape.hidden_size, attention_matmul_parameters(shape)
    if shape.layer_inputs is not None:
        attention += 3 * h * shape.layer_inputs.width  # its share of the projection for all layers, and its own two
    attention += mixture_parameters(shape) + sum(
        _parameters(one, shape) for one in shape.parts if _is_of_all(one, shape)
    )
    projections = 3 if shape.mlp.gated else 2
    if moe and shape.moe is not None:
        return attention + shape.moe.matmul_parameters(h, projections)
    return attention + projections * h * shape.intermediate_size


@functools.lru_cache(maxsize=256)
def mixed_matmul_parameters(shape: ModelShape, *, moe: bool = False) -> float:
    """The mean of a layer that attends and one that carries a state, as often as the model has each."""
    if shape.stack.blocks is not None:
        return _matmul_parameters_of_blocks(shape) / shape.num_hidden_layers
    whole = layer_matmul_parameters(shape, moe=moe)
    return whole + more / shape.num_hidden_layers if (more := _instead(shape)) else whole


def _matmul_parameters_of_blocks(shape: ModelShape) -> float:
    """Of all layers, where each is one block."""
    attention, every = attention_matmul_parameters(shape), range(shape.num_hidden_layers)
    total: float = len(shape.attention_layers) * attention
    total += sum(len(one.layers) * _parameters(one, shape) for one in shape.parts)
    if (shared := shape.stack.shared_blocks) is not None:
        total += len(shared.layers) * shared.matmul_parameters(shape.hidden_size, shape.intermediate_size)
    total += shape.dense(every) * (layer_matmul_parameters(shape) - attention)
    return total + shape.routed(every) * (layer_matmul_parameters(shape, moe=True) - attention)


def _instead(shape: ModelShape) -> int:
    """What layers with mechanisms of some layers have more, in all; than if they attended, where they do not."""
    attention = attention_matmul_parameters(shape)
    return sum(
        len(one.layers) * (_parameters(one, shape) - (attention if one.replaces_attention else 0))
        for one in shape.parts
        if not _is_of_all(one, shape)
    )


def _parameters(one: Block, shape: ModelShape) -> int:
    """Those of a mechanism in a layer that multiply each token."""
    return one.matmul_parameters(shape.hidden_size, shape.residual_streams)


def _is_of_all(one: Block, shape: ModelShape) -> bool:
    """Whether each layer is counted with a mechanism."""
    return len(one.layers) == shape.num_hidden_layers and not one.states


@functools.lru_cache(maxsize=256)
def attention_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """Forward operations of scores and weighted values for one token of a layer, causal: half of the keys are seen."""
    if shape.kinds:
        return mean_over_layers(shape, lambda one: attention_flops_per_token(one, sequence_length))
    if shape.attention.projections is not None:
        width = shape.num_attention_heads * (
            shape.attention.projections.key_dim + shape.attention.projections.value_dim
        )
    else:
        width = shape.num_attention_heads * (shape.head_dim + shape.value_dim)
    keys = sequence_length / 2
    if shape.attention.sliding_window is not None and shape.attention.sliding_window < sequence_length:
        keys = shape.attention.sliding_window * (1 - shape.attention.sliding_window / (2 * sequence_length))
    if shape.attention.compressed is not None:
        keys += shape.attention.compressed.count(sequence_length) / 2
    return 2.0 * keys * width


@functools.lru_cache(maxsize=256)
def forward_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """Forward operations for a token without a gradient, the mean of all layers: each tp rank computes all of them."""
    rank = 0 if shape.attention.projections is None else shape.attention.projections.query_rank
    total = sum(len(one.layers) * one.forward_flops(shape.hidden_size, rank, sequence_length) for one in shape.parts)
    if shape.heads.low_rank is not None:
        total += sum(
            len(layers)
            * one.attention.compressed.forward_flops(
                shape.hidden_size, shape.heads.low_rank.query_rank, sequence_length
            )
            for layers, one in shape.by_kind
            if one.attention.compressed is not None
        )
    return total / shape.num_hidden_layers


def moe_layers(shape: ModelShape) -> int:
    """Layers with routed experts."""
    return shape.routed(range(shape.num_hidden_layers))


def matmul_parameters(shape: ModelShape) -> float:
    """Parameters of the whole model that multiply each token, head included; of layers that run again, again."""
    if shape.stack.blocks is not None:
        return shape.head_size * shape.hidden_size + _matmul_parameters_of_blocks(shape)
    sparse = moe_layers(shape)
    layers = shape.num_hidden_layers - sparse if shape.stack.runs is None else shape.stack.runs.counted
    total = layer_matmul_parameters(shape) * layers + shape.head_size * shape.hidden_size
    total += sum(one.end_parameters(shape.hidden_size) for one in shape.parts)
    total += head_parameters(shape)
    total += layer_matmul_parameters(shape, moe=True) * sparse if sparse else 0
    return total + _instead(shape)


def model_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """Operations of one training token by the convention of this module."""
    if shape.attention.projections is not None:
        width = (
            shape.num_attention_heads
            * (shape.attention.projections.key_dim + shape.attention.projections.value_dim)
            / 2
        )
    else:
        width = shape.num_attention_heads * mean_over_layers(shape, lambda one: (one.head_dim + one.value_dim) / 2)
    attending = len(shape.attention_layers) if shape.stack.runs is None else shape.stack.runs.counted
    keys = sequence_length + mean_over_layers(
        shape, lambda one: 0 if one.attention.compressed is None else one.attention.compressed.count(sequence_length)
    )
    attention = 12.0 * attending * width * keys
    scans = sum(len(one.layers) * one.flops_per_token(carried=False) for one in shape.parts)
    return 6.0 * matmul_parameters(shape) + attention + 3.0 * scans
