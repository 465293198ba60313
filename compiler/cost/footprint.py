"""The peak memory of each stage's ranks, by component, with an interval and the probability that it fits.

Static parts are exact for DeepSpeed's ZeRO-1 engine (`memory.static_memory`); activations follow `activations`, scaled
by coefficients that were fitted to measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parcompile.layout.groups import Axis
from parcompile.units import GIB, MIB

from .coefficients import FUSED, KEEPING, Fit, default_memory
from .memory_terms import StageTerms, memory_terms
from .workload import FRAMEWORKS, RankPlace, Workload

COUNTED = {
    "attention": 1.0,
    "mlp": 1.0,
    "logits_kept": 0.0,
    "weights_extra": 0.0,
    "unsharded_extra": 0.0,
    **dict.fromkeys(KEEPING, 1.0),
}
"""For the runtime, whose memory is counted and not fitted: of the coefficients only the framework's base is left."""


SAFE = 0.9
"""A layout is chosen when it fits with at least this probability; below it, a spec is warned of."""
HOPELESS = 0.05
"""Below this probability a layout is refused."""
EVEN = 0.5
WIDE_NODES, WIDE_TP = 64, 16


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
class Peak:
    """The peak of one kind of run in bytes, with its 90 % interval."""

    share: float
    size: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a layout: every stage, the interval of the fullest one, and whether it fits."""

    stages: tuple[RankMemory, ...]
    interval_bytes: tuple[float, float]
    limit_bytes: float | None
    probability: float | None
    kinds: tuple[Peak, ...] = ()
    """The peak of each kind of run, where a framework has several."""

    def within(self, limit: float) -> float:
        """The probability that the peak stays within `limit`."""
        return _within(self.kinds, limit)

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
        """Whether the peak is rather within the limit than above it; None where no limit is known."""
        return None if self.probability is None else self.probability >= EVEN


class Kind(NamedTuple):
    """One of the ways in which a framework may run a layout, and how likely it is."""

    share: float
    keeps: bool
    """Whether block inputs that were gathered over tp stay in memory until the backward pass."""


def kinds(work: Workload, values: Mapping[str, float]) -> tuple[Kind, ...]:
    """The kinds of runs of a layout, the likelier first."""
    # What is known of a framework holds of whole block inputs too, which are not gathered.
    told = work.sequence_parallel or not FRAMEWORKS[work.framework].varies
    share = values[keeping_class(work)] if told else 0.0
    found = (Kind(share, keeps=True), Kind(1 - share, keeps=False))
    return tuple(sorted((one for one in found if one.share > 0), key=lambda one: -one.share))


def keeping_class(work: Workload) -> str:
    """The name in `KEEPING` under which layouts like this one are counted."""
    if work.pp == 1:
        return "keeps_wide" if work.nodes >= WIDE_NODES and work.tp <= WIDE_TP else "keeps"
    if work.nodes >= WIDE_NODES or work.tp > WIDE_TP:
        return "keeps_wide_pipeline"
    return "keeps_pair" if work.pp == 2 else "keeps_pipeline"


def _kept_share(work: Workload, *, keeps: bool) -> float:
    """The share of gathered block inputs that is in memory: runs of nanotron with three stages and more keep half.

    That is measured, of both models and of 4 to 16 stages; two blocks of a layer gather, so one of them keeps.
    """
    half = FRAMEWORKS[work.framework].varies and work.pp > 2
    return keeps * (0.5 if half else 1.0)


def stage_components(
    work: Workload, terms: StageTerms, values: Mapping[str, float], *, keeps: bool
) -> dict[str, float]:
    """The components of one stage in bytes."""
    extra = values["weights_extra"] if work.zero_stage >= 1 else values["unsharded_extra"]
    repeated = values["logits_kept"] if work.micro_batches > 1 else 0.0
    activations = terms.stream + values["attention"] * terms.attention + values["mlp"] * terms.mlp
    activations += _kept_share(work, keeps=keeps) * terms.gathered
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
        **({"gathered weights": terms.gathered_weights} if terms.gathered_weights else {}),
    }


def peak_bytes(work: Workload, terms: Sequence[StageTerms], values: Mapping[str, float], *, keeps: bool) -> float:
    """The fullest stage in bytes: what a fit compares with a measurement."""
    extra = values["weights_extra"] if work.zero_stage >= 1 else values["unsharded_extra"]
    logit = values["logits"] + (values["logits_kept"] if work.micro_batches > 1 else 0.0)
    attention, mlp, kept = values["attention"], values["mlp"], _kept_share(work, keeps=keeps)
    best = 0.0
    for one in terms:
        total = one.weights + one.gradients + one.master + one.optimizer + one.bucket + extra * one.parameters
        taken = one.stream + attention * one.attention + mlp * one.mlp + kept * one.gathered
        taken += logit * one.logit_elements + one.waiting_logits
        total += max(taken, one.optimizer_step) + one.exchange + one.gathered_weights
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


def footprint(
    work: Workload, fit: Fit | None = None, *, fullest: bool = False, place: RankPlace | None = None
) -> Footprint:
    """The memory of a layout; with `fullest`, without stages that hold less than others for sure.

    A stage is its fullest rank, or that of a place.

    Raises:
        ValueError: the layout cannot be cut, or the accelerator is unknown.
    """
    fitted = fit or default_memory()
    values = memory_values(work, fit)
    stride, terms = work.stride(Axis.PP), memory_terms(work, fullest=fullest, place=place)
    mixed = [
        (
            kind.share,
            tuple(
                RankMemory(one.stage, one.stage * stride, stage_components(work, one, values, keeps=kind.keeps))
                for one in terms
            ),
        )
        for kind in kinds(work, values)
    ]
    peaks = tuple(Peak(share, *_of_fullest(work, stages, fitted)) for share, stages in mixed)
    stages = mixed[_likely(peaks)][1]
    interval = _interval(peaks)
    device = work.machine.memory_bytes
    if device is None or not work.names_machine:
        return Footprint(stages, interval, None, None, peaks)
    limit = usable_bytes(device, fitted)
    return Footprint(stages, interval, limit, _within(peaks, limit), peaks)


def _of_fullest(work: Workload, stages: Sequence[RankMemory], fit: Fit) -> tuple[float, tuple[float, float]]:
    fullest = max(stages, key=lambda one: one.total_bytes)
    return fullest.total_bytes, stage_interval(work, fullest, fit)


def _likely(peaks: Sequence[Peak]) -> int:
    """The kind to predict: that with the least expected error, relative to what is then measured."""

    def expected(index: int) -> float:
        return sum(one.share * abs(peaks[index].size / one.size - 1) for one in peaks)

    return min(range(len(peaks)), key=expected)


def _within(peaks: Sequence[Peak], limit: float) -> float:
    """The probability that the peak, of whichever kind, stays within `limit`."""
    return sum(one.share * fit_probability(one.size, one.interval, limit) for one in peaks)


def _interval(peaks: Sequence[Peak]) -> tuple[float, float]:
    """The 90 % interval over all kinds."""
    if len(peaks) == 1:
        return peaks[0].interval
    low, high = min(one.interval[0] for one in peaks), max(one.interval[1] for one in peaks)
    return _quantile(peaks, 0.05, low / 2, high), _quantile(peaks, 0.95, low, high * 2)


def _quantile(peaks: Sequence[Peak], share: float, low: float, high: float) -> float:
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _within(peaks, middle) < share else (low, middle)
    return math.sqrt(low * high)


HALVINGS = 24
"""Of the range in which a quantile is looked for."""


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
