"""The peak memory of each stage's ranks, by component, with an interval and the probability that it fits.

Static parts are exact for DeepSpeed's ZeRO-1 engine (`memory.static_memory`); activations follow `activations`, scaled
by coefficients that were fitted to measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parcompile.layout.optimizer import ADAM_STATE_BYTES, MASTER_BYTES, padded_numel
from parcompile.layout.stages import Stage

from .activations import eager_layer_bytes, layer_bytes
from .coefficients import FUSED, Fit, default_memory
from .memory import LARGEST_BUCKET, keeps_both_gradients
from .workload import FRAMEWORKS, Workload

GIB = 1024**3

COUNTED = {
    "attention": 1.0,
    "mlp": 1.0,
    "gathered": 1.0,
    "gathered_pipeline": 1.0,
    "logits_kept": 0.0,
    "weights_extra": 0.0,
    "unsharded_extra": 0.0,
}
"""For the runtime, whose memory is counted and not fitted: of the coefficients only the framework's base is left."""
LOSS_CHUNK_ELEMENTS = 2**25
"""Logits that the loss holds in fp32 at a time, on an accelerator."""


@dataclass(frozen=True, slots=True)
class StageTerms:
    """What the coefficients multiply, for one stage, in bytes (parameters in elements)."""

    stage: int
    parameters: int
    weights: float
    gradients: float
    master: float
    optimizer: float
    bucket: float
    stream: float
    attention: float
    mlp: float
    gathered: float
    logit_elements: float
    waiting_logits: float
    exchange: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak bytes of the ranks of one stage; `rank` is the first of them."""

    stage: int
    rank: int
    components: Mapping[str, float]

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return sum(self.components.values())

    @property
    def largest(self) -> str:
        """The component that takes most."""
        return max(self.components, key=lambda name: self.components[name])

    @property
    def static_bytes(self) -> float:
        """What is held for the whole run."""
        return sum(self.components[name] for name in STATIC)


STATIC = ("weights", "gradients", "master weights", "optimizer state", "reduce bucket")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a layout: every stage, the interval of the fullest one, and whether it fits."""

    stages: tuple[RankMemory, ...]
    interval_bytes: tuple[float, float]
    limit_bytes: float | None
    probability: float | None

    @property
    def peak(self) -> RankMemory:
        """The fullest stage."""
        return max(self.stages, key=lambda one: one.total_bytes)

    @property
    def fits(self) -> bool:
        """Whether the prediction is within the limit; always, where no limit is known."""
        return self.limit_bytes is None or self.peak.total_bytes <= self.limit_bytes


def memory_terms(work: Workload) -> list[StageTerms]:
    """The terms of every stage.

    Raises:
        ValueError: the layout cannot be cut.
    """
    stages = work.stages
    numels = [work.stage_parameters(stage) for stage in stages]
    both = keeps_both_gradients(work.framework, work.element_bytes, work.gradient_bytes, work.zero_stage)
    bucket = min(LARGEST_BUCKET, max(numels)) if work.framework == "deepspeed" and not both else 0
    moe_from = work.shape.moe.first_moe_layer if work.shape.moe else work.shape.num_hidden_layers
    form = eager_layer_bytes if work.framework == "deepspeed" else layer_bytes
    dense, sparse = (
        form(
            work.shape,
            tp=work.tp,
            sequence_parallel=work.sequence_parallel,
            element_bytes=work.element_bytes,
            moe=routed,
        )
        for routed in (False, work.shape.moe is not None)
    )
    found = []
    for index, (stage, numel) in enumerate(zip(stages, numels, strict=True)):
        held = work.in_flight(index)
        tokens = work.local_tokens
        dense_layers = len(range(stage.layers.start, min(stage.layers.stop, moe_from)))
        moe_layers = len(stage.layers) - dense_layers
        kept = {
            part: (dense_layers * getattr(dense, part) + moe_layers * getattr(sparse, part)) * tokens * held
            for part in ("stream", "attention", "mlp", "gathered")
        }
        kept["stream"] *= work.split_tokens / tokens
        if work.recompute == "full":
            # Each layer's input is kept; one layer at a time is recomputed whole.
            one = sparse if moe_layers else dense
            layers = bool(stage.layers)
            kept = {part: getattr(one, part) * tokens * layers for part in kept}
            share = work.tp if work.sequence_parallel else 1
            inputs = work.shape.hidden_size * work.element_bytes / share
            kept["stream"] += len(stage.layers) * inputs * work.split_tokens * held
            if work.framework == "deepspeed" and layers:
                kept["attention"] += len(stage.layers) * _kept_attention(work) * tokens * held
                kept["mlp"] += _recomputed_in_flight_bytes(work)
        logits = tokens * work.padded_vocabulary / work.tp if stage.has_head else 0.0
        if work.framework == "deepspeed":
            layer = (sparse if moe_layers else dense).total * tokens + _recomputed_in_flight_bytes(work)
            kept["stream"] += _ends_bytes(work, stage, logits, recomputed_layer=layer if stage.layers else 0.0)
        exchange = tokens * work.shape.hidden_size * work.element_bytes * held if work.pp > 1 else 0.0
        found.append(
            StageTerms(
                index,
                numel,
                *_static(work, numel),
                bucket * work.element_bytes,
                kept["stream"],
                kept["attention"],
                kept["mlp"],
                kept["gathered"],
                logits,
                logits * work.element_bytes * max(held - 1, 0) + _loss_chunk_bytes(work, logits),
                exchange,
            )
        )
    return found


