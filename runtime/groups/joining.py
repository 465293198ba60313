"""The process groups of a plan, live."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parcompile.layout.groups import KV_REPLICA
from parcompile.plan import Plan
from parcompile.runtime.errors import RunError

from .environment import Environment, backend_of, device_of, forbid_jit_builds
from .handshake import agree, statement

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

HANDSHAKE_TIMEOUT = timedelta(seconds=float(os.environ.get("PARCOMPILE_HANDSHAKE_TIMEOUT", "120")))
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place in the plan: its coordinates, and its process group of every name."""

    plan: Plan
    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]

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

    @property
    def kv_replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same kv heads, when there are several."""
        return self.parallel_group(KV_REPLICA)


_MESH: Mesh | None = None
_LEFT = 0
"""How often this process has left a plan: what the ranks then said to each other is not for the next one."""
_STORES: dict[tuple[str, int], Store] = {}
"""The launcher's store, kept while the process lives: in rank 0 for the others, and for the next plan."""


def join(plan: Plan) -> Mesh:
    """Connects this process with the others of the plan and creates its groups. Calling it again returns the same mesh.

    Every rank creates all groups in the same order; then the groups it got are compared with the plan.

    Raises:
        RunError: the plan is not executable, is for another world size, or the ranks do not agree. Every rank raises,
        none waits.
    """
    global _MESH
    if _MESH is not None:
        if _MESH.plan.plan_hash != plan.plan_hash:
            raise RunError("this process has joined another plan already: DeepSpeed keeps one layout per process")
        return _MESH
    environment = Environment.read()
    _refuse(plan, environment)
    forbid_jit_builds()
    device = device_of(environment)
    _connect(plan, environment, device)
    groups = {name: create_group(plan, name, environment.rank) for name in plan.groups.names}
    mesh = Mesh(plan, environment.rank, device, groups)
    _compare(mesh)
    _MESH = mesh
    return mesh


def leave() -> None:
    """Disconnects, so that another plan can be joined. DeepSpeed keeps its own state: an engine needs a new process."""
    global _MESH, _LEFT
    _MESH = None
    _LEFT += 1
    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse(plan: Plan, environment: Environment) -> None:
    if plan.refusals:
        reasons = "; ".join(f"[{refusal.code}] {refusal.message}" for refusal in plan.refusals)
        raise RunError(f"the runtime does not execute this plan: {reasons}", everywhere=True)
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


def _connect(plan: Plan, environment: Environment, device: torch.device) -> None:
    mine = statement(plan.plan_hash)
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        agree(store, environment.rank, environment.world_size, mine, HANDSHAKE_TIMEOUT)
        return
    store = launcher_store(environment)
    agree(store, environment.rank, environment.world_size, mine, HANDSHAKE_TIMEOUT)
    start_world(store, environment, device)


def start_world(store: Store, environment: Environment, device: torch.device) -> None:
    """The default process group, of all ranks around the launcher's store."""
    dist.init_process_group(
        backend_of(device),
        store=dist.PrefixStore("parcompile/world", store),  # type: ignore[attr-defined]
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def launcher_store(environment: Environment, timeout: timedelta = HANDSHAKE_TIMEOUT) -> Store:
    """The launcher's rendezvous. It does not wait for all ranks: the handshake does, and can name who is missing.

    Raises:
        RunError: rank 0, which keeps it, cannot be reached within the time-out.
    """
    if not environment.launched:
        # DeepSpeed insists on this variable, which a launcher would have set.
        os.environ.setdefault("LOCAL_RANK", "0")
        return dist.HashStore()  # type: ignore[attr-defined]
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    # torchrun's agent keeps the store itself; otherwise it lives in rank 0.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _STORES.get((host, port)) or dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            environment.world_size,
            is_master=environment.rank == 0 and not agent,
            timeout=timeout,
            wait_for_workers=False,
        )
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"rank {environment.rank} cannot reach the other ranks through {host}:{port}: {reason}"
        ) from error
    _STORES[host, port] = store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt-{attempt}/{_LEFT}", store)  # type: ignore[attr-defined]


def create_group(plan: Plan, name: str, rank: int, *, others: bool = True) -> dist.ProcessGroup:
    """This rank's group of that name. Every rank creates all groups of the name, unless `others` says not to."""
    created: dist.ProcessGroup | None = None
    mine = plan.groups.of_rank(name, rank)
    if len(mine) == 1 or not others:
        # Nobody else takes part: a world of n ranks need not create n groups of one.
        created = dist.new_group(list(mine), use_local_synchronization=True)
        assert created is not None
        return created
    for ranks in plan.groups.all(name):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            created = group
    assert created is not None
    return created


def _compare(mesh: Mesh) -> None:
    for name, group in mesh.groups.items():
        live, planned = tuple(dist.get_process_group_ranks(group)), mesh.plan.groups.of_rank(name, mesh.rank)
        if live != planned:
            raise RunError(f"group {name} of rank {mesh.rank} is {list(live)}, the plan says {list(planned)}")
