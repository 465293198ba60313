"""Why a run hangs, has died, is slow or computes something else: read from what its ranks have left.

From everything that was read to one verdict: the gravest first.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parcompile.units import format_bytes, format_seconds

from . import hang
from .metrics import WINDOW, usual
from .reading import PHASES, WAITING, WORDS, Evidence, Fact, Verdict, locks_below, read_all, read_log, some
from .slow import slow, steps_of

if TYPE_CHECKING:
    from parcompile.cost.changes import Change
    from parcompile.plan import Plan

Preflight = Callable[[Mapping[str, Any]], bool]
"""Whether the sharded model of a spec is what its plan says."""

GROWTH = 0.03
"""The share of what a rank holds by which it has to grow."""
HELD = 0.05
"""The share of a GPU's memory that is held where a job runs on it."""
LOOKS = 3
"""Of nvidia-smi at each GPU: one alone may fall into a pause."""
_RECORD: Sequence[str] = WORDS["record"]
_BROKEN: Sequence[str] = WORDS["broken"]


def judge(found: Evidence, plan: Plan | None = None, preflight: Preflight | None = None) -> Verdict:
    """The verdict on what was read; of a plan, also how far the run is from it.

    With `preflight`, changes that fit are those that pass it.
    """
    hung = _hang(found)
    verdict = (
        _start(found)
        or _build(found, is_waiting=True)
        or (hung if hung and hung.cause in hang.DIVERGED else None)
        or _exchanged(found)
        or _nonfinite(found)
        or _out_of_memory(found, plan, preflight)
        or hung
        or _error(found)
        or _build(found, is_waiting=False)
        or _growth(found)
        or _spike(found, plan)
        or slow(found, plan)
        or _idle(found)
        or _nothing(found)
    )
    size = f" of {found.world_size}" if found.world_size else ""
    messages = sum(len(one.messages) for one in found.ranks.values())
    said = f"ranks {len(found.ranks)}{size}, messages {messages:,}, rows of metrics {len(found.metrics)}, "
    said += f"lines of logs that say something {len(found.facts)}"
    unread = dict(sorted(found.unreadable.items())[:20])
    return replace(verdict, read={"files": found.files, "said": said, "unreadable": unread})


def _of(found: Evidence, *kinds: str) -> list[Fact]:
    return [one for one in found.facts if one.kind in kinds]


def _events(found: Evidence, *signs: str) -> dict[int, str]:
    """Ranks that ended of something that is told by these words, with what they said."""
    every = [(rank, event) for rank, one in sorted(found.ranks.items()) for event in one.events]
    return {rank: event for rank, event in every if any(sign in event for sign in signs)}


def _quoted(found: Evidence, told: Mapping[int, str]) -> list[str]:
    first = {event: rank for rank, event in reversed([*told.items()])}
    return [f"{found.ranks[rank].source}: {event[:300]}" for event, rank in list(first.items())[:3]]


def _build(found: Evidence, *, is_waiting: bool) -> Verdict | None:
    """Ranks that wait for a build of an extension of torch; or, where nobody is known to wait, a lock that is left."""
    stacks = {**{rank: one.stack for rank, one in found.ranks.items()}, **found.stacks}
    waiting = sorted(rank for rank, stack in stacks.items() if any(WAITING in line for line in stack[-2:]))
    roots = {Path(one.text) for one in _of(found, "build")}
    if bool(waiting) != is_waiting or not (waiting or roots or found.locks):
        return None
    locks = {one.path: one for one in (*found.locks, *(locks_below(roots) if waiting or roots else ()))}
    left = [one for one in locks.values() if one.is_left]
    evidence = [*map(str, left or locks.values()), *(f"rank {rank}: {stacks[rank][-1]}" for rank in waiting[:4])]
    who = f"{some(waiting)} wait{'s' * (len(waiting) == 1)} for" if waiting else "each run waits for"
    if left:
        names = ", ".join(Path(one.path).parent.name for one in left)
        said = f"{who} a build of torch's extension {names} that nobody finishes: a killed process left its lock"
        return _not_started("build lock", said, waiting, evidence, [f"rm {one.path}, and start again" for one in left])
    if not waiting:
        return None
    if locks:
        said = f"{who} the build of an extension of torch, which is under way"
        return _not_started("build", said, waiting, evidence, ["wait: a build takes minutes"])
    said = f"{who} the build of an extension of torch by another process"
    advice = "on the host of the rank: where no ninja runs, rm ~/.cache/torch_extensions/*/*/lock, and start again"
    return _not_started("build", said, waiting, evidence, [advice])


