"""Why a run is slow: a rank that all others wait for, steps that are longer than planned, exposed communication."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from parcompile.cost.step import forward_share
from parcompile.spec.values import workload_of
from parcompile.units import format_seconds

from . import hang
from .reading import Evidence, Verdict
from .records import Message, Rank

if TYPE_CHECKING:
    from parcompile.cost.step import Timing
    from parcompile.plan import Plan

FEWEST_STEPS, WARM_UP = 4, 2
"""Steps of which memory and time are judged, after the first ones."""
STRAGGLER = 0.05
"""The share of a step for which all others wait for one rank."""
EXPOSED = 0.5
"""The share of a step that every rank waits for messages which all of their ranks have posted."""


Rows = Mapping[int, Sequence[Mapping[str, Any]]]
"""The steps of each rank."""


def steps_of(one: Rank) -> list[Mapping[str, Any]]:
    """The steps of a rank behind the first ones; none where there are few."""
    rows = [row for row in one.steps if all(isinstance(row.get(name), int | float) for name in ("seconds", "bytes"))]
    return rows[WARM_UP:] if len(rows) >= FEWEST_STEPS + WARM_UP else []


def slow(found: Evidence, plan: Plan | None) -> Verdict | None:
    """A rank that all others wait for, steps that are longer than the plan says, or exposed communication."""
    rows = {rank: each for rank, one in found.ranks.items() if (each := steps_of(one))}
    if not rows:
        return None
    typical = statistics.median(float(row["seconds"]) for each in rows.values() for row in each)
    late = _late(found.ranks, rows)
    phases = _phases(rows)
    said_phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in phases.items())
    evidence = [f"a step takes {format_seconds(typical)}: {said_phases}"]
    if late is not None:
        rank, share, at = late
        said = f"all others wait for rank {rank} in {share:.0%} of the time"
        said += f", most of all {at.item.phase or 'there'}" if at else ""
        advice = [f"look at the machine of rank {rank} (clocks, temperature, other processes) and its data loading"]
        evidence += [f"{found.ranks[rank].source}: the last of its groups to post, at most {at}"] if at else []
        where = at.where() if at else {}
        return Verdict("slow", "straggler", said, (rank,), **where, evidence=evidence, advice=advice)
    time = None if plan is None or plan.spec.other_machine() else plan.estimate().time
    waiting = min(_share(each, "waiting_seconds") for each in rows.values())
    exposed = _exposed(found.ranks, rows) if len(rows) == found.world_size else 0.0
    evidence.append(f"every rank waits for messages in {waiting:.0%} of a step or more")
    evidence[-1] += f", for ones that all have posted in {exposed:.0%}" if exposed else ""
    if time is not None:
        planned = sum(value for name, value in time.step.parts.items() if "exposed" in name or "exchange" in name)
        evidence[-1] += f"; the plan says {planned / time.step.seconds:.0%}"
    if plan is not None and time is not None and typical > time.interval_seconds[1]:
        low, high = map(format_seconds, time.interval_seconds)
        said = f"a step takes {format_seconds(typical)}; the plan says {low} to {high}"
        parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in time.step.parts.items() if value > 0)
        expected = _expected(time, forward_share(workload_of(plan.spec)))
        longest = max(phases, key=lambda name: phases[name] - expected.get(name, 0.0), default=None)
        if longest is not None:
            said += f"; most of the rest {longest}: {format_seconds(phases[longest])} instead of about "
            said += format_seconds(expected.get(longest, 0.0))
        return Verdict("slow", "longer than planned", said, phase=longest, evidence=[*evidence, f"planned: {parts}"])
    if exposed > EXPOSED:
        said = f"every rank waits for messages that all have posted in {exposed:.0%} of a step or more: "
        said += "communication is exposed"
        advice = ["`parcompile search` finds layouts that send less"]
        return Verdict("slow", "exposed communication", said, evidence=evidence, advice=advice)
    return None


def _expected(time: Timing, share: float) -> dict[str, float]:
    """Seconds of each phase by the plan; `share` of a pass is forward."""
    step = time.step
    optimizer = step.optimizer + step.host
    passes = step.seconds - optimizer - step.gradients
    forward = passes * share
    return {
        "in the forward pass": forward,
        "in the backward pass": passes - forward + step.gradients,
        "in the optimizer step": optimizer,
    }


def _phases(rows: Rows) -> dict[str, float]:
    """Seconds of each phase in a typical step."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in itertools.chain(*rows.values()):
        for name, seconds in dict(row.get("phases") or {}).items():
            found[name].append(float(seconds))
    return {name: statistics.median(values) for name, values in found.items()}


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _late(ranks: Mapping[int, Rank], rows: Rows) -> tuple[int, float, Message | None] | None:
    """The rank that all others wait for, in which share of a step, and where most of all; None: there is none."""
    shares = lateness(ranks)
    worst = {rank: at for rank, (_, at) in shares.items()}
    if max(_share(each, "waiting_seconds") for each in rows.values()) > STRAGGLER:  # known: the host waits itself
        margins = _margins(rows)
        rank = max(margins, key=lambda one: margins[one], default=None)
        if rank is None or margins[rank][0] <= STRAGGLER / 2 or margins[rank][1] <= STRAGGLER:
            return None
        return rank, margins[rank][1], worst.get(rank)
    order = sorted(shares, key=lambda rank: -shares[rank][0])
    if order and shares[order[0]][0] > max(STRAGGLER, *(2 * shares[rank][0] for rank in order[1:2])):
        return order[0], shares[order[0]][0], worst[order[0]]
    return None


