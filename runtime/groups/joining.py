"""Joins the other ranks of a plan: the handshake, the world, and the plan's process groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from parcompile.layout.grid import Axis
from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches import forbid_jit_builds
from parcompile.runtime.errors import RunError
from parcompile.runtime.liveness import end_watch, set_stage, watch
from parcompile.runtime.settings import COLLECTIVE_TIMEOUT, HANDSHAKE_TIMEOUT, check_variables

from .environment import Environment, device_of
from .handshake import agree, statement
from .mesh import Mesh
from .rendezvous import launcher_store, leave_world, name_of_job, start_world, store_of_world

_mesh: Mesh | None = None


def join(plan: Plan, *, watched: bool = True) -> Mesh:
    """Connects this process with the others of the plan and creates its groups. Calling it again returns the same mesh.

    Every rank creates all groups in the same order; then the groups it got are compared with the plan.

    Args:
        plan: the same on all ranks.
        watched: send heartbeats, and end when a rank is lost. False: somebody else watches over the ranks.

    Raises:
        RunError: the plan is not executable, is for another world size, or the ranks do not agree. Every rank raises,
        none waits.
    """
    global _mesh
    if _mesh is not None:
        if _mesh.plan.plan_hash != plan.plan_hash:
            raise RunError("this process has joined another plan already: DeepSpeed keeps one layout per process")
        return _mesh
    environment = Environment.read()
    check_variables()
    check_executable(plan)
    _check_world(plan, environment)
    forbid_jit_builds()
    device = device_of(environment)
    _connect(plan, environment, device, watched)
    mesh = create_groups(plan, environment.rank, device)
    for name, live, planned in mesh.differing_groups():
        raise RunError(f"group {name} of rank {mesh.rank} is {list(live)}, the plan says {list(planned)}")
    set_stage(mesh.index("pp") if mesh.size("pp") > 1 else None)
    _mesh = mesh
    return mesh


def leave() -> None:
    """Disconnects, so that another plan can be joined. DeepSpeed keeps its own state: an engine needs a new process."""
    global _mesh
    _mesh = None
    end_watch()
    leave_world()


def check_executable(plan: Plan) -> None:
    """Refuses a plan that the runtime does not execute.

    Raises:
        RunError: it does not; all reasons are named.
    """
    if plan.refusals:
        reasons = "; ".join(f"[{refusal.code}] {refusal.message}" for refusal in plan.refusals)
        raise RunError(f"the runtime does not execute this plan: {reasons}", everywhere=True)


def _check_world(plan: Plan, environment: Environment) -> None:
    if plan.world_size != environment.world_size:
        cluster = plan.spec.cluster
        how = (
            f"start {cluster.gpus_per_node} ranks on each of {cluster.nodes} node(s) "
            f"(deepspeed --num_gpus {cluster.gpus_per_node} …), or compile the spec for {environment.world_size}"
        )
        raise RunError(
            f"plan {plan.spec.name!r} is for {plan.world_size} ranks, this job has {environment.world_size}: {how}",
            everywhere=True,
        )


def _connect(plan: Plan, environment: Environment, device: torch.device, watched: bool) -> None:
    mine, world = statement(plan.plan_hash), store_of_world()
    # Where the user has made the world, an earlier plan of this process has left its messages in the store.
    store = launcher_store(environment) if world is None else dist.PrefixStore(name_of_job(), world)  # type: ignore[attr-defined]
    agree(store, environment.rank, environment.world_size, mine, timedelta(seconds=HANDSHAKE_TIMEOUT.seconds()))
    if watched:
        watch(store, environment.rank, environment.world_size, name_of_job())
    if world is None:
        start_world(store, environment, device)


def create_groups(plan: Plan, rank: int, device: torch.device, *, others: bool = True) -> Mesh:
    """This rank's place with its groups. Every rank creates all of them, unless `others` says not to."""
    groups = {}
    for name in plan.groups.names:
        group = _create_group(plan, name, rank, others=others)
        if group is not None:
            groups[name] = group
    lanes = []
    for _ in range(plan.spec.schedule.lanes):
        lane = _create_group(plan, Axis.PP, rank, others=others)
        assert lane is not None
        lanes.append(lane)
    return Mesh(plan, rank, device, groups, tuple(lanes))


def _create_group(plan: Plan, name: str, rank: int, *, others: bool) -> dist.ProcessGroup | None:
    """This rank's group of that name; None when it is in none."""
    created: dist.ProcessGroup | None = None
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT.seconds())
    mine = plan.groups.of_rank(name, rank)
    if not mine and not others:
        return None
    if len(mine) == 1 or not others:
        # Nobody else takes part: a world of n ranks need not create n groups of one.
        created = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True)
        assert created is not None
        return created
    for ranks in plan.groups.all(name):
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            created = group
    return created
