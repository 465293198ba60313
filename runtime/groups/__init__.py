"""This rank, the other ranks, and the process groups of a plan.

Before the first collective: do all ranks run the same plan with the same versions? A collective between ranks that
disagree hangs or computes nonsense. So every rank says through the rendezvous store what it runs, rank 0 compares, and
all ranks read its verdict. Nothing here waits longer than the time-out.

DeepSpeed's names of groups are read off version 0.19.8 (utils/groups.py, runtime/engine.py,
runtime/zero/stage_1_and_2.py): data parallel is dp alone (it decides the batch), sequence data parallel is dp × cp (it
shards ZeRO and sums gradients), model parallel is tp × pp (one copy of the model). There is deliberately no
`initialize_sequence_parallel`: with it DeepSpeed counts tensor parallelism as 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parcompile.layout.groups import Axis
from parcompile.layout.pipeline import Lane, Schedule
from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.engine import forbid_jit_builds
from parcompile.runtime.errors import RunError, everywhere
from parcompile.runtime.liveness import end_watch, set_stage, watch
from parcompile.runtime.liveness.recording import name_groups, start
from parcompile.runtime.liveness.watchdog import Requests, TimedStore, Unanswered, within
from parcompile.runtime.settings import COLLECTIVE_TIMEOUT, HANDSHAKE_TIMEOUT, check_variables

from .rendezvous import (
    Environment,
    await_keys,
    device_of,
    launcher_store,
    leave_world,
    name_of_job,
    start_world,
    store_of_world,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place in the plan: its coordinates, and its process group of every name."""

    plan: Plan
    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
    lanes: dict[Lane, dist.ProcessGroup] = field(default_factory=dict)
    """The lanes of the pipeline's schedule that end or begin at this rank, each with a group of its two ranks."""

    def group(self, name: str) -> dist.ProcessGroup:
        """This rank's group of that name; a group of one is a real group too, since DeepSpeed wants one."""
        return self.groups[name]

    def size(self, name: str) -> int:
        """Ranks in that group."""
        return dist.get_world_size(self.groups[name])

    def index(self, name: str) -> int:
        """This rank's place in that group."""
        return dist.get_rank(self.groups[name])

    def parallel_group(self, name: str) -> dist.ProcessGroup | None:
        """The group for layers that do without communication when it has one rank: None then."""
        group = self.groups.get(name)
        return group if group is not None and dist.get_world_size(group) > 1 else None

    def differing_groups(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Groups that are not the plan's: the name, the ranks that are in it, and those that the plan says."""
        for name, group in self.groups.items():
            live, planned = tuple(dist.get_process_group_ranks(group)), self.plan.groups.of_rank(name, self.rank)
            if live != planned:
                yield name, live, planned


# The plan's groups under the names that DeepSpeed asks for (its "model parallel unit").


_GROUPS = {
    "data": "dp",  # copies of the model that read different data
    "model": "tp-pp",  # one copy of the model; the rank names checkpoint files
    "tensor_model": "tp",
    "pipeline_model": "pp",
    "sequence": "cp",
    "sequence_data": "dp-cp",  # shards of the optimizer state
}


class Mpu:
    """What `deepspeed.initialize(mpu=…)` takes: `get_…_parallel_world_size`, `…_rank` and `…_group` of each group."""

    def __init__(self, mesh: Mesh) -> None:
        for name, group in _GROUPS.items():
            for asked, answer in (("world_size", mesh.size), ("rank", mesh.index), ("group", mesh.group)):
                setattr(self, f"get_{name}_parallel_{asked}", partial(answer, group))
        self.get_data_parallel_group_ranks = lambda: dist.get_process_group_ranks(mesh.group("dp"))


_PREFIX = "parcompile/handshake"


def statement(plan_hash: str) -> dict[str, str]:
    """What this rank runs: the plan's hash and the versions that have to agree."""
    import deepspeed

    from parcompile import __version__

    return {
        "plan": plan_hash,
        "parcompile": __version__,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        # torch counts them in the names of further ones: where they differ, groups would never meet.
        "process groups before": str(len(dist.distributed_c10d._world.pg_names)),
    }


def agree(store: Store, rank: int, world_size: int, mine: Mapping[str, str], timeout: timedelta) -> None:
    """Returns when every rank has made the same statement.

    Raises:
        RunError: on every rank alike, when statements differ (who differs, and in what) or a rank is missing (which);
            or rank 0 answers nothing.
    """
    requests = Requests()
    try:
        verdict = within(
            timeout.total_seconds(),
            requests,
            lambda: _exchange(TimedStore(store, requests), rank, world_size, mine, timeout),
        )
    except Unanswered:
        raise RunError(
            f"rank {rank} got no answer from the store, which rank 0 or the launcher keeps at {store_place()}, for "
            f"{timeout.total_seconds():.0f} s: its process is stopped, hangs, or cannot be reached"
        ) from None
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"rank {rank} lost its connection to the store at {store_place()}: rank 0 has ended") from error
    if verdict:
        raise everywhere(verdict)


def store_place() -> str:
    """Host and port of the launcher's store, for messages."""
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"