def _not_started(cause: str, said: str, ranks: list[int], evidence: list[str], advice: list[str]) -> Verdict:
    return Verdict("start", cause, said, tuple(ranks), evidence=evidence, advice=advice)


def _start(found: Evidence) -> Verdict | None:
    told = [*_events(found, "do not run the same").values(), *(one.text for one in _of(found, "versions"))]
    if not told:
        return None
    other = {int(one) for part in re.findall(r"rank ([\d, ]+) has", told[0]) for one in part.split(",")} - {0}
    if 2 * len(other) > found.world_size > 0:
        other = set(range(found.world_size)) - other
    advice = ["start every rank from the same environment and the same plan"]
    return Verdict("start", "versions", told[0], tuple(sorted(other)), evidence=told[:3], advice=advice)


def _nonfinite(found: Evidence) -> Verdict | None:
    names = ("loss", "gradient_norm")
    rows = [row for row in found.metrics if not all(math.isfinite(row.get(name, 0.0)) for name in names)]
    told, lines = _events(found, "is not a finite number"), _of(found, "nonfinite")
    if not rows and not told and not lines:
        return None
    evidence = [*_quoted(found, told), *map(str, lines[:3])]
    evidence += [f"{found.metrics_file}: step {row['step']:.0f}: loss {row.get('loss')}" for row in rows[:1]]
    advice = ["go on from a checkpoint before that step, and look at that batch and that layer in fp32"]
    places = {rank: one.nonfinite for rank, one in found.ranks.items() if one.nonfinite}
    if not places:
        step = int(rows[0]["step"]) if rows else None
        said = f"a loss or norm is not finite{'' if step is None else f', first at step {step}'}"
        who = tuple(sorted({one.rank for one in lines if one.rank is not None}))
        return Verdict("wrong", "not finite", said, who, step=step, evidence=evidence, advice=[*advice, _RECORD[0]])
    first = min(places.values(), key=_order)
    alike = {rank: one for rank, one in places.items() if _order(one) == _order(first)}
    own = {rank: one["parameter"] for rank, one in alike.items() if one.get("parameter")}
    ranks = tuple(sorted(own or alike))
    if "forward" in str(first["phase"]):
        said = f"the first value that is not finite leaves layer {first['layer']} {first['phase']}"
    else:
        said = f"the gradient of layer {first['layer']}'s output is the first value that is not finite: what comes "
        said += "after that layer made it, the head and the loss behind the last one"
    said = f"step {first['step']}: {said}"
    said += f"; {some(ranks)}: {own[ranks[0]]} of it holds such values" if own else ""
    return Verdict("wrong", "not finite", said, ranks, **_place(first), evidence=evidence, advice=advice)


def _exchanged(found: Evidence) -> Verdict | None:
    """A rank that posted like messages in another order, and a loss or norm that came of it: nobody waits there."""
    if (wrong := _nonfinite(found)) is None:
        return None
    verdict = hang.strayed(found.ranks)
    if verdict is None or verdict.cause not in ("skipped", "swapped order", "skipped or swapped"):
        return None
    if wrong.step is not None and (verdict.step or 0) > wrong.step:
        return None
    return replace(verdict, kind="wrong", evidence=[*verdict.evidence, wrong.summary, *wrong.evidence])


def _place(one: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.get(name) for name in ("step", "micro_batch", "layer", "phase")}


def _order(place: Mapping[str, Any]) -> tuple[Any, ...]:
    """Forward goes up through the layers, backward down."""
    forward, layer = "forward" in str(place.get("phase")), int(place.get("layer") or 0)
    return int(place.get("step") or 0), int(place.get("micro_batch") or 0), not forward, layer if forward else -layer


