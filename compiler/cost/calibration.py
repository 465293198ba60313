"""Fits coefficients to measurements, and says how far predictions err on others.

What is fitted: the logarithm of measured / predicted, with a robust loss (soft L1), within the physical bounds of
`coefficients`. What is judged must never have been fitted: `parcompile calibrate` takes the two from different files or
models.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from parcompile.model.derived_rows import parameter_table
from parcompile.units import GIB

from .coefficients import KEEPING, MEMORY, Coefficient, CoefficientSet, Fit, time_bounds
from .footprint import EVEN, SAFE, applied, footprint, is_safe, keeping_class, layout_class, peak_bytes
from .measurements import Measurement, crashed_of_memory
from .memory_terms import StageTerms, memory_terms
from .step import TRANSFER_OF_TIME, step_seconds, step_terms, timing
from .workload import FRAMEWORKS, Workload

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
OWN_PRIOR_WEIGHT = 0.2
"""The same for runs on a machine that was measured: its rates are those of large kernels, and its own runs know
better."""

TRANSFER = 1.04
"""Other models err more than those that were fitted: intervals are widened by this factor on both sides."""
LEAST_SPREAD = 1.15
"""However well a form fits the models that were measured: another one errs by as much."""
TIE = 1.08
"""Layouts whose predictions differ by less than the mean error of a prediction cannot be told apart: the simpler one is
chosen."""

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
        return [_ratio_of_kind(one, parts, named)[1] - 1 for one, parts in terms]

    values = _fitted(residuals, MEMORY)
    nearer = [(one, *_ratio_of_kind(one, parts, values)) for one, parts in terms]
    values |= _keeping(
        [(one.work, parts, keeps) for (one, parts), (_, keeps, _) in zip(terms, nearer, strict=True)], values
    )
    ratios: dict[str, list[float]] = defaultdict(list)
    for one, _, ratio in nearer:
        ratios[layout_class(one.work)].append(1 / ratio)
    error = [abs(ratio - 1) for _, _, ratio in nearer]
    spread = {name: quantiles(members) for name, members in ratios.items()}
    for name in ("tp<=4", "tp>4"):
        spread.setdefault(name, quantiles([ratio for members in ratios.values() for ratio in members]))
    found = Fit(values, spread, len(measured), sum(error) / len(error))
    return found._replace(limit_gib=_limit(rows, found))


def _ratio_of_kind(one: Measurement, parts: Sequence[StageTerms], values: Mapping[str, float]) -> tuple[bool, float]:
    """Which kind of run a measurement is nearer to, keeping gathered inputs or not, and predicted / measured then."""
    named, measured = applied(one.work, values), one.peak_bytes or 1
    if FRAMEWORKS[one.work.framework].varies:
        found = [(keeps, peak_bytes(one.work, parts, named, keeps=keeps) / measured) for keeps in (True, False)]
        return min(found, key=lambda pair: abs(pair[1] - 1))
    return True, peak_bytes(one.work, parts, named, keeps=True) / measured


TELLING = 1.08
"""Kinds of a run that differ by less cannot be told apart by its peak."""


def _keeping(
    runs: Sequence[tuple[Workload, Sequence[StageTerms], bool]], values: Mapping[str, float]
) -> dict[str, float]:
    """How often runs of each class keep gathered inputs: by Laplace's rule, and even where no run tells."""
    counted: dict[str, list[bool]] = {name: [True, False] for name in KEEPING}
    for work, parts, keeps in runs:
        named = applied(work, values)
        more, less = (peak_bytes(work, parts, named, keeps=one) for one in (True, False))
        if more > TELLING * less:
            counted[keeping_class(work)].append(keeps)
    return {name: sum(found) / len(found) for name, found in counted.items()}


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

    own = measured[0].work.machine.measured is not None
    values = _fitted(residuals, table, prior, OWN_PRIOR_WEIGHT if own else PRIOR_WEIGHT)
    ratios = [(one.step_seconds or 0) / step_seconds(parts, values) for one, parts, w in terms if w == 1]
    error = [abs(1 / ratio - 1) for ratio in ratios]
    sizes = [parameter_table(one.work.shape).numel for one in measured]
    return Fit(
        values,
        {"all": quantiles(ratios, TRANSFER_OF_TIME)},
        len(measured),
        sum(error) / len(error),
        sizes=(min(sizes), max(sizes)),
    )