def _share(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of the seconds of these steps."""
    return sum(_seconds(row, name) for row in rows) / max(sum(float(row["seconds"]) for row in rows), 1e-9)


def _margins(rows: Rows) -> dict[int, tuple[float, float]]:
    """By which share of a step a rank is longer than any other one at its own work: in nearly every step, and in most.

    What the system made it wait for a processor is not its own: on a machine with many processes that is everybody's.
    """
    each = {rank: {int(row["step"]): row for row in some_rows} for rank, some_rows in rows.items()}
    margins: dict[int, list[float]] = defaultdict(list)
    for step in set.intersection(*map(set, each.values())) if len(each) > 1 else ():
        ran = {rank: float(row[step]["seconds"]) - _seconds(row[step], "starved_seconds") for rank, row in each.items()}
        own = {rank: ran[rank] - _seconds(row[step], "waiting_seconds") for rank, row in each.items()}
        longest, second = sorted(own.values())[:-3:-1]
        for rank, seconds in own.items():
            over = seconds - (second if seconds == longest else longest)
            margins[rank].append(over / max(ran[rank], 1e-9))
    return {rank: (sorted(one)[len(one) // 4], statistics.median(one)) for rank, one in margins.items()}


def _exposed(ranks: Mapping[int, Rank], rows: Rows) -> float:
    """The share of a step that every rank, or more, waits for messages which all of their ranks have posted.

    What it waits for a rank that posts later, such as one of another stage, or one that the system lets wait for a
    processor, is no time of the message.
    """
    every = hang.Messages(ranks).posted
    clocks, posted = _clocks(every.values()), {key: dict(met) for key, met in every.items()}
    for rank, one in ranks.items():
        for m in (m for m in one.messages if m.op in ("send", "recv")):
            ends = (rank, hang.other_end(one, m))[:: 1 if m.op == "send" else -1]
            posted.setdefault((f"{m.group} {ends}", m.number), {})[rank] = m
    behind: dict[int, float] = defaultdict(float)
    for met in posted.values():
        times = {rank: m.seconds - clocks.get(rank, 0.0) for rank, m in met.items() if m.item.phase != hang.STARTING}
        for rank, seconds in times.items():
            behind[rank] += max(times.values()) - seconds
    shares = []
    for rank, each in rows.items():
        when = [m.seconds for m in ranks[rank].messages if m.item.phase != hang.STARTING]
        span = max(when) - min(when) if when else 0.0
        shares.append(_share(each, "waiting_seconds") - (behind[rank] / span if span > 0 else 0.0))
    return max(min(shares), 0.0)


def _clocks(posted: Iterable[Mapping[int, Message]]) -> dict[int, float]:
    """How far each rank's clock is ahead: hosts' clocks differ by a rank's least distance from the first of a group."""
    clocks: dict[int, float] = {}
    for one in posted:
        first = min(m.seconds for m in one.values())
        clocks |= {rank: min(clocks.get(rank, math.inf), m.seconds - first) for rank, m in one.items()}
    return clocks


def lateness(ranks: Mapping[int, Rank]) -> dict[int, tuple[float, Message]]:
    """Of each rank the share of a typical step for which others waited for it in a group, and where it was most so."""
    every = hang.Messages(ranks).posted.values()
    met = [one for one in every if len(one) > 1 and all(m.item.phase != hang.STARTING for m in one.values())]
    clocks = _clocks(met)
    lost: dict[int, dict[int | None, float]] = defaultdict(lambda: defaultdict(float))
    times: dict[int | None, list[float]] = defaultdict(list)
    worst: dict[int, tuple[float, Message]] = {}
    free: dict[int, float] = defaultdict(float)
    for one in sorted(met, key=lambda one: max(m.seconds for m in one.values())):
        (before, _), (last, rank) = sorted((m.seconds - clocks[rank], rank) for rank, m in one.items())[-2:]
        # A rank that was held up by another one in the message before is not to blame for that time.
        late = max(last - max(before, free[rank]), 0.0)
        lost[rank][one[rank].step] += late
        times[one[rank].step] += [before, last]
        worst[rank] = max(worst.get(rank, (-1.0, one[rank])), (late, one[rank]), key=lambda pair: pair[0])
        free |= dict.fromkeys(one, last)
    # Of the first step and the last one the records hold a part.
    steps = [step for step, each in times.items() if 2 * len(each) > max(map(len, times.values()))]
    spans = {step: (max(times[step]) - min(times[step])) or math.inf for step in steps}
    if len(steps) < FEWEST_STEPS - 1:
        return {rank: (0.0, at) for rank, (_, at) in worst.items()}
    return {
        rank: (statistics.median(row[one] / spans[one] for one in steps), worst[rank][1]) for rank, row in lost.items()
    }