def _recomputed_in_flight_bytes(work: Workload) -> float:
    """Gradients of activations and of one weight while the MLP of a recomputed layer runs backward."""
    h, width = work.shape.hidden_size, work.shape.intermediate_size / work.tp
    return work.element_bytes * (work.local_tokens * (h + 2 * width) + h * width)


def _ends_bytes(work: Workload, stage: Stage, logits: float, recomputed_layer: float) -> float:
    """What the two ends of a forward add in the runtime: the head's inputs, and the first gradients of backward.

    Logits with their gradient, what the head's backward holds (the gradients of logits, weight and input; under
    sequence parallelism the gathered input and its gradient, each twice while they are laid out anew), the gradients in
    front of the last norm (two in the type of the weights and three in fp32), and with full recomputation a layer do
    not stand in memory together: the largest counts. Logits and layers are counted elsewhere, so what is returned may
    be negative.
    """
    width, hidden = work.element_bytes, work.local_tokens * work.shape.hidden_size
    share = work.tp if work.sequence_parallel else 1
    weight = work.shape.hidden_size * work.padded_vocabulary / work.tp
    inputs = hidden * (4 + 1 / share) if share > 1 else hidden
    backward = width * (logits + weight + inputs) if stage.has_head else 0.0
    normed = hidden * (4 + 2 * width) / share if stage.has_head else 0.0
    head = 2 * width * logits + _loss_chunk_bytes(work, logits)
    if work.recompute == "full":
        # The last norm goes with the logits.
        return normed - min(recomputed_layer, head + normed)
    return normed + max(0.0, backward - head, hidden * (2 * width + 3 * 4) / share - head)


def _kept_attention(work: Workload) -> float:
    """Output and log-sum-exp for each token, which recomputation does not compute again."""
    width = work.shape.head_dim if work.shape.mla is None else work.shape.mla.v_head_dim
    return work.shape.num_attention_heads / work.tp * (width * work.element_bytes + 4)


def _loss_chunk_bytes(work: Workload, logits: float) -> float:
    return 4 * min(logits, LOSS_CHUNK_ELEMENTS) if work.framework == "deepspeed" else 0.0


def _static(work: Workload, numel: int) -> tuple[float, float, float, float]:
    """Weights, gradients, master weights and optimizer state in bytes."""
    shards = work.shards if work.zero_stage >= 1 else 1
    padded = padded_numel(numel, shards) if work.framework == "deepspeed" else numel
    weights, gradients = padded * work.element_bytes, numel * work.gradient_bytes
    if keeps_both_gradients(work.framework, work.element_bytes, work.gradient_bytes, work.zero_stage):
        gradients = padded * work.gradient_bytes + numel * work.element_bytes
    shard = padded / shards
    return (
        weights / (work.shards if work.zero_stage >= 3 else 1),
        gradients / (work.shards if work.zero_stage >= 2 else 1),
        shard * MASTER_BYTES,
        shard * ADAM_STATE_BYTES,
    )


def stage_components(work: Workload, terms: StageTerms, values: Mapping[str, float]) -> dict[str, float]:
    """The components of one stage in bytes."""
    extra = values["weights_extra"] if work.zero_stage >= 1 else values["unsharded_extra"]
    kept = values["gathered"] if work.pp == 1 else values["gathered_pipeline"]
    repeated = values["logits_kept"] if work.micro_batches > 1 else 0.0
    activations = terms.stream + values["attention"] * terms.attention + values["mlp"] * terms.mlp
    return {
        "weights": terms.weights,
        "gradients": terms.gradients,
        "master weights": terms.master,
        "optimizer state": terms.optimizer,
        "reduce bucket": terms.bucket,
        "activations": activations + kept * terms.gathered,
        "logits": (values["logits"] + repeated) * terms.logit_elements + terms.waiting_logits,
        "pipeline buffers": terms.exchange,
        "framework": values["base_gib"] * GIB + extra * terms.parameters,
    }


