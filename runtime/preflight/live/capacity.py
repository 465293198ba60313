"""Is there enough of everything that the plan needs: device and host memory, shared memory, disk for a checkpoint?

What is needed comes from the plan's estimate; what is free was looked up by every rank before anything was built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parcompile.cost.footprint import footprint
from parcompile.cost.memory import static_memory
from parcompile.plan import Plan
from parcompile.runtime.preflight.findings import Finding, Verdict
from parcompile.spec.values import workload_of
from parcompile.units import GIB, MIB, format_bytes

from .agreement import JOB, Arrived
from .facts import SHARED_MEMORY, Facts

NCCL_SHARED_BYTES = GIB
"""What containers are commonly given (`--shm-size=1g`); NCCL's ranks of a node speak through it without peer access."""
NCCL_SEGMENT_BYTES = 10 * MIB
"""About one rank's segment: a rule of thumb, not a figure of NCCL's documentation."""
MASTER_WIDTH = 4
"""Bytes of a weight of a model that is built whole, in fp32."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's device or a node's memory: what it needs at least, what it may need, and what is free."""

    rank: int
    least: float
    most: float
    free: int | None
    how: str


def compare_memory(arrived: Arrived) -> Iterator[Finding]:
    """Of devices, and of the hosts."""
    plan = arrived.plan
    found = footprint(workload_of(plan.spec))
    likely, most = found.peak.total_bytes, found.interval_bytes[1]
    devices, hosts, building = [], [], []
    for ranks in arrived.nodes.values():
        first, count = ranks[0].rank, len(ranks)
        if ranks[0].device_free_bytes is None:
            how = f"{count} ranks × {format_bytes(likely)}"
            hosts.append(_Place(first, count * likely, count * most, _least(ranks), how))
            continue
        how = f"the estimate, with an interval to {format_bytes(most)}"
        devices += [_Place(one.rank, likely, most, one.device_free_bytes, how) for one in ranks]
        # Without `model=`, `initialize` builds the whole model in the host's memory on every rank.
        whole = count * plan.parameters.numel * MASTER_WIDTH
        how = f"{count} ranks each build the whole model in fp32; load_pretrained takes slices only"
        building.append(_Place(first, 0, whole, _least(ranks), how))
    yield from _enough("device memory", devices)
    yield from _enough("memory of a node", hosts)
    yield from _enough("host memory to build the model", building)


def compare_shared_memory(arrived: Arrived) -> Iterator[Finding]:
    """Through which NCCL's ranks of a node may speak; gloo and single ranks do without."""
    places = []
    for ranks in arrived.nodes.values():
        count = len(ranks)
        if ranks[0].device_free_bytes is not None and count > 1:
            how = f"{SHARED_MEMORY} for {count} ranks; in a container: --shm-size=1g or more"
            free = ranks[0].shared_free_bytes
            places.append(_Place(ranks[0].rank, count * NCCL_SEGMENT_BYTES, NCCL_SHARED_BYTES, free, how))
    yield from _enough("shared memory of a node", places)


def compare_disk(arrived: Arrived, sees_marker: Sequence[bool]) -> Iterator[Finding]:
    """Room for one checkpoint, in one folder that all nodes share, as saving and resuming want it.

    Args:
        arrived: all ranks.
        sees_marker: of each rank, whether the file that rank 0 put into the folder is there.
    """
    refused = [one for one in arrived.facts if one.disk_failure]
    for one in refused:
        yield Finding(one.rank, "folder of checkpoints", "writable", "not writable", Verdict.DIFFERS, one.disk_failure)
    first = arrived.facts[0]
    for one, sees in zip(arrived.facts, sees_marker, strict=True):
        if not sees and not refused:
            detail = f"what rank 0 writes to {first.disk_folder} is not seen"
            yield Finding(one.rank, "folder of checkpoints", "shared", "not shared", Verdict.DIFFERS, detail)
    needed = checkpoint_bytes(arrived.plan)
    how = f"weights and optimizer states, in {first.disk_folder}"
    yield from _enough("disk for a checkpoint", [_Place(JOB, needed, needed, first.disk_free_bytes, how)])


def checkpoint_bytes(plan: Plan) -> int:
    """Weights once for each tp rank; master weights and moments of every shard. Headers of files come on top."""
    memory = static_memory(workload_of(plan.spec))
    weights = memory.numel * plan.spec.training.precision.bytes
    states = plan.spec.parallelism.zero_shards * (memory.master_bytes + memory.optimizer_bytes)
    return plan.spec.parallelism.tp * plan.spec.parallelism.pp * (weights + states)


def _least(ranks: Sequence[Facts]) -> int | None:
    """The least that a rank of the node saw: some had begun to load programs when others looked."""
    known = [one.host_free_bytes for one in ranks if one.host_free_bytes is not None]
    return min(known, default=None)


def _enough(subject: str, places: Sequence[_Place]) -> Iterator[Finding]:
    """Less than the least fails, less than the most is odd. Of places with enough, the tightest stands for all."""
    enough = []
    for one in places:
        needed = format_bytes(one.least or one.most)
        if one.free is None:
            yield Finding(one.rank, subject, needed, "not known", Verdict.NOT_RUN, "this system does not say")
        elif one.free >= one.most:
            enough.append((one.free, needed))
        else:
            verdict = Verdict.DIFFERS if one.free < one.least else Verdict.ODD
            fails = verdict is Verdict.DIFFERS
            missing = format_bytes((one.least if fails else one.most) - one.free)
            detail = f"{one.how}; {missing} more would {'do' if fails else 'be safe'}"
            yield Finding(one.rank, subject, needed, f"{format_bytes(one.free)} free", verdict, detail)
    if enough:
        free, needed = min(enough)
        more = " and more" if len(enough) > 1 else ""
        yield Finding(JOB, subject, needed, f"{format_bytes(free)} free{more}", Verdict.AGREES)
