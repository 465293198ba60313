"""Fits coefficients to measurements, and says how far predictions err on others.

What is fitted: the logarithm of measured / predicted, with a robust loss (soft L1), within the physical bounds of
`coefficients`. What is judged must never have been fitted: `parcompile calibrate` takes the two from different files or
models.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from parcompile.units import GIB

from .coefficients import MEMORY, Coefficient, CoefficientSet, Fit
from .crashes import crashed_of_memory
from .footprint import applied, footprint, is_safe, layout_class, memory_values, peak_bytes
from .measurements import Measurement
from .memory_terms import memory_terms
from .rates import time_bounds
from .step import step_seconds, step_terms, timing
from .workload import Workload

USABLE = 2.0
"""A layout is worth judging when it is at most this many times slower than the best of its group."""
OTHER_WEIGHT = 0.3
"""Weight of the residuals of slower layouts in a fit of time."""
USABLE_SHARE = (0.88, 0.93, 0.97)
"""Bounds, and the usual value, of the share of a device that a run can fill: the rest is taken by the driver's context,
communication buffers outside of the allocator, and fragments."""

OUTLIER = 0.06
"""Residuals beyond this count linearly: runs that went wrong do not pull the fit away."""

PRIOR_WEIGHT = 0.6
"""Leaving the prior by the whole width of the bounds counts like one residual of this size."""

TRANSFER = 1.04
"""Other models err more than those that were fitted: intervals are widened by this factor on both sides."""
TRANSFER_OF_TIME = 1.1
"""The same for times, which depend on sizes in more ways: the intervals of a model a third or three times as large then
cover about 90 %."""
TIE = 1.08
"""Layouts whose predictions differ by less than the mean error of a prediction cannot be told apart: the simpler one is
chosen."""

INFINIBAND: Mapping[str, float] = {"network_link": 0.8, "network_ports": 1.0, "network_scale": 0.0}
"""Prior for networks with a rail for each rank, whose rings do not slow down with the number of nodes."""

MEGATRON_KERNELS: Mapping[str, float] = {
    "matmul": 0.78,
    "launch_seconds": 1.5e-3,
    "elementwise": 2.0,
    "overlap": 0.0,
    "narrow": 40.0,
}
"""Prior for fused kernels and gradients that are reduced after the backward pass."""

Group = tuple[str, int]


def groups(rows: Sequence[Measurement]) -> dict[Group, list[Measurement]]:
    """Runs by model and number of nodes: what a search chooses among."""
    found: dict[Group, list[Measurement]] = defaultdict(list)
    for one in rows:
        found[one.model, one.work.nodes].append(one)
    return dict(found)


def usable(rows: Sequence[Measurement]) -> list[Measurement]:
    """Runs whose tokens took at most `USABLE` times as long as in the fastest run of their model on as many nodes."""
    found = []
    for members in groups([one for one in rows if one.step_seconds is not None]).values():
        seconds = [(one.step_seconds or math.inf) / one.work.tokens_per_step for one in members]
        found += [one for one, each in zip(members, seconds, strict=True) if each <= USABLE * min(seconds)]
    return found


def fit_memory(rows: Sequence[Measurement]) -> Fit:
    """Memory coefficients of the runs whose peak was measured, and the limit up to which runs did not crash.

    Raises:
        ValueError: no peak was measured.
    """
    measured = [one for one in rows if one.peak_bytes]
    if not measured:
        raise ValueError("no run has a measured peak: nothing to fit memory to")
    terms = [(one, memory_terms(one.work)) for one in measured]

    def residuals(values: Sequence[float]) -> list[float]:
        named = dict(zip(MEMORY, values, strict=True))
        return [
            peak_bytes(one.work, parts, applied(one.work, named)) / (one.peak_bytes or 1) - 1 for one, parts in terms
        ]

    values = _fitted(residuals, MEMORY)
    ratios: dict[str, list[float]] = defaultdict(list)
    for one, parts in terms:
        ratios[layout_class(one.work)].append(
            (one.peak_bytes or 0) / peak_bytes(one.work, parts, applied(one.work, values))
        )
    error = [abs(1 / ratio - 1) for members in ratios.values() for ratio in members]
    spread = {name: quantiles(members) for name, members in ratios.items()}
    for name in ("tp<=4", "tp>4"):
        spread.setdefault(name, quantiles([ratio for members in ratios.values() for ratio in members]))
    found = Fit(values, spread, len(measured), sum(error) / len(error))
    return replace(found, limit_gib=_limit(rows, found))


def fit_time(rows: Sequence[Measurement], prior: Mapping[str, float] | None = None) -> Fit:
    """Time coefficients of the runs whose step was measured; `USABLE` ones count fully.

    `prior` is what to stay near where the runs say little; left out, the start of each coefficient.

    Raises:
        ValueError: no step was measured.
    """
    measured = [one for one in rows if one.step_seconds]
    if not measured:
        raise ValueError("no run has a measured step: nothing to fit time to")
    good = set(map(id, usable(rows)))
    terms = [(one, step_terms(one.work), 1.0 if id(one) in good else OTHER_WEIGHT) for one in measured]
    table = time_bounds(measured[0].work)

    def residuals(values: Sequence[float]) -> list[float]:
        named = dict(zip(table, values, strict=True))
        return [w * math.log(step_seconds(parts, named) / (one.step_seconds or 1)) for one, parts, w in terms]

    values = _fitted(residuals, table, prior)
    ratios = [(one.step_seconds or 0) / step_seconds(parts, values) for one, parts, w in terms if w == 1]
    error = [abs(1 / ratio - 1) for ratio in ratios]
    return Fit(values, {"all": quantiles(ratios, TRANSFER_OF_TIME)}, len(measured), sum(error) / len(error))


def _fitted(
    residuals: Callable[[Sequence[float]], list[float]],
    table: Mapping[str, Coefficient],
    prior: Mapping[str, float] | None = None,
) -> dict[str, float]:
    # Only here: estimates and the search do without it.
    from scipy.optimize import least_squares

    start, low, high = ([getattr(one, part) for one in table.values()] for part in ("start", "low", "high"))
    if prior is not None:
        start = [prior[name] for name in table]

    def held(values: Sequence[float]) -> list[float]:
        pulls = [
            PRIOR_WEIGHT * (value - first) / (top - bottom)
            for value, first, bottom, top in zip(values, start, low, high, strict=True)
        ]
        return [*residuals(values), *pulls]

    width = [top - bottom for bottom, top in zip(low, high, strict=True)]
    found = least_squares(held, start, bounds=(low, high), x_scale=width, loss="soft_l1", f_scale=OUTLIER)
    return dict(zip(table, map(float, found.x), strict=True))


def quantiles(ratios: Sequence[float], transfer: float = TRANSFER) -> tuple[float, float, float]:
    """The 5 %, 50 % and 95 % quantiles of measured / predicted, the outer two widened by `transfer`."""
    ordered = sorted(ratios)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        index = int(place)
        following = ordered[min(index + 1, len(ordered) - 1)]
        return ordered[index] + (place - index) * (following - ordered[index])

    return at(0.05) / transfer, at(0.5), at(0.95) * transfer


def _limit(rows: Sequence[Measurement], found: Fit) -> float | None:
    """The limit in GiB that tells most runs from most crashes."""
    crashed = crashed_of_memory(rows)
    if not crashed:
        return None
    ran = [one for one in rows if one.peak_bytes]
    device = ran[0].work.machine.memory_bytes
    if device is None:
        return None
    sizes = {
        flag: [peak_bytes(one.work, memory_terms(one.work), memory_values(one.work, found)) for one in members]
        for flag, members in (("ran", ran), ("crashed", crashed))
    }

    def right(share: float) -> int:
        limit = share * device
        return sum(size <= limit for size in sizes["ran"]) + sum(size > limit for size in sizes["crashed"])

    low, usual, high = USABLE_SHARE
    candidates = [low + step / 100 for step in range(round(100 * (high - low)) + 1)]
    return max(candidates, key=lambda share: (right(share), -abs(share - usual))) * device / GIB


@dataclass(frozen=True, slots=True)
class Judgement:
    """How predictions compare with runs that were not fitted. Shares are between 0 and 1."""

    memory_rows: int
    memory_error: float
    memory_median: float
    memory_coverage: float
    memory_error_of_kinds: float
    """What the mean error would be if it were known of each run whether gathered inputs stay in memory."""
    fits_rows: int
    fits_share: float
    time_rows: int
    time_error: float
    time_median: float
    time_coverage: float
    regret: Mapping[Group, float]


def judge(rows: Sequence[Measurement], fitted: CoefficientSet) -> Judgement:
    """Judges both parts of a set; a part that is not fitted or not measured counts no rows."""
    memory: list[tuple[float, bool]] = []
    kinds: list[float] = []
    fits: list[bool] = []
    if fitted.memory is not None:
        for one in rows:
            if one.peak_bytes:
                kinds.append(_nearer_kind(one.work, one.peak_bytes, fitted.memory))
                found = footprint(one.work, fitted.memory)
                low, high = found.interval_bytes
                memory.append((found.peak.total_bytes / one.peak_bytes - 1, low <= one.peak_bytes <= high))
                fits.append(found.fits is not False)
        fits += [footprint(one.work, fitted.memory).fits is False for one in crashed_of_memory(rows)]
    time: list[tuple[float, bool]] = []
    if fitted.time is not None:
        for one in usable(rows):
            timed, seconds = timing(one.work, fitted.time), one.step_seconds or 0.0
            low, high = timed.interval_seconds
            time.append((timed.step.seconds / seconds - 1, low <= seconds <= high))
    return Judgement(
        *_summary(memory),
        memory_error_of_kinds=sum(kinds) / max(len(kinds), 1),
        fits_rows=len(fits) if any(one.crashed for one in rows) else 0,
        fits_share=sum(fits) / max(len(fits), 1),
        **dict(zip(("time_rows", "time_error", "time_median", "time_coverage"), _summary(time), strict=True)),  # type: ignore[arg-type]
        regret=regret(rows, fitted) if fitted.time is not None else {},
    )


def _nearer_kind(work: Workload, measured: float, fitted: Fit) -> float:
    """The error of whichever fits better: all gathered inputs kept, or none."""
    terms, values = memory_terms(work), applied(work, fitted.values)
    return min(
        abs(peak_bytes(work, terms, {**values, "gathered": share, "gathered_pipeline": share}) / measured - 1)
        for share in (0.0, 1.0)
    )


def _summary(found: Sequence[tuple[float, bool]]) -> tuple[int, float, float, float]:
    errors = sorted(abs(error) for error, _ in found)
    if not errors:
        return 0, 0.0, 0.0, 0.0
    return len(errors), sum(errors) / len(errors), errors[len(errors) // 2], sum(one for _, one in found) / len(found)


def picked(members: Sequence[Measurement], fitted: CoefficientSet) -> Measurement | None:
    """The run that the predictions choose among those that are predicted to fit; None when none is."""
    assert fitted.time is not None
    fitting = [one for one in members if fitted.memory is None or is_safe(footprint(one.work, fitted.memory))]
    seconds = {id(one): timing(one.work, fitted.time).step.seconds for one in fitting}
    if not seconds:
        return None
    close = [one for one in fitting if seconds[id(one)] <= TIE * min(seconds.values())]
    return min(close, key=lambda one: (simplicity(one.work), seconds[id(one)]))


def simplicity(work: Workload) -> tuple[int, ...]:
    """What to prefer among equals: fewer stages, sharded state, tp on its node, smaller cp and tp, even stages."""
    uneven = len({len(stage.layers) for stage in work.stages}) > 1
    far = work.tp > work.gpus_per_node
    return work.pp, int(work.zero_stage == 0), int(far), work.cp, work.tp, work.virtual_stages, int(uneven)


def regret(rows: Sequence[Measurement], fitted: CoefficientSet) -> dict[Group, float]:
    """For each model and number of nodes, the share of the best measured throughput that the choice loses.

    A choice that crashed loses all of it.
    """
    found = {}
    for key, members in sorted(groups(rows).items()):
        rates = {id(one): one.work.tokens_per_step / one.step_seconds for one in members if one.step_seconds}
        if not rates:
            continue
        choice = picked(members, fitted)
        found[key] = 1 - (rates.get(id(choice), 0.0) if choice else 0.0) / max(rates.values())
    return found