def peak_bytes(work: Workload, terms: Sequence[StageTerms], values: Mapping[str, float]) -> float:
    """The fullest stage in bytes: what a fit compares with a measurement."""
    extra = values["weights_extra"] if work.zero_stage >= 1 else values["unsharded_extra"]
    kept = values["gathered"] if work.pp == 1 else values["gathered_pipeline"]
    logit = values["logits"] + (values["logits_kept"] if work.micro_batches > 1 else 0.0)
    attention, mlp = values["attention"], values["mlp"]
    best = 0.0
    for one in terms:
        total = one.weights + one.gradients + one.master + one.optimizer + one.bucket + extra * one.parameters
        total += one.stream + attention * one.attention + mlp * one.mlp + kept * one.gathered
        total += logit * one.logit_elements + one.waiting_logits + one.exchange
        best = max(best, total)
    return best + values["base_gib"] * GIB


def layout_class(work: Workload) -> str:
    """The class of layouts whose errors are alike: narrow and wide tensor parallelism."""
    return "tp<=4" if work.tp <= 4 else "tp>4"


def memory_values(work: Workload, fit: Fit | None = None) -> Mapping[str, float]:
    """The coefficients that apply to a framework."""
    if FRAMEWORKS[work.framework].activations == "fused":
        return FUSED
    return applied(work, (fit or default_memory()).values)


def applied(work: Workload, values: Mapping[str, float]) -> Mapping[str, float]:
    """Fitted values as they apply to a framework."""
    if work.framework != "deepspeed":
        return values
    # Logits and their gradient, both in the type of the weights.
    return {**values, **COUNTED, "logits": 2.0 * work.element_bytes}


def footprint(work: Workload, fit: Fit | None = None) -> Footprint:
    """The memory of a layout.

    Raises:
        ValueError: the layout cannot be cut, or the accelerator is unknown.
    """
    fitted = fit or default_memory()
    values = memory_values(work, fit)
    stride = work.stride("pp")
    stages = tuple(
        RankMemory(one.stage, one.stage * stride, stage_components(work, one, values)) for one in memory_terms(work)
    )
    fullest = max(stages, key=lambda one: one.total_bytes)
    peak, interval = fullest.total_bytes, stage_interval(work, fullest, fitted)
    device = work.machine.memory_bytes
    if device is None:
        return Footprint(stages, interval, None, None)
    limit = usable_bytes(device, fitted)
    return Footprint(stages, interval, limit, fit_probability(peak, interval, limit))


def stage_interval(work: Workload, stage: RankMemory, fit: Fit | None = None) -> tuple[float, float]:
    """The 90 % interval of a stage's peak in bytes."""
    low, _, high = (fit or default_memory()).spread[layout_class(work)]
    if work.framework != "deepspeed":
        return stage.total_bytes * low, stage.total_bytes * high
    # The static part is exact: only what comes on top is uncertain.
    static, rest = stage.static_bytes, stage.total_bytes - stage.static_bytes
    return static + rest * min(low, 1.0), static + rest * max(high, 1.0)


H100_MIB = 81559


def usable_bytes(device_bytes: int, fit: Fit) -> float:
    """What a run can fill before it crashes: the measured limit, with the same reserve on other accelerators."""
    if fit.limit_gib is None:
        return 0.94 * device_bytes
    reserve = H100_MIB * 1024**2 - fit.limit_gib * GIB
    return device_bytes - reserve


def fit_probability(peak: float, interval: tuple[float, float], limit: float) -> float:
    """The probability that the peak stays within `limit`, log-normal with the given 90 % interval."""
    low, high = interval
    side = math.log(high / peak) if limit >= peak else math.log(peak / low)
    sigma = max(side / 1.645, 1e-3)
    return 0.5 * (1 + math.erf(math.log(limit / peak) / sigma / math.sqrt(2)))


def stages_of(layers: Sequence[int], *, embedding: int = 0, head: int | None = None) -> tuple[Stage, ...]:
    """Stages with these many layers; the embedding and the head stand where they are put (head: last by default)."""
    last = len(layers) - 1 if head is None else head
    found, start = [], 0
    for index, count in enumerate(layers):
        found.append(Stage(range(start, start + count), index == embedding, index == last))
        start += count
    return tuple(found)
