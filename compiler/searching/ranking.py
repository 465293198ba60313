"""Ranks candidates by predicted time under the memory limit, and says of every other one why it lost.

The best is exact among those enumerated: every candidate that fits is predicted in its fastest execution. Only
predictions are uncertain: a step counts over the probability that the layout fits, and of those within `TIE` of the
fastest the simplest is chosen.

Memory grows with the micro-batch, and full recomputation needs least. So where a layout is `FAR` above the limit, those
with larger micro-batches are above it too, and where full recomputation is, so is none: what these need is computed
when somebody asks for it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parcompile.cost.calibration import TIE, expected_seconds, simplicity
from parcompile.cost.coefficients import CoefficientSet, Fit
from parcompile.cost.executions import Execution, Known, OpenChoices, all_executions, fastest, implemented, settings
from parcompile.cost.footprint import SAFE, Footprint, footprint, is_safe
from parcompile.cost.memory import static_memory
from parcompile.cost.step import StepTerms, StepTime, Timing, timing_of, values_of
from parcompile.cost.workload import Workload
from parcompile.layout.groups import Axis
from parcompile.rules.h_memory import far_too_large
from parcompile.units import format_bytes, format_seconds

from .space import LISTED, ZERO_STAGES, Candidate, Refused, Remedy, Setting, Space, between, expand, is_open, remedies

FAR = 1.15
"""Times the limit: more than what a larger micro-batch may save by having fewer logits wait."""

Progress = Callable[[Iterable[dict[str, object]]], Iterable[dict[str, object]]]


@dataclass(frozen=True, slots=True)
class Predictor:
    """What predictions of one search share."""

    choices: OpenChoices
    memory: Fit | None = None
    time: Fit | None = None
    known: Known = field(default_factory=dict)

    def footprint(self, work: Workload) -> Footprint:
        """The memory of a layout, with the implementation of cp that it gets in the order that it has."""
        work, _ = implemented(work, self.choices, values_of(work, self.time), self.known)
        return footprint(work, self.memory, fullest=True)

    def execution(self, work: Workload, *, orders: bool, terms: StepTerms | None = None) -> Execution:
        """The fastest execution; in the default order, unless `orders`."""
        choices = self.choices if orders == self.choices.orders else replace(self.choices, orders=orders)
        return fastest(work, choices, values_of(work, self.time), self.known, terms)


@dataclass(frozen=True)
class Ranked:
    """A candidate with its predictions, each made when it is first asked for. `reason` is None for the chosen one."""

    layout: Callable[[], Candidate] = field(repr=False)
    predictor: Predictor = field(repr=False)
    orders: bool = False
    """Whether the order of the axes is chosen."""
    given: str | None = None
    """Why it lost to the chosen one."""

    @functools.cached_property
    def base(self) -> Candidate:
        """The layout before its execution is chosen."""
        return self.layout()

    @functools.cached_property
    def memory(self) -> Footprint:
        """What each stage holds."""
        return self.predictor.footprint(self.base.work)

    @functools.cached_property
    def execution(self) -> Execution:
        """How it runs fastest."""
        return self.predictor.execution(self.base.work, orders=self.orders)

    @functools.cached_property
    def candidate(self) -> Candidate:
        """The layout with its execution."""
        chosen = settings(self.execution.work, self.predictor.choices)
        return Candidate({**self.base.changes, **chosen}, self.execution.work)

    @property
    def layout_name(self) -> str:
        """Its sizes in words."""
        work = self.base.work
        sizes = " · ".join(f"{axis} {work.size(axis)}" for axis in LISTED if work.size(axis) > 1 or axis is Axis.DP)
        recomputed = {"none": "", "full": ", full recomputation"}
        more = recomputed.get(work.recompute_text, f", recomputation {work.recompute_text}")
        virtual = f", {work.virtual_stages} virtual stages" if work.virtual_stages > 1 else ""
        stage = f", ZeRO stage {work.zero_stage}" if work.zero_stage != ZERO_STAGES[0] else ""
        options = "".join(f", {name}" for name in self.base.options)
        return f"{sizes}, micro-batch {work.micro_batch} × {work.micro_batches}{virtual}{more}{stage}{options}"

    @functools.cached_property
    def time(self) -> Timing:
        """The step, with its interval."""
        one = self.execution
        return timing_of(one.work, one.step, self.predictor.time, one.terms, one.context)

    @functools.cached_property
    def reason(self) -> str | None:
        """Why it was not chosen."""
        return self.given if self.is_safe else _too_large(self.memory)

    def because(self, reason: str) -> Ranked:
        """The same with the reason why it lost; what was predicted stays."""
        found = replace(self, given=reason)
        found.__dict__.update({name: value for name, value in self.__dict__.items() if name in _PREDICTED})
        return found

    @property
    def seconds(self) -> float:
        """The predicted step."""
        return self.execution.step.seconds

    @property
    def expected_seconds(self) -> float:
        """The same over the probability that it fits: what the choice goes by."""
        return expected_seconds(self.base.work, self.seconds, self.memory.probability)

    @property
    def peak_bytes(self) -> float:
        """The predicted peak."""
        return self.memory.peak.total_bytes

    @property
    def is_safe(self) -> bool:
        """Whether it fits with the probability that a choice asks for."""
        return is_safe(self.memory)


_PREDICTED = ("base", "memory", "execution", "candidate", "time")


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


def search(
    space: Space,
    progress: Progress | None = None,
    fitted: CoefficientSet | None = None,
    *,
    wider: Space | None = None,
) -> SearchResult:
    """Every layout of a space, ranked; at ZeRO stage 3 only where none fits whose tp stays in a node.

    Where none fits at all, those of `wider` are; where none of these does, those with `OPTIONS` switched on.

    `progress` passes on the settings of the axes and may count them; `fitted` are coefficients to use instead of those
    of the package.
    """
    # Nothing that a search makes refers back to itself: looking for such rings takes a tenth of its time.
    collects = gc.isenabled()
    gc.disable()
    try:
        found = _search(space, progress, fitted)
        if found.best is not None or not found.too_large:
            return found
        least = found.too_large[0]
        for *fewer, most in [*([[wider]] if wider else []), *space.with_options]:
            result = _search(most, progress, fitted)
            if result.best is not None:
                others = (_search(one, progress, fitted) for one in fewer)
                return next((one for one in others if one.best is not None), result)
            if result.too_large and result.too_large[0].peak_bytes < least.peak_bytes:
                least = result.too_large[0]
        smaller = () if least is found.too_large[0] else (least,)
        found = replace(found, too_large=(*smaller, *found.too_large))
        return replace(found, remedies=tuple(remedies(space, least.candidate)))
    finally:
        if collects:
            gc.enable()


def _search(space: Space, progress: Progress | None, fitted: CoefficientSet | None) -> SearchResult:
    memory, time = (fitted.memory, fitted.time) if fitted else (None, None)
    predictor = Predictor(space.choices, memory, time)
    tried = _Tried()
    _try_all(space, predictor, progress, tried)
    fits = (one.base.work for one in tried.ranked if one.is_safe)
    if (last := space.at_last_stage) and not any(one.stride(Axis.TP) * one.tp <= one.gpus_per_node for one in fits):
        _try_all(last, predictor, progress, tried)
    found = outcome(tried.ranked, tried.refused)
    found = replace(found, too_large=(*found.too_large, *tried.larger))
    if found.best is None:
        return found
    return replace(found, other_executions=_other_executions(found.best, space.choices, time))


@dataclass(slots=True)
class _Tried:
    """Layouts, while a search goes on."""

    ranked: list[Ranked] = field(default_factory=list)
    larger: list[Ranked] = field(default_factory=list)
    """Those whose memory was not predicted: one that needs less is far too large."""
    refused: list[Refused] = field(default_factory=list)
    shortest: float = math.inf
    """The step of the fastest that fits."""


def _try_all(space: Space, predictor: Predictor, progress: Progress | None, tried: _Tried) -> None:
    """Adds the layouts of a space to those tried before, of which only refusals may be the same."""
    known_refusals = {_named(one.changes) for one in tried.refused}
    for changes in progress(space.combinations) if progress else space.combinations:
        found = expand(space, changes)
        if isinstance(found, Refused):
            if _named(found.changes) not in known_refusals:
                tried.refused.append(found)
            continue
        fitting: list[Ranked] = []
        for setting in _at_each_stage(space, found, predictor, fitting):
            judged = list(_judged(setting, predictor, fitting))
            tried.larger += [one for one, known in judged if not known]
            layouts = [one for one, known in judged if known]
            if space.recompute is not None and space.executable:
                # Only the runtime recomputes some stages and not others, and parts of layers.
                # Some stages or parts recomputed take no less than none: where that is too long already, the fewest do
                # not matter.
                pairs = [(one.base, known and one.is_safe) for one, known in judged]
                pairs += [(one.base, True) for one in fitting]
                slow = [one for one, _ in judged if one.base.work.recompute == "none" and is_open(one.base, pairs)]
                late = {id(one.base) for one in slow if not _may_win(one, tried.shortest)}
                pairs = [(one, fits) for one, fits in pairs if id(one) not in late]
                layouts += [
                    Ranked(functools.partial(Candidate, one.changes, one.work), predictor)
                    for one in between(pairs, predictor.memory)
                ]
            for one in layouts:
                placed = _reordered(one, tried.shortest) if one.is_safe else one
                tried.ranked.append(placed)
                if placed.is_safe:
                    fitting.append(placed)
                    tried.shortest = min(tried.shortest, placed.seconds)


_NOT_OF_AXES = ("stage", "offload_optimizer", "offload_param", "activation_offloading")


def _named(changes: Mapping[str, object]) -> frozenset[tuple[str, object]]:
    """A setting of the axes, at whatever ZeRO stage, wherever the optimizer is."""
    return frozenset((name, value) for name, value in changes.items() if name not in _NOT_OF_AXES)


def _at_each_stage(
    space: Space, setting: Setting, predictor: Predictor, fitting: Collection[Ranked]
) -> Iterator[Setting]:
    """A setting at the first ZeRO stage, and at others that hold less while some of its layouts are not `fitting`."""
    yield setting
    of_first = static_memory(setting.work).total_bytes if space.zero_stages[1:] else 0
    word = "full" if "full" in setting.recompute else setting.recompute[0]
    for stage in space.zero_stages[1:]:
        fit = {(one.base.work.micro_batch, one.base.work.recompute) for one in fitting}
        if all((micro, word) in fit for micro in setting.micro_batches for word in setting.recompute):
            return
        # The rules, which take longer, are asked of what may fit.
        least = setting.work.having(zero_stage=stage, recompute=word)
        held = static_memory(least).total_bytes
        if held >= of_first or far_too_large(least, held):
            continue
        if not _is_far(predictor.footprint(least)):
            other = expand(space, {**setting.changes, "stage": stage}, any_rule=True)
            if isinstance(other, Setting):
                yield other


def _judged(setting: Setting, predictor: Predictor, fitting: Iterable[Ranked]) -> Iterator[tuple[Ranked, bool]]:
    """The layouts of a setting, and whether the memory of each is known: else one that needs less is far too large.

    Those that are `fitting` at another ZeRO stage are left out.
    """
    fit = {(one.base.work.micro_batch, one.base.work.recompute) for one in fitting}
    hopeless = far_too_large(setting.work)
    # What needs least comes first: each of them may make those behind it hopeless.
    words = sorted(setting.recompute, key=lambda word: word != "full")
    beyond = dict.fromkeys(words, hopeless)
    for micro in setting.micro_batches:
        for word in words:
            if (micro, word) in fit:
                continue
            one = Ranked(functools.partial(setting.candidate, micro, word), predictor)
            known = not beyond[word] or (micro == setting.micro_batches[0] and word == words[0])
            yield one, known
            if known and _is_far(one.memory):
                beyond[word] = True
                if word == "full":
                    beyond = dict.fromkeys(words, True)


def _is_far(memory: Footprint) -> bool:
    return memory.limit_bytes is not None and memory.peak.total_bytes > FAR * memory.limit_bytes


def _reordered(one: Ranked, shortest: float) -> Ranked:
    """A layout in the fastest order of its axes; in the default one, where no order lets it win.

    That is so where what no order changes takes longer than layouts that are as good as the shortest step so far.
    """
    if not one.predictor.choices.orders or not _may_win(one, shortest):
        return one
    found = replace(one, orders=True)
    execution = one.predictor.execution(one.base.work, orders=True, terms=one.execution.terms)
    # Another order may ask for another implementation of cp, which may take more memory.
    alike = execution.work.context == one.execution.work.context
    memory = one.memory if alike else one.predictor.footprint(execution.work)
    found.__dict__.update({"base": one.base, "memory": memory, "execution": execution})
    return found if found.is_safe else one


def _may_win(one: Ranked, shortest: float) -> bool:
    """Whether what no order changes takes no longer than layouts that are as good as the shortest step so far."""
    step = one.execution.step
    # tp is the innermost axis of all orders.
    return step.compute + step.tensor + step.optimizer <= TIE * shortest


def _other_executions(best: Ranked, choices: OpenChoices, time: Fit | None) -> tuple[tuple[Execution, str], ...]:
    work, ours = best.candidate.work, best.time.step
    here = (work.order, work.context)
    others = all_executions(work, choices, values_of(work, time))
    return tuple(
        (one, _slower(one.step, ours) or f"{_tied(one.step, ours)}: the simpler one is first")
        for one in others
        if (one.work.order, one.work.context) != here
    )


def outcome(ranked: Sequence[Ranked], refused: Sequence[Refused]) -> SearchResult:
    """Sorts what was predicted, and gives every loser its reason."""
    safe = [*_sorted((one for one in ranked if one.is_safe), lambda one: one.seconds, lambda one: one.candidate.name)]
    unsafe = (one for one in ranked if not one.is_safe)
    tight = [*_sorted(unsafe, lambda one: one.peak_bytes, lambda one: one.base.name)]
    if safe:
        least = min(one.expected_seconds for one in safe)
        close = [one for one in safe if one.expected_seconds <= TIE * least]
        best = min(close, key=lambda one: (simplicity(one.candidate.work), one.seconds, one.peak_bytes))
        safe = [best, *(one.because(_lost(one, best)) for one in safe if one is not best)]
    return SearchResult(tuple(safe), tuple(tight), tuple(refused))


def _sorted(
    ranked: Iterable[Ranked], size: Callable[[Ranked], float], name: Callable[[Ranked], str]
) -> Iterator[Ranked]:
    """By size; those of one size by name, which takes longer to say."""
    for _, equal in itertools.groupby(sorted(ranked, key=size), key=size):
        known = [*equal]
        yield from sorted(known, key=name) if len(known) > 1 else known


def _lost(one: Ranked, best: Ranked) -> str:
    theirs, ours = one.execution.step, best.execution.step
    reason = _slower(theirs, ours)
    if reason is not None:
        return reason
    if TIE * one.seconds < best.seconds:
        gain, chance = 1 - one.seconds / best.seconds, one.memory.probability or 0.0
        return f"{gain:.1%} faster, but fits with probability {chance:.0%} only"
    tied = _tied(theirs, ours)
    if one.peak_bytes > 1.005 * best.peak_bytes:
        return f"{tied}: the first needs {format_bytes(best.peak_bytes)}, not {format_bytes(one.peak_bytes)}"
    return f"{tied}: the simpler one is first"


def _tied(step: StepTime, best: StepTime) -> str:
    gain = 1 - step.seconds / best.seconds
    return "as fast" if gain < 0.0005 else f"{gain:.1%} faster, within the error of {TIE - 1:.0%}"


def _slower(step: StepTime, best: StepTime) -> str | None:
    """By how much a step is slower than the best one, and through which component; None when it is not slower."""
    ratio = step.seconds / best.seconds
    if ratio < 1.0005:
        return None
    theirs, ours = step.parts, best.parts
    part = max(theirs, key=lambda name: theirs[name] - ours[name])
    difference = theirs[part] - ours[part]
    return f"{ratio - 1:.1%} slower, mostly because of {part} (+{format_seconds(difference)})"


def _too_large(memory: Footprint) -> str:
    peak, limit, chance = memory.peak, memory.limit_bytes or 0.0, memory.probability or 0.0
    return (
        f"memory: {format_bytes(peak.total_bytes)} of {format_bytes(limit)} usable on rank {peak.rank}, mostly "
        f"{peak.largest}; fits with probability {chance:.0%} < {SAFE:.0%}"
    )
