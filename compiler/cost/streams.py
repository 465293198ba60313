"""What hyper-connections cost: every block reads all residual streams of a token and writes to all of them.

A mixture takes the streams side by side, in fp32, for as many numbers as it needs: one for each stream to read it, and
one to write it (transformers models/hy_v4/modeling_hy_v4.py: HYV4HyperConnection, HYV4HyperHead). Where it mixes the
streams with one another too, one for each pair of them, which it makes doubly stochastic step by step, and it norms the
streams first (models/deepseek_v4/modeling_deepseek_v4.py: DeepseekV4HyperConnection). Where it gates every feature of
all streams, by way of a few, it norms them in fp32 and works on in their type (models/qwen4_exp/modeling_qwen4_exp.py:
Qwen4ExpTextGatedResidual).
"""

from __future__ import annotations

from parcompile.layout.stages import Stage
from parcompile.model.shape import ModelShape
from parcompile.model.type_traits import types_with

from .workload import Workload

FP32_BYTES = 4
MEANS = types_with("mean_of_streams")
"""Model types whose last hidden state is the mean of the streams: no mixture reads them behind the last layer."""
MIXTURES = 2
"""Of a layer: in front of attention and of the MLP."""
NUMBERS = 8
"""Of a stream of a token that a mixture keeps: logits of both kinds, scaled, and behind the sigmoid."""


def mixture_parameters(shape: ModelShape) -> int:
    """Parameters of a layer's mixtures that multiply each token."""
    if shape.mixture_rank:
        return MIXTURES * (head_parameters(shape) + shape.hyper_streams**2 * shape.hidden_size)
    pairs = shape.hyper_streams if shape.square_mixtures else 0
    return MIXTURES * (2 + pairs) * shape.hyper_streams**2 * shape.hidden_size


def head_parameters(shape: ModelShape) -> int:
    """Those of the mixture behind the last layer, which reads only."""
    if shape.mixture_rank:
        return 2 * shape.mixture_rank * shape.hyper_streams * shape.hidden_size
    return 0 if shape.model_type in MEANS else shape.hyper_streams**2 * shape.hidden_size


def mixture_bytes(shape: ModelShape, element_bytes: float) -> float:
    """What a layer's mixtures keep of a token: the streams, what each block adds to them in fp32, and their numbers."""
    if not shape.hyper_streams:
        return 0.0
    numbers = NUMBERS * FP32_BYTES * shape.hyper_streams
    if shape.square_mixtures:
        # Each time what is normalised, by rows or by columns, and its sums; before it a softmax and its logits.
        pairs = shape.hyper_streams**2
        numbers += FP32_BYTES * (2 * shape.square_mixtures * (pairs + shape.hyper_streams) + 2 * pairs)
    return MIXTURES * (_streams(shape, element_bytes) + added_bytes(shape, element_bytes) + numbers)


def added_bytes(shape: ModelShape, element_bytes: float) -> float:
    """What a block gives for a token as it is added to the streams: in their type where these are mixed, else fp32."""
    width = element_bytes if shape.square_mixtures or shape.mixture_rank else FP32_BYTES
    return float(width * shape.hidden_size) if shape.hyper_streams else 0.0


def head_bytes(work: Workload, stage: Stage) -> float:
    """What the mixture behind the last layer keeps of a micro-batch.

    With full recomputation it is gone when the largest layer is computed again.
    """
    none = not work.shape.hyper_streams or work.shape.model_type in MEANS
    if none or not stage.has_head or work.recomputes_layers:
        return 0.0
    share = work.tp if work.sequence_parallel else 1
    return work.split_tokens * _streams(work.shape, work.element_bytes) / share


def _streams(shape: ModelShape, element_bytes: float) -> float:
    """All streams of a token, their copy in fp32, where they are not, and what a norm makes of them.

    With gates of all features: the streams and what a norm makes of them in fp32, times its weight, and the gates.
    """
    if shape.mixture_rank:
        kept = shape.hyper_streams * shape.hidden_size * (2 * FP32_BYTES + 2 * element_bytes)
        return kept + 2 * element_bytes * shape.mixture_rank
    copied = FP32_BYTES if element_bytes < FP32_BYTES else 0
    copied += FP32_BYTES if shape.square_mixtures else 0
    return shape.hyper_streams * shape.hidden_size * (element_bytes + copied)
