"""Bytes that the forward pass of Megatron-LM and torchtitan keeps for the backward pass, by forms.

What transformers' modules keep in the runtime is read off them (`kept.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, cast

from parcompile.model.blocks.latent import MlaShape
from parcompile.model.layers import KeysAndValues
from parcompile.model.shape import ModelShape

from .kept import LayerBytes

SCORE_BYTES = 5
"""Kept for each attention score where scores are stored: softmax, dropout's mask and output (arXiv 2205.05198)."""

ROW_COPIES = 2.0
"""Hidden states kept for each expert of a token: of what goes into it and of what comes back."""


def score_bytes(shape: ModelShape, *, tp: int, sequence_length: int) -> float:
    """Bytes of one layer's scores for one token, of a rank's heads."""
    return SCORE_BYTES * shape.num_attention_heads * sequence_length / tp


Sizes = ParamSpec("Sizes")


def _mean_of_kinds(
    form: Callable[Concatenate[ModelShape, Sizes], LayerBytes],
) -> Callable[Concatenate[ModelShape, Sizes], LayerBytes]:
    """Where layers have several shapes, the mean of what the form gives for each. Layouts of one search share it."""

    @lru_cache(maxsize=4096)
    @wraps(form)
    def mean(shape: ModelShape, /, *args: Sizes.args, **options: Sizes.kwargs) -> LayerBytes:
        if not shape.kinds:
            return form(shape, *args, **options)
        kinds = [(len(layers), form(one, *args, **options)) for layers, one in shape.by_kind]
        total = sum(count for count, _ in kinds)
        means = (sum(count * getattr(one, part.name) for count, one in kinds) / total for part in fields(LayerBytes))
        return LayerBytes(*means)

    return cast("Callable[Concatenate[ModelShape, Sizes], LayerBytes]", mean)


@_mean_of_kinds
def layer_bytes(
    shape: ModelShape,
    *,
    tp: int,
    sequence_parallel: bool,
    element_bytes: int = 2,
    moe: bool = False,
    row_copies: float = ROW_COPIES,
) -> LayerBytes:
    """What one layer keeps for each token, with fused attention: scores are never stored (arXiv 2205.14135)."""
    h, width = shape.hidden_size, float(element_bytes)
    norms = shape.norms.per_layer * 2 * h
    kv_heads = _kv_heads(shape, tp)
    heads = shape.num_attention_heads / tp
    if isinstance(mla := shape.attention.projections, MlaShape):
        attention = heads * (2 * mla.key_dim + 2 * mla.v_head_dim) + (mla.q_lora_rank or 0) + mla.kv_lora_rank
    elif shape.heads.low_rank is not None:
        low, wide = shape.heads.low_rank, heads * shape.head_dim
        compressed = 0 if shape.attention.compressed is None else 3 * shape.attention.compressed.series * shape.head_dim
        attention = low.query_rank + 3 * wide + low.output_groups * low.output_rank / tp + shape.head_dim + compressed
    else:
        attention = (heads + _own(kv_heads, shape)) * (shape.head_dim + shape.value_dim)
    projections = 3 if shape.mlp.gated else 2
    if moe and shape.moe is not None:
        experts = shape.moe
        active = experts.num_experts_per_token * experts.intermediate_size + experts.shared_intermediate_size
        # Routing makes a copy of each token for each of its experts, on the way there and back.
        mlp = projections * active / tp + row_copies * experts.num_experts_per_token * shape.expert_features
        mlp += experts.num_choices
    else:
        mlp = projections * shape.intermediate_size / tp
    stream = norms / tp if sequence_parallel else float(norms)
    gathered = 2 * h * (1 - 1 / tp) if sequence_parallel else 0.0
    return LayerBytes(width * stream, width * attention, width * mlp, width * gathered)


def _kv_heads(shape: ModelShape, tp: int) -> float:
    """Of a rank: one at least, where layers attend."""
    return max(shape.num_key_value_heads / tp, 1.0) if shape.attends else 0.0


def _own(kv_heads: float, shape: ModelShape) -> float:
    """The kv heads that a layer keeps itself."""
    return 0.0 if shape.attention.keys_and_values is KeysAndValues.OF_ANOTHER_LAYER else kv_heads


BLOCKS = 2
"""Attention and MLP: each keeps its input."""