def _fitted(
    residuals: Callable[[Sequence[float]], list[float]],
    table: Mapping[str, Coefficient],
    prior: Mapping[str, float] | None = None,
    weight: float = PRIOR_WEIGHT,
) -> dict[str, float]:
    # Only here: estimates and the search do without it.
    from scipy.optimize import least_squares

    start, low, high = ([getattr(one, part) for one in table.values()] for part in ("start", "low", "high"))
    if prior is not None:
        start = [prior[name] for name in table]

    def held(values: Sequence[float]) -> list[float]:
        pulls = [
            weight * (value - first) / (top - bottom)
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

    return min(at(0.05) / transfer, 1 / LEAST_SPREAD), at(0.5), max(at(0.95) * transfer, LEAST_SPREAD)


def _limit(rows: Sequence[Measurement], found: Fit) -> float | None:
    """The limit in GiB that tells most runs from most crashes."""
    crashed = crashed_of_memory(rows)
    if not crashed:
        return None
    ran = [one for one in rows if one.peak_bytes]
    device = ran[0].work.machine.memory_bytes
    if device is None:
        return None
    fits = {flag: [footprint(one.work, found).within for one in rows] for flag, rows in (("ran", ran), ("no", crashed))}

    def right(share: float) -> int:
        limit = share * device
        return sum(one(limit) >= EVEN for one in fits["ran"]) + sum(one(limit) < EVEN for one in fits["no"])

    low, usual, high = USABLE_SHARE
    candidates = [low + step / 100 for step in range(round(100 * (high - low)) + 1)]
    return max(candidates, key=lambda share: (right(share), -abs(share - usual))) * device / GIB


class Judgement(NamedTuple):
    """How predictions compare with runs that were not fitted. Shares are between 0 and 1."""

    memory_rows: int
    memory_error: float
    memory_median: float
    memory_coverage: float
    memory_error_of_kinds: float
    """What the mean error would be if it were known of each run whether gathered inputs stay in memory."""
    fits_rows: int
    fits_share: float
    unsafe_share: float
    """Of these, crashes that were predicted to fit with the probability that a choice asks for (`SAFE`)."""
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
    unsafe = 0
    if fitted.memory is not None:
        for one in rows:
            if one.peak_bytes:
                kinds.append(abs(_ratio_of_kind(one, memory_terms(one.work), fitted.memory.values)[1] - 1))
                found = footprint(one.work, fitted.memory)
                low, high = found.interval_bytes
                memory.append((found.peak.total_bytes / one.peak_bytes - 1, low <= one.peak_bytes <= high))
                fits.append(found.fits is not False)
        crashed = [footprint(one.work, fitted.memory) for one in crashed_of_memory(rows)]
        fits += [one.fits is False for one in crashed]
        unsafe = sum(map(is_safe, crashed))
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
        unsafe_share=unsafe / max(len(fits), 1),
        **dict(zip(("time_rows", "time_error", "time_median", "time_coverage"), _summary(time), strict=True)),  # type: ignore[arg-type]
        regret=regret(rows, fitted) if fitted.time is not None else {},
    )


def _summary(found: Sequence[tuple[float, bool]]) -> tuple[int, float, float, float]:
    errors = sorted(abs(error) for error, _ in found)
    if not errors:
        return 0, 0.0, 0.0, 0.0
    return len(errors), sum(errors) / len(errors), errors[len(errors) // 2], sum(one for _, one in found) / len(found)


def picked(members: Sequence[Measurement], fitted: CoefficientSet) -> Measurement | None:
    """The run that the predictions choose among those that are predicted to fit; None when none is."""
    assert fitted.time is not None
    expected = {}
    for one in members:
        probability = 1.0 if fitted.memory is None else footprint(one.work, fitted.memory).probability
        if probability is None or probability >= SAFE:
            expected[id(one)] = expected_seconds(one.work, timing(one.work, fitted.time).step.seconds, probability)
    if not expected:
        return None
    close = [one for one in members if expected.get(id(one), math.inf) <= TIE * min(expected.values())]
    return min(close, key=lambda one: (simplicity(one.work), expected[id(one)]))


UNSHARDED_RISK = 0.15
"""Share of runs with ZeRO 0 over several copies that crashed although they were predicted to fit (5 % of 3B, 27 % of
1B); of ZeRO 1 it is 1 to 2 %, most of which the probability to fit knows of."""


def expected_seconds(work: Workload, seconds: float, probability: float | None) -> float:
    """What a choice goes by: the step over the probability that the layout runs at all."""
    runs = 1.0 if probability is None else probability
    return seconds / runs / (1 - UNSHARDED_RISK if work.zero_stage == 0 and work.dp > 1 else 1.0)


def simplicity(work: Workload) -> tuple[int, ...]:
    """What to prefer among equals: fewer stages, ZeRO stage 1, tp on its node, smaller cp and tp, even stages."""
    uneven = len({len(stage.layers) for stage in work.stages}) > 1
    far = work.tp > work.gpus_per_node
    return work.pp, int(work.zero_stage != 1), int(far), work.cp, work.tp, work.virtual_stages, int(uneven)


def regret(rows: Sequence[Measurement], fitted: CoefficientSet) -> dict[Group, float]:
    """For each model and number of nodes, the share of the best measured throughput that the choice loses.

    A choice that crashed loses all of it. Of several runs of a layout the best counts: what was chosen is the layout.
    """
    found = {}
    for key, members in sorted(groups(rows).items()):
        rates: dict[Workload, float] = defaultdict(float)
        for one in members:
            if one.step_seconds:
                rates[one.work] = max(rates[one.work], one.work.tokens_per_step / one.step_seconds)
        if not rates:
            continue
        choice = picked(members, fitted)
        found[key] = 1 - (rates.get(choice.work, 0.0) if choice else 0.0) / max(rates.values())
    return found