def _out_of_memory(found: Evidence, plan: Plan | None, preflight: Preflight | None) -> Verdict | None:
    facts = _of(found, "device memory", "host memory")
    told = _events(found, "CUDA out of memory", "OutOfMemoryError", "MemoryError", "can't allocate memory")
    if not facts and not told:
        return None
    rank = next(iter(told), next((one.rank for one in facts if one.rank is not None), None))
    facts += [fact for event in told.values() for fact in read_log(event, "records") if fact.kind == "device memory"]
    numbers = max((one.numbers for one in facts), key=len, default={})
    place = dict(found.ranks[rank].place) if rank in found.ranks else {}
    if not place and numbers.get("phase", -1) >= 0:
        place["phase"] = f"in the {PHASES[int(numbers['phase'])]}"
    who, blamed = ("the run", ()) if rank is None else (f"rank {rank}", (rank,))
    said = f"{who} ran out of memory{' ' + place['phase'] if place.get('phase') else ''}"
    evidence = [*map(str, facts[:3]), *_quoted(found, told)]
    advice = ["name the plan with --plan: then the largest part and the changes that fit are listed"]
    cause = "host memory" if facts and facts[0].kind == "host memory" else "device memory"
    if cause == "host memory" and (plan is None or plan.spec.cluster.accelerator != "cpu"):
        said += " of the host"
        advice = ["let fewer workers of the data loader run, offload less, or ask the scheduler for more (--mem)"]
    elif plan is not None:
        said, advice = _beside_plan(plan, preflight, numbers, said)
    if gpus := _of(found, "gpu"):
        evidence.append(f"the fullest GPU: {max(gpus, key=lambda one: one.numbers['used'])}")
    return Verdict("memory", cause, said, blamed, **_place(place), evidence=evidence, advice=advice)


def _beside_plan(
    plan: Plan, preflight: Preflight | None, numbers: Mapping[str, float], said: str
) -> tuple[str, list[str]]:
    """How far the run is from its plan, and the changes that fit."""
    memory = plan.estimate().memory
    peak, (low, high) = memory.peak, memory.interval_bytes
    said += f"; the plan expects {format_bytes(peak.total_bytes)} ({format_bytes(low)} to {format_bytes(high)}), "
    said += f"most of it {peak.largest}"
    if "total" in numbers:
        held = numbers["total"] - numbers.get("free", 0.0)
        said += f"; the device held {format_bytes(held)}, {held / peak.total_bytes - 1:+.0%}"
    checked = "`parcompile preflight` checks it" if preflight is None else "it passes preflight"
    changes = [
        f"set {', '.join(f'{name} to {value}' for name, value in one.settings.items())}: peak "
        f"{format_bytes(one.memory.peak.total_bytes)}, step {one.cost:+.0%}; {checked}"
        for one in itertools.islice(_allowed(plan, preflight), 3)
    ]
    return said, changes or ["no change of the spec fits: use more nodes"]


def _allowed(plan: Plan, preflight: Preflight | None) -> Iterator[Change]:
    """The changes that fit and that the rules allow."""
    from parcompile.cost.changes import changes_that_fit
    from parcompile.plan import written
    from parcompile.searching.variant import changed, variant

    tree = written(plan)
    is_known = variant(tree, {}, Path(), executable=True).work is not None
    for one in changes_that_fit(plan.estimate().work):
        if is_known and variant(tree, one.settings, Path(), executable=True).work is None:
            continue
        if preflight is None or preflight(changed(tree, one.settings)):
            yield one


def _hang(found: Evidence) -> Verdict | None:
    lost: dict[int, str] = {}
    for fact in (*_told(found), *found.facts):
        if fact.kind in ("dead", "stopped") and fact.rank is not None:
            one = found.ranks.get(fact.rank)
            if one is None or not (one.error or one.has_ended):
                lost.setdefault(fact.rank, str(fact))
    return (
        _network(found, lost)
        or hang.judge(found.ranks, lost, found.world_size)
        or _watchdog(found)
        or _at_store(found)
        or hang.judge_stacks(found.stacks)
    )


def _told(found: Evidence) -> list[Fact]:
    """What ranks said when they ended."""
    every = ((one.source, read_log("\n".join(one.events), "")) for one in found.ranks.values())
    return [replace(fact, place=source) for source, facts in every for fact in facts]


def _network(found: Evidence, lost: Mapping[int, str]) -> Verdict | None:
    """Ranks lost their connections though none of them has died, ended, or failed of something else."""
    broken = _events(found, *_BROKEN)
    others = [one for rank, one in found.ranks.items() if one.error and rank not in broken and not _follows(one.error)]
    is_whole = len(found.ranks) == found.world_size and not any(one.has_ended for one in found.ranks.values())
    if not broken or lost or others or not is_whole or hang.deviations(found.ranks):
        return None
    # A rank that ends because it lost one takes its connections with it: then others have lost as many, but later.
    links = {rank: row for rank in broken if (row := found.ranks[rank].links) and row.get("of")}
    share = {rank: (row["left"] / row["of"], row["seconds"]) for rank, row in links.items()}
    blamed = [min(share, key=lambda rank: share[rank])] if len(share) == len(broken) else list(broken)
    failed = [m for rank in blamed for m in found.ranks[rank].messages if m.state in hang.UNDONE]
    # Where none has failed yet, it waits in the one that it has posted last: it does not wait for what it sent before.
    first = next((m for m in failed if m.state == "failed"), failed[-1] if failed else None)
    said = f"the connections of {some(blamed)} broke, and all ranks were alive"
    advice = ["look at the links between the hosts of these ranks"]
    where = first.where() if first else {}
    left = [f"rank {rank}: {row['left']:.0f} of {row['of']:.0f} connections are left" for rank, row in links.items()]
    evidence = [*left[:8], *_quoted(found, broken)]
    return Verdict("hang", "network", said, tuple(blamed), **where, evidence=evidence, advice=advice)


