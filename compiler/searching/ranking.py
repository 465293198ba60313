"""Ranks candidates by predicted time under the memory limit, and says of every other one why it lost.

The best is exact among those enumerated: every candidate is predicted in its fastest execution. Only predictions
are uncertain: a step counts over the probability that the layout fits, and of those within `TIE` of the fastest the
simplest is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from parcompile.cost.calibration import TIE, expected_seconds, simplicity
from parcompile.cost.coefficients import CoefficientSet, Fit
from parcompile.cost.footprint import SAFE, Footprint, footprint, is_safe
from parcompile.cost.step import StepTime, Timing, timing_of, values_of
from parcompile.units import format_bytes, format_seconds

from .executions import Execution, Known, OpenChoices, all_executions, fastest, settings
from .recomputation import between
from .remedies import Remedy, remedies
from .space import Candidate, Refused, Space, expand

Progress = Callable[[Iterable[dict[str, object]]], Iterable[dict[str, object]]]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate with its predictions. `reason` is None for the chosen one."""

    candidate: Candidate
    time: Timing
    memory: Footprint
    reason: str | None = None

    @property
    def seconds(self) -> float:
        """The predicted step."""
        return self.time.step.seconds

    @property
    def expected_seconds(self) -> float:
        """The same over the probability that it fits: what the choice goes by."""
        return expected_seconds(self.candidate.work, self.seconds, self.memory.probability)

    @property
    def peak_bytes(self) -> float:
        """The predicted peak."""
        return self.memory.peak.total_bytes

    @property
    def is_safe(self) -> bool:
        """Whether it fits with the probability that a choice asks for."""
        return is_safe(self.memory)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: `fitting` by time with the chosen one first, `too_large` by memory."""

    fitting: tuple[Ranked, ...]
    too_large: tuple[Ranked, ...]
    refused: tuple[Refused, ...]
    other_executions: tuple[tuple[Execution, str], ...] = ()
    """The other orders of the chosen layout, and the other implementations of cp, with why each lost."""
    remedies: tuple[Remedy, ...] = ()
    """What would fit, where nothing does."""

    @property
    def best(self) -> Ranked | None:
        """The chosen layout, None when nothing fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def enumerated(self) -> int:
        """Layouts that were predicted, and settings of the axes that were refused."""
        return len(self.fitting) + len(self.too_large) + len(self.refused)

    @property
    def front(self) -> tuple[Ranked, ...]:
        """Layouts that no other beats in both time and memory, the fastest first."""
        found: list[Ranked] = []
        for one in sorted(self.fitting, key=lambda one: (one.seconds, one.peak_bytes)):
            if not found or one.peak_bytes < found[-1].peak_bytes:
                found.append(one)
        return tuple(found)


def search(space: Space, progress: Progress | None = None, fitted: CoefficientSet | None = None) -> SearchResult:
    """Every layout of a space, ranked.

    `progress` passes on the settings of the axes and may count them; `fitted` are coefficients to use instead of those
    of the package.
    """
    memory, time = (fitted.memory, fitted.time) if fitted else (None, None)
    refused: list[Refused] = []
    ranked: list[Ranked] = []
    known: Known = {}
    shortest = math.inf
    for changes in progress(space.combinations) if progress else space.combinations:
        found = expand(space, changes)
        if isinstance(found, Refused):
            refused.append(found)
            continue
        start = len(ranked)
        for one in found:
            ranked.append(_predicted(one, space.choices, memory, time, known, shortest))
            if ranked[-1].is_safe:
                shortest = min(shortest, ranked[-1].seconds)
        if space.recompute is not None and space.executable:
            # Only the runtime recomputes some stages and not others.
            judged = [(one.candidate, one.is_safe) for one in ranked[start:]]
            ranked += [_predicted(one, space.choices, memory, time, known, shortest) for one in between(judged, memory)]
    sorted_out = outcome(ranked, refused)
    if sorted_out.best is None:
        smallest = sorted_out.too_large[:1]
        return replace(sorted_out, remedies=tuple(one for each in smallest for one in remedies(space, each.candidate)))
    return replace(sorted_out, other_executions=_other_executions(sorted_out.best, space.choices, time))


