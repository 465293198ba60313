"""Bytes that the forward pass keeps for the backward pass.

`layer_bytes` gives the forms for fused attention, grouped heads, gated MLPs, latent attention and experts;
`eager_layer_bytes` what transformers' modules keep in the runtime, of types whose layers were not read (`kept.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, cast

from parcompile.model.blocks.latent import MlaShape
from parcompile.model.compressed_keys import LowRank
from parcompile.model.families import family_of
from parcompile.model.family import Norm, by_type, types_with
from parcompile.model.layers import KeysAndValues
from parcompile.model.shape import ModelShape

from .blocks import mixture_bytes
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


@_mean_of_kinds
def eager_layer_bytes(
    shape: ModelShape,
    *,
    tp: int,
    sequence_parallel: bool,
    element_bytes: int = 2,
    moe: bool = False,
    row_copies: float = ROW_COPIES,
) -> LayerBytes:
    """What one layer of the runtime keeps for each token: transformers' own modules around the parallel layers.

    An RMSNorm keeps its input in fp32 and, mostly in the type of the weights, the normalised input; a LayerNorm keeps
    its input. Queries and keys are kept after the rotation only, attention also its log-sum-exp. A gated MLP keeps both
    projections, the activation's output and the product; functions that transformers writes out keep more
    (`model/family.py`). The inputs of the two blocks are kept whole, gathered under sequence parallelism.
    `parcompile preflight` compares this with what is really kept.
    """
    width, h = float(element_bytes), shape.hidden_size
    family = family_of(shape.model_type)
    rms = family.norm is Norm.WEIGHT and not shape.norms.bias
    normed = NORMED_BYTES.get(shape.model_type, width)
    stream = shape.norms.per_layer * h * (4 + normed if rms else width)
    if shape.norms.gate:  # what the gate multiplies, and the gate in fp32
        stream += shape.norms.per_layer * (h * (width + 4) + 2 * width * shape.norms.gate)
    if shape.layer_inputs is not None:
        # What goes into the gate, and a norm behind it; the part, its gate before and behind the activation, and their
        # product.
        stream += h * (width + 4 + normed) + 4 * width * shape.layer_inputs.width
    stream += sum(one.stream_bytes(h, width, normed) for one in shape.parts)
    if shape.model_type in GATED_RESIDUALS:
        # A norm without a weight, and what two gates weight: in 16 bits both addends, else norms keep one of them.
        stream += 12 * h
    stream += mixture_bytes(shape, width)
    heads, kv_heads = shape.num_attention_heads / tp, _own(_kv_heads(shape, tp), shape)
    if isinstance(mla := shape.attention.projections, MlaShape):
        # Values are a view of what their projection gives, which has keys beside them; keys are copied on.
        attention = width * heads * (2 * mla.key_dim + mla.qk_nope_head_dim + 2 * mla.v_head_dim)
        # What is compressed passes a norm: in fp32, normalised, and weighted.
        attention += (4 + normed + width) * ((mla.q_lora_rank or 0) + mla.kv_lora_rank)
    elif shape.heads.low_rank is not None:
        attention = _low_rank_bytes(shape, shape.heads.low_rank, tp, width)
    else:
        attention = width * (heads + kv_heads) * (shape.head_dim + shape.value_dim)
    if shape.heads.qk_norm:
        attention += (4 + normed) * (heads + kv_heads) * shape.head_dim
    attention += 4 * shape.heads.weightless_qk_norm_share * (heads + kv_heads) * shape.head_dim
    if shape.model_type in VALUE_NORMS:
        attention += 4 * kv_heads * shape.value_dim
    attention += 4 * heads
    if shape.model_type in GATED_RESIDUALS:  # the norm of what attention gives
        attention += 4 * heads * shape.value_dim
    if shape.heads.gate:
        # What the gate multiplies is kept, and the product; of a gate for each feature its values too.
        attention += width * heads * shape.value_dim * (2 if shape.heads.gate > 1 else 1)
    kept = (4.0 if shape.mlp.gated else 2.0) + shape.mlp.activation_numbers
    if shape.model_type in FP32_MLPS:
        kept = 1 + 3 * 4 / width  # both projections and the activation's output in fp32
    if moe and shape.moe is not None:
        experts, chosen = shape.moe, shape.moe.num_experts_per_token
        # Each token is copied for each of its experts, there and back; the router's scores are kept in fp32.
        mlp = width * (kept * chosen * experts.intermediate_size / tp + row_copies * chosen * shape.expert_features)
        mlp += 4.0 * experts.num_choices
        if shape.model_type in FP32_ROUTERS and width < 4:
            mlp += 4 * h  # what goes into the router
        if experts.taken_size is not None:
            # Norms of what experts take and of what each gives, in fp32; their sum.
            mlp += (8 * (1 + chosen) + width) * experts.taken_size
        mlp += width * CLAMPED.get(shape.model_type, 0) * chosen * experts.intermediate_size / tp
        mlp += width * (kept + 2 * (shape.model_type in CLAMPED_SHARED)) * experts.shared_intermediate_size / tp
        if family.experts is not None and family.experts.beside_mlp:
            # Their own norms, the norm of the router's input, that input before and behind its scale, and the experts'.
            mlp += len(family.experts.norms) * h * (4 + normed) + 4 * h + 3 * width * h
    else:
        mlp = width * (kept + 2 * (shape.model_type in CLAMPED_DENSE)) * shape.intermediate_size / tp
    return LayerBytes(stream / tp if sequence_parallel else stream, attention, mlp, width * shape.blocks_per_layer * h)


def _low_rank_bytes(shape: ModelShape, low: LowRank, tp: int, width: float) -> float:
    """What attention of queries and outputs through fewer features keeps for each token, without its log-sum-exp.

    Norms multiply in fp32: they keep what goes in and what they make of it. The norm of queries has no weight, and
    keeps what goes in as it is and in fp32. Keys are values. A compressor weights what tokens give by a softmax in
    fp32, which it keeps beside that in the type of the weights, and norms keys, each of which stands for many tokens.
    """
    cast = 4 if width < 4 else 0
    wide = shape.num_attention_heads / tp * shape.head_dim
    kept = (8 + width) * low.query_rank + 2 * wide * width + wide * cast  # queries before and behind rotation
    kept += 2 * width * wide + width * low.output_groups * low.output_rank / tp
    kept += (8 + width) * shape.head_dim
    if (keys := shape.attention.compressed) is not None:
        kept += keys.series * shape.head_dim * (width + 4 + (width if cast else 0))
        kept += (8 + 2 * width) * shape.head_dim / keys.rate
    return kept


def _kv_heads(shape: ModelShape, tp: int) -> float:
    """Of a rank: one at least, where layers attend."""
    return max(shape.num_key_value_heads / tp, 1.0) if shape.attends else 0.0


def _own(kv_heads: float, shape: ModelShape) -> float:
    """The kv heads that a layer keeps itself."""
    return 0.0 if shape.attention.keys_and_values is KeysAndValues.OF_ANOTHER_LAYER else kv_heads


NORMED_BYTES: Mapping[str, int] = by_type("normed_bytes")
"""Bytes of each feature that norms of model types keep beside their input in fp32; elsewhere a number of the weights'.

4: an RMSNorm multiplies by its weight in fp32. 8: a norm takes the mean away first, which it computes twice.
"""
GATED_RESIDUALS = types_with("gated_residuals")
"""Model types whose layers weight both addends of a residual connection, and norm what attention gives."""
FP32_MLPS = types_with("fp32_mlps")
"""Model types that activate and gate in fp32, in dense MLPs and experts."""
FP32_ROUTERS = types_with("fp32_routers")
"""Model types whose routers take hidden states in fp32, and keep them so."""
VALUE_NORMS = types_with("value_norms")
"""Model types that norm values too, by a norm without a weight, which keeps them in fp32."""
CLAMPED = by_type("clamped_experts")
"""Numbers that experts of model types keep more of each feature: they clamp both halves of the first projection, and
keep them before and behind that; gpt_oss keeps its sigmoid too."""
CLAMPED_SHARED = types_with("clamped_shared_expert")
"""Those whose shared expert does so too."""
CLAMPED_DENSE = types_with("clamped_mlps")
"""Those whose dense MLPs do."""
BLOCKS = 2
"""Attention and MLP: each keeps its input."""