def _follows(error: str) -> bool:
    """Whether an error of a rank is that of another one, which it names."""
    return error.startswith("rank ") or "another has failed" in error


def _watchdog(found: Evidence) -> Verdict | None:
    """From NCCL's own lines: the rank that was at an earlier collective than the others."""
    lines = {one.rank: one for one in _of(found, "watchdog") if one.rank is not None}
    if not lines:
        return None
    numbers = {rank: int(one.numbers["seq"]) for rank, one in lines.items()}
    low, high = min(numbers.values()), max(numbers.values())
    late = tuple(sorted(rank for rank, number in numbers.items() if number == low)) if low < high else ()
    said = f"{some(sorted(lines))} timed out in a collective"
    said += f"; {some(late)} was at number {low}, others at {high}" if late else ""
    evidence = [str(one) for one in list(lines.values())[:4]]
    return Verdict("hang", "time-out", said, late, evidence=evidence, advice=_RECORD[:2])


def _at_store(found: Evidence) -> Verdict | None:
    if not (lines := _of(found, "store")):
        return None
    said = "the wait for the store ended in vain: some ranks have not started, or its address cannot be reached"
    advice = ["compare MASTER_ADDR, MASTER_PORT and the world size of all ranks"]
    return Verdict("hang", "store", said, evidence=[str(one) for one in lines[:4]], advice=advice)


def _error(found: Evidence) -> Verdict | None:
    """A rank that failed of itself, or what logs say of the end."""
    own = {rank: one.error for rank, one in sorted(found.ranks.items()) if one.error and not _follows(one.error)}
    own = {rank: error for rank, error in own.items() if not any(sign in error for sign in _BROKEN)} or own
    if own:
        first = next(iter(own))
        ranks = [rank for rank in own if own[rank] == own[first]]
        cause = "ended early" if "the batches ended after" in own[first] else "error"
        where = found.ranks[first].messages[-1].where() if found.ranks[first].messages else {}
        said = f"{some(ranks)} failed: {own[first]}"
        return Verdict("died", cause, said, tuple(ranks), **where, evidence=_quoted(found, own))
    facts = _of(found, "dead", "killed", "stopped", "time limit", "network", "data", "error", "lost", "exit")
    facts = facts or [fact for fact in _told(found) if fact.kind in ("dead", "stopped")]
    if not facts:
        return None
    # What ranks and launchers say when another rank has ended comes after what that one said.
    facts.sort(key=lambda one: one.kind in ("lost", "exit") or "ChildFailedError" in one.text)
    fact, exits = facts[0], {one.rank for one in _of(found, "exit")}
    if fact.rank is None and fact.kind == "error" and len(exits) == 1:
        fact = replace(fact, rank=exits.pop())
    said, cause = fact.text, {"data": "ended early", "killed": "dead", "exit": "error"}.get(fact.kind, fact.kind)
    advice = [hang.ADVICE["dead"] if cause == "dead" else _RECORD[0]]
    if fact.kind == "killed":
        said = f"a rank was ended by signal {fact.text.rpartition('-')[2]}"
        started = "DeepSpeed's line names the rank that it started last, whichever died"
        advice.append(f"{started}: --enable_each_rank_log DIR")
    elif fact.rank is not None:
        said = f"rank {fact.rank} failed: {said}"
    blamed = () if fact.rank is None else (fact.rank,)
    return Verdict("died", cause, said[:300], blamed, evidence=[str(one) for one in facts[:4]], advice=advice)


