"""The live check of a job, called by a training script or by the command line."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from parcompile.plan import Plan, PlanError, load_plan
from parcompile.runtime.deepspeed_patches.engine import forbid_jit_builds
from parcompile.runtime.errors import RunError
from parcompile.runtime.groups import launcher_store, store_of_world
from parcompile.runtime.groups.rendezvous import Environment
from parcompile.runtime.liveness.watchdog import StoreChannel

from .report import LiveReport
from .session import Limits, Outcome, Session
from .stages import STAGES, Job, go_through

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
    found = check_job(plan, speak=_to_stderr, checkpoints=checkpoints, model=model, limits=limits)
    if found.passed:
        return found.report
    raise RunError(found.reason if found.report is None else found.report.text(), everywhere=True)


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
    job = Job(environment, store, loaded, unread, _folder(plan, checkpoints), model)
    session = Session(name, channel, limits, STAGES, speak)
    with session.watch.of_termination() if owns_process else contextlib.nullcontext():
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


def _to_stderr(report: LiveReport) -> None:
    print(f"parcompile: {report.text()}", file=sys.stderr, flush=True)  # noqa: T201 -- it is for the user
