"""Checks a launched job before its first step: who is there, what they run, their links, and two steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from parcompile.cost.step import timing
from parcompile.plan import Plan, PlanError, load_plan
from parcompile.runtime.deepspeed_patches.engine import forbid_jit_builds
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.groups import Mesh, join, launcher_store, start_world, store_of_world
from parcompile.runtime.groups.rendezvous import Environment, device_of
from parcompile.runtime.liveness.monitor import say
from parcompile.runtime.liveness.watchdog import StoreChannel
from parcompile.runtime.preflight.findings import Finding, Verdict
from parcompile.runtime.preflight.live.agreement import (
    JOB,
    Arrived,
    LiveReport,
    Node,
    compare_arrival,
    compare_cpu_adam,
    compare_disk,
    compare_memory,
    compare_places,
    compare_shared_memory,
)
from parcompile.runtime.preflight.live.facts import Facts, local_facts, marker_in
from parcompile.runtime.preflight.live.session import Answer, Limits, Outcome, Session
from parcompile.runtime.preflight.live.trial import (
    LOSSES,
    STEPS,
    LinkMeasurements,
    Trial,
    compare_links,
    compare_live_groups,
    compare_trials,
    measure,
    remarks,
    run_trial,
)
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes, format_seconds

ARRIVAL, DISK, GROUPS, LINKS, TRIAL = "arrival", "disk", "process groups", "links", f"{STEPS} steps"
STAGES = (ARRIVAL, DISK, GROUPS, LINKS, TRIAL)


@dataclass(frozen=True, slots=True)
class Job:
    """What is checked. Without a plan, `unread` says why it cannot be read."""

    environment: Environment
    store: Any
    plan: Plan | None
    unread: str
    checkpoints: Path
    model: Callable[[], nn.Module] | None


def go_through(job: Job, session: Session) -> None:
    """All stages, as far as one lets the next begin."""
    with marker_in(job.checkpoints, wanted=session.is_first) as marker:
        own = asdict(local_facts(job.environment, job.plan, job.unread, job.checkpoints))
        said = {"facts": own, "marker": marker}
        answer = session.stage(
            ARRIVAL, lambda: said, lambda heard: _arrival(job, session, heard), seconds=session.limits.wait_seconds
        )
        if not answer["go"]:
            return
        # Before any collective: whoever waits in one may be ended there, and the marker would stay.
        seen = not answer["marker"] or Path(answer["marker"]).exists()
        session.stage(DISK, lambda: seen, lambda heard: _disk(session, heard))
    joined: list[Mesh] = []
    if not session.stage(GROUPS, lambda: _join(job, joined), lambda heard: _groups(session, heard))["go"]:
        return
    mesh, nodes, seconds = joined[0], answer["nodes"], session.limits.measure_seconds
    links = session.stage(LINKS, lambda: _measure(mesh, nodes, seconds), lambda heard: _links(job, session, heard))
    if links["go"]:
        session.stage(TRIAL, lambda: asdict(run_trial(mesh, job.model)), lambda heard: _trial(session, heard))


def _join(job: Job, joined: list[Mesh]) -> list[Any]:
    assert job.plan is not None
    if not dist.is_initialized():
        start_world(job.store, job.environment, device_of(job.environment))
    joined.append(join(job.plan, watched=False))  # the session has a watch of its own
    return [one.to_wire() for one in compare_live_groups(joined[0])]


def _measure(mesh: Mesh, nodes: list[str], seconds: float) -> Answer:
    try:
        return asdict(measure(mesh.plan, mesh.device, nodes, seconds))
    except ValueError as error:
        return {"failure": str(error)}


def _arrival(job: Job, session: Session, heard: Sequence[Any]) -> Answer:
    if job.plan is None:
        raise RunError(job.unread)
    own, findings = Facts(**heard[0]["facts"]), session.findings
    facts = tuple(own.of_another(said["facts"]) for said in heard if said is not None)
    session.came = arrived = Arrived(job.plan, session.channel.world_size, facts)
    findings += compare_arrival(arrived, session.limits.wait_seconds)
    go = not _differing(findings)
    for compare in (compare_places, compare_memory, compare_cpu_adam, compare_shared_memory):
        findings += compare(arrived)
    return {"go": go, "nodes": [one.node for one in facts], "marker": heard[0]["marker"]}


def _disk(session: Session, heard: Sequence[Any]) -> Answer:
    session.findings += compare_disk(session.arrived, heard)
    return {}


def _groups(session: Session, heard: Sequence[Any]) -> Answer:
    groups = [Finding.from_wire(one) for said in heard for one in said]
    session.findings += groups
    return {"go": not _differing(groups)}


def _links(job: Job, session: Session, heard: Sequence[Any]) -> Answer:
    arrived = session.arrived
    if failures := [said["failure"] for said in heard if "failure" in said]:
        session.findings.append(Finding(JOB, LINKS, "measured", "", Verdict.NOT_RUN, failures[0]))
    else:
        measured = [LinkMeasurements.from_json(said) for said in heard]
        session.findings += compare_links(arrived, measured)
        session.slow = remarks(arrived, measured)
    why = ""
    if differing := _differing(session.findings):
        why = f"the steps could hang or fail for what differs: {', '.join(dict.fromkeys(differing))}"
    elif arrived.plan.spec.model.shape.user_module is not None and job.model is None:
        why = "the model is a module of your own: call parcompile.runtime.live_check with model="
    if why:
        session.findings.append(Finding(JOB, LOSSES, "finite, equal", "", Verdict.NOT_RUN, why))
    return {"go": not why}


def _trial(session: Session, heard: Sequence[Any]) -> Answer:
    trials = [Trial(**said) for said in heard]
    session.findings += compare_trials(session.arrived, trials)
    estimate = timing(workload_of(session.arrived.plan.spec)).step.seconds
    seconds, peak = max(one.seconds[-1] for one in trials), max(one.peak_bytes for one in trials)
    session.notes.append(
        f"step {STEPS} took {format_seconds(seconds)} on the slowest rank, the estimate is {format_seconds(estimate)}; "
        f"the fullest rank held {format_bytes(peak)}"
    )
    return {}


def _differing(findings: Sequence[Finding]) -> list[str]:
    return [one.subject for one in findings if one.verdict is Verdict.DIFFERS]


_NUMBERS = itertools.count()
"""Checks of one process share a store: each has a name of its own in it."""


def live_check(
    plan: Plan | str | Path,
    *,
    checkpoints: str | Path | None = None,
    model: Callable[[], nn.Module] | None = None,
    limits: Limits | None = None,
) -> LiveReport | None:
    """Checks a job before its first step. All ranks call it, before `initialize` or anything else that joins them.

    Args:
        plan: the plan, or the path of `plan.json` or of its folder.
        checkpoints: the folder to which checkpoints will be written; None: that of the plan, or the current one.
        model: builds the model of the trial, as `initialize` takes it; None: the plan's with random weights.
        limits: how long it may take. Where a rank waits beyond them for one that is gone, nothing can call it back:
            rank 0 then prints the report, and every process ends with exit code 1.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        RunError: something differs; every rank raises, and rank 0's message is the report.
    """
    found = check_job(
        plan, speak=lambda report: say(report.text()), checkpoints=checkpoints, model=model, limits=limits
    )
    if found.passed:
        return found.report
    raise everywhere(found.reason if found.report is None else found.report.text())


def check_job(
    plan: Plan | str | Path,
    *,
    speak: Callable[[LiveReport], None],
    checkpoints: str | Path | None = None,
    model: Callable[[], nn.Module] | None = None,
    limits: Limits | None = None,
    owns_process: bool = False,
) -> Outcome:
    """What `live_check` does, without raising for what it finds; the other arguments are as there.

    Args:
        plan: as there.
        speak: prints the report on rank 0 when the main thread cannot come back.
        checkpoints: as there.
        model: as there.
        limits: as there.
        owns_process: whether SIGTERM may be caught meanwhile, so that the end of a rank is reported.

    Raises:
        RunError: rank 0 cannot be reached.
    """
    environment, limits = Environment.read(), limits or Limits()
    forbid_jit_builds()
    loaded, unread = _read(plan)
    name = str(plan) if loaded is None else loaded.spec.name
    store = _store(environment, limits)
    channel = StoreChannel(store, environment.rank, environment.world_size, f"live/{next(_NUMBERS)}")
    whole = None if loaded is None else loaded.with_whole_batch
    job = Job(environment, store, whole, unread, _folder(plan, checkpoints), model)
    session = Session(name, channel, limits, STAGES, speak)
    with session.catching_termination() if owns_process else contextlib.nullcontext():
        return session.run(lambda: go_through(job, session))


def _read(plan: Plan | str | Path) -> tuple[Plan | None, str]:
    """A plan that this rank cannot read is told to all, by rank 0."""
    if isinstance(plan, Plan):
        return plan, ""
    try:
        return load_plan(plan), ""
    except PlanError as error:
        return None, str(error)


def _folder(plan: Plan | str | Path, checkpoints: str | Path | None) -> Path:
    if checkpoints is not None:
        return Path(checkpoints)
    if isinstance(plan, Plan):
        return Path()
    return Path(plan) if Path(plan).is_dir() else Path(plan).parent


def _store(environment: Environment, limits: Limits) -> Any:
    if (store := store_of_world()) is not None:
        return store
    try:
        return launcher_store(environment, limits.wait_seconds)
    except RunError as error:
        # Rank 0 cannot speak for the others: rank 1 does, and the first of every further node.
        error.everywhere = environment.rank != 1 and environment.local_rank != 0
        raise