def _growth(found: Evidence) -> Verdict | None:
    """A rank whose memory rises from step to step."""
    rises: dict[int, float] = {}
    for rank, one in found.ranks.items():
        held = [float(row["bytes"]) for row in steps_of(one)]
        ups = sum(after > before for before, after in itertools.pairwise(held))
        if held and held[-1] - held[0] > max(GROWTH * held[0], 2**24) and ups >= 0.8 * (len(held) - 1):
            rises[rank] = (held[-1] - held[0]) / (len(held) - 1)
    if not rises:
        return None
    most = max(rises.values())
    ranks = sorted(rank for rank, rise in rises.items() if rise > most / 4)
    one, rows = found.ranks[ranks[0]], steps_of(found.ranks[ranks[0]])
    first, last = (f"{format_bytes(row['bytes'])} after step {row['step']}" for row in (rows[0], rows[-1]))
    said = f"{some(ranks)} holds {format_bytes(most)} more after each step"
    advice = ["look for tensors that are kept from step to step: losses without .item() or .detach(), caches, hooks"]
    evidence = [f"{one.source}: {first}, {last}"]
    return Verdict("memory", "growth", said, tuple(ranks), step=rows[0]["step"], evidence=evidence, advice=advice)


def _spike(found: Evidence, plan: Plan | None) -> Verdict | None:
    """The first step whose loss or norm leaves what the steps before it show, or the plan's model, and stays there."""
    for name in ("loss", "gradient_norm"):
        rows = [(int(row["step"]), row[name]) for row in found.metrics if name in row]
        values = [value for _, value in rows]
        for place, (middle, bound) in enumerate(usual(values[:-2]), WINDOW):
            step, value = rows[place]
            if min(values[place : place + 3]) > bound:
                said = f"it was about {middle:.4g}, and stays higher"
                return _left(found, step, name, value, said)
    if plan is None:
        return None
    rows = [(int(row["step"]), row["loss"]) for row in found.metrics if "loss" in row]
    guess = math.log(plan.spec.model.shape.vocab_size)
    high = max([guess + 1, *(value for _, value in rows[:1])])
    for place, (step, value) in enumerate(rows[:-2]):
        if min(one for _, one in rows[place : place + 3]) > high:
            said = f"the plan's model has {guess:.4g} where it guesses among its tokens, and this run began with "
            return _left(found, step, "loss", value, f"{said}{rows[0][1]:.4g}")
    return None


def _left(found: Evidence, step: int, name: str, value: float, why: str) -> Verdict:
    said = f"step {step}: {name.replace('_', ' ')} {value:.4g}; {why}"
    advice = ["go on from a checkpoint before it, with a smaller learning rate or without that batch"]
    evidence = [f"{found.metrics_file}: step {step}: {name} {value:.6g}"]
    return Verdict("wrong", "left its interval", said, step=step, evidence=evidence, advice=advice)


def _idle(found: Evidence) -> Verdict | None:
    """From nvidia-smi: a GPU that holds memory and is idle all the time, while the others work or wait for it."""
    busy: dict[str, list[Fact]] = defaultdict(list)
    for one in _of(found, "gpu"):
        if one.numbers.get("index", -1) >= 0 and one.numbers["used"] > HELD * one.numbers["total"]:
            busy[f"{one.place.rpartition(':')[0]}: GPU {one.numbers['index']:.0f}"].append(one)
    idle = [name for name, each in busy.items() if max(one.numbers["busy"] for one in each) <= 5]
    others = [each for name, each in busy.items() if name not in idle]
    if not 0 < len(idle) < len(others) or min(map(len, busy.values())) < LOOKS:
        return None
    if min(one.numbers["busy"] for each in others for one in each) < 95:
        return None
    said = f"{', '.join(idle[:8])} does nothing, and the other {len(others)} work or wait in a collective"
    evidence = [str(busy[name][-1]) for name in idle[:4]]
    advice = [f"py-spy dump the process of {idle[0]}: it is outside of a collective, or waits for its data", *_RECORD]
    return Verdict("hang", "idle GPU", said, evidence=evidence, advice=advice)


def _nothing(found: Evidence) -> Verdict:
    if found.ranks and len(found.ranks) >= found.world_size > 0:
        advice = ["if it hangs or is slow all the same, send SIGUSR1 to every rank and read the records again"]
        said = "nothing is wrong in what was read"
        if open_ranks := [rank for rank, one in sorted(found.ranks.items()) if not one.events]:
            said += f"; {some(open_ranks)} left no word of an end"
            together = "they were killed together: look at the launcher, the scheduler, the machine"
            advice.append(f"if they run no more, {together}")
        return Verdict("nothing", "none", said, advice=advice)
    if found.metrics and not found.ranks:
        return Verdict("nothing", "none", "the metrics show nothing wrong", advice=_RECORD)
    return Verdict("unknown", "too little", "what was read does not say what is wrong", advice=_RECORD)
