"""The peak memory of each stage's ranks, by component, with an interval and the probability that it fits.

Static parts are exact for DeepSpeed's ZeRO-1 engine (`memory.static_memory`); activations follow `activations`, scaled
by coefficients that were fitted to measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parcompile.layout.grid import Axis
from parcompile.units import GIB, MIB

from .coefficients import FUSED, Fit, default_memory
from .memory_terms import StageTerms, memory_terms
from .workload import FRAMEWORKS, Workload

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


SAFE = 0.9
"""A layout is chosen when it fits with at least this probability; below it, a spec is warned of."""
HOPELESS = 0.05
"""Below this probability a layout is refused."""


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
    def static_bytes(self) -> float:
        """What the rank that holds most holds for the whole run; another one than the fullest may."""
        return max(one.static_bytes for one in self.stages)

    @property
    def fits(self) -> bool | None:
        """Whether the prediction is within the limit; None where no limit is known."""
        return None if self.limit_bytes is None else self.peak.total_bytes <= self.limit_bytes


def stage_components(work: Workload, terms: StageTerms, values: Mapping[str, float]) -> dict[str, float]:
    """The components of one stage in bytes."""
    extra = values["weights_extra"] if work.zero_stage >= 1 else values["unsharded_extra"]
    kept = values["gathered"] if work.pp == 1 else values["gathered_pipeline"]
    repeated = values["logits_kept"] if work.micro_batches > 1 else 0.0
    activations = terms.stream + values["attention"] * terms.attention + values["mlp"] * terms.mlp
    activations += kept * terms.gathered
    logits = (values["logits"] + repeated) * terms.logit_elements + terms.waiting_logits
    return {
        "weights": terms.weights,
        "gradients": terms.gradients,
        "master weights": terms.master,
        "optimizer state": terms.optimizer,
        "reduce bucket": terms.bucket,
        "activations": activations,
        "logits": logits,
        # Activations are gone by then: what it takes more than they did.
        "optimizer step": max(0.0, terms.optimizer_step - activations - logits),
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
        taken = one.stream + attention * one.attention + mlp * one.mlp + kept * one.gathered
        taken += logit * one.logit_elements + one.waiting_logits
        total += max(taken, one.optimizer_step) + one.exchange
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
    stride = work.stride(Axis.PP)
    stages = tuple(
        RankMemory(one.stage, one.stage * stride, stage_components(work, one, values)) for one in memory_terms(work)
    )
    fullest = max(stages, key=lambda one: one.total_bytes)
    peak, interval = fullest.total_bytes, stage_interval(work, fullest, fitted)
    device = work.machine.memory_bytes
    if device is None or not work.names_machine:
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
CONTEXT_BYTES = 0.5 * GIB
"""Memory that CUDA takes before anything is allocated: 0.3 to 0.5 GiB, as nvidia-smi shows of an empty process."""


def is_safe(found: Footprint) -> bool:
    """Whether a layout fits with the probability that a choice asks for."""
    return found.probability is None or found.probability >= SAFE


def usable_bytes(device_bytes: int, fit: Fit) -> float:
    """What a run can fill before it crashes: the measured limit of H100s, and its reserve on other accelerators.

    The reserve is a context of fixed size, and what fragments, which grows with the memory in use: on smaller devices
    by their share of an H100, on larger ones no further, since buffers of communication and blocks of the allocator
    have sizes of their own.
    """
    if fit.limit_gib is None:
        return 0.94 * device_bytes
    reserve = H100_MIB * MIB - fit.limit_gib * GIB
    share = min(1.0, device_bytes / (H100_MIB * MIB))
    return max(0.0, device_bytes - CONTEXT_BYTES - (reserve - CONTEXT_BYTES) * share)


def fit_probability(peak: float, interval: tuple[float, float], limit: float) -> float:
    """The probability that the peak stays within `limit`, log-normal with the given 90 % interval."""
    if limit <= 0:
        return 0.0
    low, high = interval
    side = math.log(high / peak) if limit >= peak else math.log(peak / low)
    sigma = max(side / 1.645, 1e-3)
    return 0.5 * (1 + math.erf(math.log(limit / peak) / sigma / math.sqrt(2)))
