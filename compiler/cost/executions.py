"""How a layout can be executed: in which order of the axes, and with which implementation of context parallelism.

Memory is the same for all orders of a layout, and no rule refuses an order that names every axis. So the fastest
execution stands for the layout in a search, with the memory of its implementation; the other executions of the chosen
layout are listed with what they cost. tp is always innermost: its groups wait for each other in every layer, and
nothing hides that.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parcompile.layout.groups import AXES, DENSE_AXES, Axis, Grid, expert_grid
from parcompile.layout.sequence import ContextParallel
from parcompile.layout.shards import keeps_places

from .coefficients import time_values
from .context_time import EQUAL, ContextCost, attention_seconds, candidates, costs, simplest
from .step import StepTerms, StepTime, step_terms, step_time
from .workload import Workload


@dataclass(frozen=True, slots=True)
class OpenChoices:
    """What a spec leaves open of the execution; `sizes` are the levels of cp where they are given."""

    orders: bool
    implementations: bool
    sizes: tuple[int, int] | None = None


class Execution(NamedTuple):
    """One order with one implementation, and the step that follows."""

    work: Workload
    step: StepTime
    terms: StepTerms
    """Of the layout, in any of its executions."""
    context: ContextCost | None

    @property
    def name(self) -> str:
        """The axes that are larger than 1, from the innermost to the outermost, and how cp runs."""
        large = (axis for axis in self.work.order if axis is not Axis.EP and self.work.size(axis) > 1)
        order = "-".join(large) or "one rank"
        return f"{order}, {self.work.context.name}" if self.work.cp > 1 else order


def orders(work: Workload) -> list[tuple[Axis, ...]]:
    """The orders of a layout that put ranks elsewhere, the default first: on one node no order does.

    Where experts are dealt over ep, each rank has those of its own place on tp and pp in all of them.
    """
    if work.nodes == 1:
        return [AXES]
    large = [axis for axis in (Axis.CP, Axis.DP, Axis.PP) if work.size(axis) > 1]
    found = []
    for permuted in itertools.permutations(large):
        placed = iter(permuted)
        # Axes of size 1, and that of the experts, stay where they are.
        found.append(tuple(next(placed) if axis in large else axis for axis in AXES))
    if work.ep == 1:
        return found
    sizes = tuple(work.size(axis) for axis in DENSE_AXES)
    return [order for order in found if order == AXES or _keeps_experts(order, sizes, work.ep, work.expert_tp)]


@functools.lru_cache(maxsize=65536)
def _keeps_experts(order: tuple[Axis, ...], sizes: tuple[int, ...], ep: int, expert_tp: int | None) -> bool:
    dense = Grid.of(order, dict(zip(DENSE_AXES, sizes, strict=True)))
    return keeps_places(dense, expert_grid(dense, ep, expert_tp))


def best_order(work: Workload) -> Execution:
    """A layout in the order that a search gives it, with the implementation of cp that it has."""
    return fastest(work, OpenChoices(orders=True, implementations=False), time_values(work))


Known = dict[tuple[object, ...], ContextCost]
"""What was chosen of the implementations of cp, by all that this depends on within the layouts of one spec."""


def fastest(
    work: Workload,
    choices: OpenChoices,
    values: Mapping[str, float],
    known: Known | None = None,
    terms: StepTerms | None = None,
) -> Execution:
    """The fastest execution; of those within `EQUAL` of it, the one with the first order and simplest implementation.

    `known` remembers choices from one layout of a spec to the next, `terms` are those of the layout, where known.

    Raises:
        ValueError: the layout cannot be cut.
    """
    terms = terms or step_terms(work)
    chosen: Known = {} if known is None else known
    found = []
    for order in orders(work) if choices.orders else [work.order]:
        placed, cost = implemented(work if order == work.order else work.having(order=order), choices, values, chosen)
        found.append(Execution(placed, step_time(terms, values, cost, placed), terms, cost))
    least = min(one.step.seconds for one in found)
    return next(one for one in found if one.step.seconds <= EQUAL * least)


def implemented(
    work: Workload, choices: OpenChoices, values: Mapping[str, float], known: Known
) -> tuple[Workload, ContextCost | None]:
    """A layout, whose order is given, with the implementation of cp that is chosen for it, and what that costs."""
    if not choices.implementations or work.cp == 1:
        return work, None
    # Farther than a node apart is as far as another node.
    key = (min(work.stride(Axis.CP), work.gpus_per_node), work.tp, work.cp, work.micro_batch, work.recompute)
    if key not in known:
        known[key] = simplest(costs(work, _possible(work, choices), values), attention_seconds(work, values))
    return _with(work, known[key].context), known[key]


def all_executions(work: Workload, choices: OpenChoices, values: Mapping[str, float]) -> list[Execution]:
    """Every execution of a layout, the fastest first."""
    terms = step_terms(work)
    found = []
    for order in orders(work) if choices.orders else [work.order]:
        placed = replace(work, order=order)
        if choices.implementations and work.cp > 1:
            ranked: Sequence[ContextCost | None] = costs(placed, _possible(placed, choices), values)
        else:
            ranked = [None]
        for one in ranked:
            run = placed if one is None else _with(placed, one.context)
            found.append(Execution(run, step_time(terms, values, one, run), terms, one))
    return sorted(found, key=lambda one: one.step.seconds)


def _possible(work: Workload, choices: OpenChoices) -> list[ContextParallel]:
    possible, _ = candidates(work)
    if not work.shape.attends:
        return possible[:1]  # none sends anything
    return [one for one in possible if choices.sizes is None or one.sizes in (None, choices.sizes)]


def _with(work: Workload, context: ContextParallel) -> Workload:
    if work.context == context:
        return work
    return work.having(cp_implementation=context.implementation.value, cp_sizes=context.sizes)


def settings(work: Workload, choices: OpenChoices) -> dict[str, object]:
    """What has to stand in a spec, of what it left open, for this execution."""
    found: dict[str, object] = {}
    if choices.orders and work.order != AXES:
        found["order"] = "-".join(work.order)
    if choices.implementations and work.cp > 1:
        found["cp_implementation"] = work.cp_implementation
        if work.cp_sizes is not None:
            found["hierarchical_cp_sizes"] = list(work.cp_sizes)
    return found