def _predicted(
    one: Candidate, choices: OpenChoices, memory: Fit | None, time: Fit | None, known: Known, shortest: float
) -> Ranked:
    """A layout in its fastest execution; in the default order of the axes, where no order lets it win.

    That is so where it does not fit, and where what no order changes takes longer than layouts that are as good as the
    shortest step so far.
    """
    values, size = values_of(one.work, time), footprint(one.work, memory)
    execution = fastest(one.work, replace(choices, orders=False), values, known)
    if choices.orders and is_safe(size) and _fixed_seconds(execution.step) <= TIE * shortest:
        execution = fastest(one.work, choices, values, known)
    timed = timing_of(execution.work, execution.step, time, execution.terms, execution.context)
    chosen = Candidate({**one.changes, **settings(execution.work, choices)}, execution.work)
    return Ranked(chosen, timed, size)


def _fixed_seconds(step: StepTime) -> float:
    """What is the same in every order: tp is the innermost axis of all."""
    return step.compute + step.tensor + step.optimizer


def _other_executions(best: Ranked, choices: OpenChoices, time: Fit | None) -> tuple[tuple[Execution, str], ...]:
    work, ours = best.candidate.work, best.time.step
    here = (work.order, work.context)
    others = all_executions(work, choices, values_of(work, time))
    return tuple(
        (one, _slower(one.step, ours) or f"{_tied(one.step, ours)}; the chosen one is simpler")
        for one in others
        if (one.work.order, one.work.context) != here
    )


def outcome(ranked: Sequence[Ranked], refused: Sequence[Refused]) -> SearchResult:
    """Sorts what was predicted, and gives every loser its reason."""
    safe = sorted((one for one in ranked if one.is_safe), key=lambda one: (one.seconds, one.candidate.name))
    tight = sorted((one for one in ranked if not one.is_safe), key=lambda one: (one.peak_bytes, one.candidate.name))
    if safe:
        least = min(one.expected_seconds for one in safe)
        close = [one for one in safe if one.expected_seconds <= TIE * least]
        best = min(close, key=lambda one: (simplicity(one.candidate.work), one.seconds, one.peak_bytes))
        safe = [best, *(_lost(one, best) for one in safe if one is not best)]
    return SearchResult(tuple(safe), tuple(_unsafe(one) for one in tight), tuple(refused))


def _lost(one: Ranked, best: Ranked) -> Ranked:
    reason = _slower(one.time.step, best.time.step)
    if reason is not None:
        return replace(one, reason=reason)
    if TIE * one.seconds < best.seconds:
        gain, chance = 1 - one.seconds / best.seconds, one.memory.probability or 0.0
        return replace(one, reason=f"{gain:.1%} faster, but fits with probability {chance:.0%} only")
    tied = _tied(one.time.step, best.time.step)
    if one.peak_bytes > 1.005 * best.peak_bytes:
        return replace(one, reason=f"{tied}; uses {format_bytes(one.peak_bytes)}, not {format_bytes(best.peak_bytes)}")
    return replace(one, reason=f"{tied}; the chosen layout is simpler")


def _tied(step: StepTime, best: StepTime) -> str:
    gain = 1 - step.seconds / best.seconds
    return "tied" if gain < 0.0005 else f"tied: {gain:.1%} faster, and predictions err by {TIE - 1:.0%}"


def _slower(step: StepTime, best: StepTime) -> str | None:
    """By how much a step is slower than the best one, and through which component; None when it is not slower."""
    ratio = step.seconds / best.seconds
    if ratio < 1.0005:
        return None
    theirs, ours = step.parts, best.parts
    part = max(theirs, key=lambda name: theirs[name] - ours[name])
    difference = theirs[part] - ours[part]
    return f"{ratio - 1:.1%} slower, mostly because of {part} (+{format_seconds(difference)})"


def _unsafe(one: Ranked) -> Ranked:
    peak, limit = one.memory.peak, one.memory.limit_bytes or 0.0
    chance = one.memory.probability or 0.0
    reason = (
        f"memory: {format_bytes(peak.total_bytes)} of {format_bytes(limit)} usable on rank {peak.rank}, mostly "
        f"{peak.largest}; fits with probability {chance:.0%} < {SAFE:.0%}"
    )
    return replace(one, reason=reason)
