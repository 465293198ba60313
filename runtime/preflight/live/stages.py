"""The stages of a check: what every rank does, and what rank 0 makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from parcompile.cost.step import timing
from parcompile.plan import Plan
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import Mesh, join, start_world
from parcompile.runtime.groups.rendezvous import Environment, device_of
from parcompile.runtime.preflight.findings import Finding, Verdict
from parcompile.runtime.preflight.live.agreement import compare_disk, compare_memory, compare_shared_memory
from parcompile.spec.values import workload_of
from parcompile.units import format_bytes, format_seconds

from .agreement import JOB, Arrived, compare_arrival, compare_places
from .facts import Facts, local_facts, marker_in
from .links import LinkMeasurements, compare_links, compare_live_groups, measure, remarks
from .session import Answer, Session
from .trial import LOSSES, STEPS, Trial, compare_trials, run_trial

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
        own = local_facts(job.environment, job.plan, job.unread, job.checkpoints).to_json()
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
        session.stage(TRIAL, lambda: run_trial(mesh, job.model).to_json(), lambda heard: _trial(session, heard))


def _join(job: Job, joined: list[Mesh]) -> list[Any]:
    assert job.plan is not None
    if not dist.is_initialized():
        start_world(job.store, job.environment, device_of(job.environment))
    joined.append(join(job.plan, watched=False))  # the session has a watch of its own
    return [one.to_wire() for one in compare_live_groups(joined[0])]


def _measure(mesh: Mesh, nodes: list[str], seconds: float) -> Answer:
    try:
        return measure(mesh.plan, mesh.device, nodes, seconds).to_json()
    except ValueError as error:
        return {"failure": str(error)}


def _arrival(job: Job, session: Session, heard: Sequence[Any]) -> Answer:
    found = session.found
    if job.plan is None:
        raise RunError(job.unread)
    own = Facts(**heard[0]["facts"])
    facts = tuple(own.of_another(said["facts"]) for said in heard if said is not None)
    found.arrived = Arrived(job.plan, session.channel.world_size, facts)
    found.findings += compare_arrival(found.arrived, session.limits.wait_seconds)
    go = not _differing(found.findings)
    found.findings += compare_places(found.arrived)
    found.findings += compare_memory(found.arrived)
    found.findings += compare_shared_memory(found.arrived)
    return {"go": go, "nodes": [one.node for one in facts], "marker": heard[0]["marker"]}


def _disk(session: Session, heard: Sequence[Any]) -> Answer:
    found = session.found
    assert found.arrived is not None
    found.findings += compare_disk(found.arrived, heard)
    return {}


def _groups(session: Session, heard: Sequence[Any]) -> Answer:
    found = session.found
    assert found.arrived is not None
    groups = [Finding.from_wire(one) for said in heard for one in said]
    found.findings += groups
    return {"go": not _differing(groups)}


def _links(job: Job, session: Session, heard: Sequence[Any]) -> Answer:
    found = session.found
    assert found.arrived is not None
    failures = [said["failure"] for said in heard if "failure" in said]
    if failures:
        found.findings.append(Finding(JOB, LINKS, "measured", "", Verdict.NOT_RUN, failures[0]))
    else:
        measured = [LinkMeasurements.from_json(said) for said in heard]
        found.findings += compare_links(found.arrived, measured)
        found.slow = remarks(found.arrived, measured)
    why = ""
    if differing := _differing(found.findings):
        why = f"the steps could hang or fail for what differs: {', '.join(dict.fromkeys(differing))}"
    elif found.arrived.plan.spec.model.shape.user_module is not None and job.model is None:
        why = "the model is a module of your own: call parcompile.runtime.live_check with model="
    if why:
        found.findings.append(Finding(JOB, LOSSES, "finite, equal", "", Verdict.NOT_RUN, why))
    return {"go": not why}


def _trial(session: Session, heard: Sequence[Any]) -> Answer:
    found = session.found
    assert found.arrived is not None
    trials = [Trial(**said) for said in heard]
    found.findings += compare_trials(found.arrived, trials)
    estimate = timing(workload_of(found.arrived.plan.spec)).step.seconds
    seconds, peak = max(one.seconds[-1] for one in trials), max(one.peak_bytes for one in trials)
    found.notes.append(
        f"step {STEPS} took {format_seconds(seconds)} on the slowest rank, the estimate is {format_seconds(estimate)}; "
        f"the fullest rank held {format_bytes(peak)}"
    )
    return {}


def _differing(findings: Sequence[Finding]) -> list[str]:
    return [one.subject for one in findings if one.verdict is Verdict.DIFFERS]