def _exchange(store: Any, rank: int, world_size: int, mine: Mapping[str, str], timeout: timedelta) -> str:
    """The verdict, after every rank has read it if it is not empty."""
    store.set(f"{_PREFIX}/{rank}", json.dumps(dict(mine)))
    if rank == 0:
        store.set(f"{_PREFIX}/verdict", _verdict(store, world_size, mine, timeout))
    # Rank 0 itself waits for the others that long; its verdict comes after.
    if not await_keys(store, [f"{_PREFIX}/verdict"], timeout * 2):
        raise RunError(f"rank {rank} heard nothing from rank 0 within {(timeout * 2).total_seconds():.0f} s")
    verdict: str = store.get(f"{_PREFIX}/verdict").decode()
    if verdict:
        _let_all_read(store, rank, world_size)
    return verdict


def _let_all_read(store: Any, rank: int, world_size: int) -> None:
    """Keeps rank 0, in whose process the store may live, until the others have read why the run ends."""
    store.set(f"{_PREFIX}/read/{rank}", "")
    if rank == 0:
        await_keys(store, [f"{_PREFIX}/read/{other}" for other in range(world_size)], timedelta(seconds=10))


def _verdict(store: Any, world_size: int, mine: Mapping[str, str], timeout: timedelta) -> str:
    """Empty when all agree."""
    keys = [f"{_PREFIX}/{rank}" for rank in range(world_size)]
    if not await_keys(store, keys, timeout):
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        return f"rank {', '.join(missing)} of {world_size} did not report within {timeout.total_seconds():.0f} s"
    differing: dict[tuple[str, str], list[int]] = {}
    for rank, key in enumerate(keys):
        try:
            theirs = dict(json.loads(store.get(key)))
        except (ValueError, TypeError):
            return (
                f"what stands in the store for rank {rank} is no statement of parcompile: is the store another job's?"
            )
        for name, value in mine.items():
            if theirs.get(name) != value:
                differing.setdefault((name, str(theirs.get(name))), []).append(rank)
    if not differing:
        return ""
    parts = [
        f"rank {', '.join(map(str, ranks))} has {name} {value}, rank 0 has {mine[name]}"
        for (name, value), ranks in differing.items()
    ]
    return "the ranks do not run the same: " + "; ".join(parts)


_mesh: Mesh | None = None


def join(plan: Plan, *, watched: bool = True) -> Mesh:
    """Connects this process with the others of the plan and creates its groups. Calling it again returns the same mesh.

    Every rank creates its groups in the order of their names; then those it got are compared with the plan.

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
    start(environment.rank, environment.world_size, statement(plan.plan_hash))
    _connect(plan, environment, device, watched)
    mesh = create_groups(plan, environment.rank, device)
    for name, live, planned in mesh.differing_groups():
        raise RunError(f"group {name} of rank {mesh.rank} is {list(live)}, the plan says {list(planned)}")
    name_groups({**{f"pp lane {one.sender}-{one.receiver}": group for one, group in mesh.lanes.items()}, **mesh.groups})
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
        raise everywhere(f"the runtime does not execute this plan: {reasons}")


def _check_world(plan: Plan, environment: Environment) -> None:
    if plan.world_size != environment.world_size:
        cluster = plan.spec.cluster
        how = (
            f"start {cluster.gpus_per_node} ranks on each of {cluster.nodes} node(s) "
            f"(deepspeed --num_gpus {cluster.gpus_per_node} …), or compile the spec for {environment.world_size}"
        )
        raise everywhere(
            f"plan {plan.spec.name!r} is for {plan.world_size} ranks, this job has {environment.world_size}: {how}"
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


def create_groups(plan: Plan, rank: int, device: torch.device) -> Mesh:
    """This rank's place with its groups: it creates these, and no others, in the order in which all ranks do.

    The members of a group meet through the store; nobody else takes part, so that the time does not grow with the
    number of groups in the world. On GPUs the communicators are made here too, in the same order.
    """
    planned = {name: plan.groups.of_rank(name, rank) for name in plan.groups.names}
    groups = {name: _create_group(ranks, rank) for name, ranks in planned.items()}
    mine = {name: groups[name] for name, ranks in planned.items() if ranks}
    lanes = create_lanes(plan.spec.schedule, planned[Axis.PP], rank)
    for group in (*mine.values(), *lanes.values()):
        connect(group, device)
    return Mesh(plan, rank, device, mine, lanes)


def create_lanes(schedule: Schedule, pipeline: Sequence[int], rank: int) -> dict[Lane, dist.ProcessGroup]:
    """This rank's lanes, in the order in which both ranks of each make its communicator.

    Args:
        schedule: of the pipeline.
        pipeline: its ranks.
        rank: this one.
    """
    found = {}
    for lanes in schedule.lanes():
        of_ranks = {lane: (pipeline[lane.sender], pipeline[lane.receiver]) for lane in lanes}
        mine = next((lane for lane, ranks in of_ranks.items() if rank in ranks), None)
        group = _create_group(() if mine is None else sorted(of_ranks[mine]), rank)
        if mine is not None:
            found[mine] = group
    return found


def _create_group(members: Sequence[int], rank: int) -> dist.ProcessGroup:
    """A group of these ranks; of this rank alone when there are none.

    torch names such a group by its ranks and by how many groups this process has, so every rank has to have as many.
    """
    ranks = list(members) or [rank]
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT.seconds())
    created: dist.ProcessGroup | None = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert created is not None
    return created


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes the communicator of a group, which NCCL otherwise makes at the first message of its ranks.

    All ranks make theirs in one order, so that none waits for another that is in a different group; and what a network
    refuses is known before the first step. One rank alone needs none.
    """
    if device.type in ("cpu", "meta") or dist.get_world_size(group) == 1:
        return
    make: Any = getattr(group._get_backend(device), "eager_connect_single_device", None)
    if make is not None:
        make(device)
