"""Compares on rank 0 what all ranks reported: do they run the same, on the nodes where the plan puts them?

Each rank is compared with what most ranks report, so that one rank that differs is named and not all the others.
What all stages found is one report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompile.backends.artefacts import variables
from parcompile.cost.footprint import footprint
from parcompile.cost.memory import static_memory
from parcompile.cost.offload import host_memory, node_bytes
from parcompile.cost.table import columns
from parcompile.plan import Plan
from parcompile.runtime.preflight.findings import (
    Finding,
    Verdict,
    finding_tree,
    merged,
    ranks_in_words,
    shown_ranks,
    table,
)
from parcompile.runtime.preflight.live.facts import SHARED_MEMORY, Facts
from parcompile.spec.values import workload_of
from parcompile.units import GIB, MIB, format_bytes

JOB = -1
"""In the place of a rank: of the job as a whole."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The ranks that came, and what rank 0 knows of the plan."""

    plan: Plan
    world_size: int
    facts: tuple[Facts, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that the launcher speaks of and that never came."""
        here = {one.rank for one in self.facts}
        return tuple(rank for rank in range(self.world_size) if rank not in here)

    @property
    def nodes(self) -> dict[str, tuple[Facts, ...]]:
        """Ranks by node, in the order of their ranks."""
        found: dict[str, list[Facts]] = {}
        for one in self.facts:
            found.setdefault(one.node, []).append(one)
        return {name: tuple(ranks) for name, ranks in found.items()}


def compare_arrival(arrived: Arrived, waited_seconds: float) -> Iterator[Finding]:
    """Everything without which ranks cannot speak to each other: who is there, and what they run."""
    yield from _compare_presence(arrived, waited_seconds)
    yield from _same(arrived, "plan", lambda one: _short(one.plan), wanted=_short(arrived.plan.plan_hash))
    for name in dict.fromkeys(name for one in arrived.facts for name in one.versions):
        yield from _same(arrived, name, lambda one, name=name: one.versions.get(name, "none"))  # type: ignore[misc]
    yield from _compare_precision(arrived)
    for one in arrived.facts:
        if one.failure:
            yield Finding(one.rank, "device", "usable", "not usable", Verdict.DIFFERS, one.failure)
    for refusal in arrived.plan.refusals:
        yield Finding(JOB, f"[{refusal.code}]", "executed", "refused", Verdict.DIFFERS, refusal.message)


def compare_places(arrived: Arrived) -> Iterator[Finding]:
    """Are ranks on the nodes on which the plan puts them, on like devices, with the plan's environment?"""
    per_node = arrived.plan.spec.cluster.gpus_per_node
    for index in range(-(-arrived.world_size // per_node)):
        planned = range(index * per_node, (index + 1) * per_node)
        hosts = dict.fromkeys(one.node for one in arrived.facts if one.rank in planned)
        if len(hosts) > 1:
            detail = "the plan counts on links within a node there: number ranks node by node"
            found = f"{len(hosts)} nodes: {', '.join(list(hosts)[:4])}"
            yield Finding(planned[0], f"ranks {planned[0]} to {planned[-1]}", "1 node", found, Verdict.DIFFERS, detail)
    for ranks in arrived.nodes.values():
        if len(ranks) > per_node:
            detail = f"they share what the plan gives to {per_node}"
            yield Finding(ranks[0].rank, "ranks on a node", str(per_node), str(len(ranks)), Verdict.ODD, detail)
    yield from _same(arrived, "device", lambda one: one.device, verdict=Verdict.ODD)
    for variable in variables(arrived.plan):
        yield from _same(
            arrived,
            variable.name,
            lambda one, name=variable.name: one.variables.get(name) or "not set",  # type: ignore[misc]
            wanted=variable.value,
            verdict=Verdict.ODD,
            why=variable.why,
        )


def _compare_presence(arrived: Arrived, waited_seconds: float) -> Iterator[Finding]:
    planned, came = arrived.plan.world_size, len(arrived.facts)
    if arrived.world_size != planned:
        cluster = arrived.plan.spec.cluster
        yield Finding(
            JOB,
            "ranks of the job",
            str(planned),
            str(arrived.world_size),
            Verdict.DIFFERS,
            f"start {cluster.gpus_per_node} on each of {cluster.nodes} node(s), or compile the spec for "
            f"{arrived.world_size}",
        )
    wrong = []
    if arrived.missing:
        wrong.append(f"{ranks_in_words(arrived.missing)} did not report within {waited_seconds:.0f} s")
        wrong += _where(arrived)
    if elsewhere := [one.rank for one in arrived.facts if one.world_size != arrived.world_size]:
        wrong.append(f"{ranks_in_words(elsewhere)} has another WORLD_SIZE than rank 0, {arrived.world_size}")
    verdict = Verdict.DIFFERS if wrong else Verdict.AGREES
    yield Finding(JOB, "ranks that came", str(arrived.world_size), str(came), verdict, "; ".join(wrong))


def _where(arrived: Arrived) -> Iterator[str]:
    """Where missing ranks should be: on the node of their neighbours in the plan, or on one of which nobody came."""
    per_node = arrived.plan.spec.cluster.gpus_per_node
    hosts = {one.rank // per_node: one.node for one in arrived.facts}
    for index in dict.fromkeys(rank // per_node for rank in arrived.missing):
        ranks = [rank for rank in arrived.missing if rank // per_node == index]
        if index in hosts:
            yield f"{ranks_in_words(ranks)} belongs on node {hosts[index]}, whose other ranks came"
        else:
            yield f"nobody came from node {index} of the plan (rank {index * per_node} and following)"


def _compare_precision(arrived: Arrived) -> Iterator[Finding]:
    wanted = arrived.plan.spec.training.precision.value
    for one in arrived.facts:
        able = wanted in one.dtypes
        detail = "" if able else f"a product in {wanted} does not come out right on {one.device}"
        verdict = Verdict.AGREES if able else Verdict.DIFFERS
        yield Finding(one.rank, "precision", wanted, ", ".join(one.dtypes) or "none", verdict, detail)


def _same(
    arrived: Arrived,
    subject: str,
    said: Callable[[Facts], str],
    *,
    wanted: str | None = None,
    verdict: Verdict = Verdict.DIFFERS,
    why: str = "",
) -> Iterator[Finding]:
    """Every rank says what is wanted, or what most say."""
    if wanted is None:
        wanted = Counter(said(one) for one in arrived.facts).most_common(1)[0][0]
    for one in arrived.facts:
        value = said(one)
        same = value == wanted
        yield Finding(one.rank, subject, wanted, value, Verdict.AGREES if same else verdict, "" if same else why)


def _short(said: str) -> str:
    """Enough of a plan's hash to tell it from another; why a plan cannot be read is said in full."""
    return said[:19] if said.startswith("sha256:") else said


NCCL_SHARED_BYTES = GIB
"""What containers are commonly given (`--shm-size=1g`); NCCL's ranks of a node speak through it without peer access."""
NCCL_SEGMENT_BYTES = 10 * MIB
"""About one rank's segment: a rule of thumb, not a figure of NCCL's documentation."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's device or a node's memory: what it needs at least, what it may need, and what is free."""

    rank: int
    least: float
    most: float
    free: int | None
    how: str


def _part_bytes(plan: Plan) -> int:
    """Of the largest part of a model that is drawn at once, in fp32: a layer, or all that lies outside of layers."""
    table = plan.parameters
    layers = Counter[int]()
    for parameter in table.layer:
        for layer in parameter.layers or ():
            layers[layer] += parameter.numel
    return 4 * max(*layers.values(), sum(one.numel for one in (*table.before, *table.after)))


def compare_memory(arrived: Arrived) -> Iterator[Finding]:
    """Of devices, and of the hosts."""
    plan = arrived.plan
    work = workload_of(plan.spec)
    found = footprint(work)
    likely, most = found.peak.total_bytes, found.interval_bytes[1]
    devices, hosts, building, optimizers = [], [], [], []
    for ranks in arrived.nodes.values():
        first, count = ranks[0].rank, len(ranks)
        if ranks[0].device_free_bytes is None:
            how = f"{count} ranks × {format_bytes(likely)}"
            hosts.append(_Place(first, count * likely, count * most, _least(ranks), how))
            continue
        how = f"the estimate, with an interval to {format_bytes(most)}"
        devices += [_Place(one.rank, likely, most, one.device_free_bytes, how) for one in ranks]
        held = count * (max(numel for numel, _ in work.stage_numels) * work.element_bytes + _part_bytes(plan))
        how = f"{count} ranks each hold their slices, and while they draw first weights a part of the model in fp32"
        building.append(_Place(first, 0, held, _least(ranks), how))
        if kept := node_bytes(work):
            how = f"what {count} ranks keep on the host: optimizer and gradients, or activations"
            optimizers.append(_Place(first, kept, kept, _least(ranks), how))
    yield from _enough("device memory", devices)
    yield from _enough("memory of a node", hosts)
    yield from _enough("host memory to build the model", building)
    yield from _enough("host memory for what ranks keep there", optimizers)


def compare_cpu_adam(arrived: Arrived) -> Iterator[Finding]:
    """Whether each host has DeepSpeedCPUAdam compiled, or can do it, where the plan takes it."""
    subject, asked = "DeepSpeedCPUAdam", [one for one in arrived.facts if one.cpu_adam is not None]
    for one in asked:
        if one.cpu_adam_failure:
            detail = f"on {one.node} {one.cpu_adam_failure}"
            yield Finding(one.rank, subject, "can be compiled", "cannot", Verdict.DIFFERS, detail)
    if asked and not any(one.cpu_adam_failure for one in asked):
        waiting = {one.node for one in asked if not one.cpu_adam}
        found = f"not yet on {len(waiting)} host(s): a minute or more" if waiting else "compiled"
        yield Finding(JOB, subject, "compiled, or can be", found, Verdict.AGREES)


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
    host = host_memory(workload_of(plan.spec)) or memory
    states = plan.spec.parallelism.zero_shards * (host.master_bytes + host.optimizer_bytes)
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


MOST_NODES = 64
"""So many nodes are listed; of more, those of which there is something to say come first."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as it reported, with its ranks and what is slow or odd about it."""

    name: str
    ranks: tuple[int, ...]
    device: str
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveReport:
    """Everything that the ranks of a job found before their first step."""

    plan: str
    world_size: int
    findings: tuple[Finding, ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    reason: str = ""
    """Why the check ended before its end; empty when it was gone through."""

    @property
    def passed(self) -> bool:
        """Whether the run can start: nothing differs, and the check was gone through."""
        return not self.reason and all(one.verdict is not Verdict.DIFFERS for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "plan": self.plan,
            "world_size": self.world_size,
            "passed": self.passed,
            "reason": self.reason,
            "notes": list(self.notes),
            "findings": [
                finding_tree(one, [rank for rank in ranks if rank != JOB]) for one, ranks in merged(self.findings)
            ],
            "nodes": [
                {"name": one.name, "ranks": list(one.ranks), "device": one.device, "remarks": list(one.remarks)}
                for one in self.nodes
            ],
        }

    def text(self) -> str:
        """For people: a table, then what differs or is odd with its reason, then the nodes."""
        world = f"{self.world_size:,} rank{'s' if self.world_size > 1 else ''}"
        lines = [f"live preflight of {self.plan}: {world} on {len(self.nodes)} node(s)", *self.notes]
        lines += ["", *table(self.findings, "needed", self._who)]
        lines += ["", *_table_of(self.nodes)] if self.nodes else []
        return "\n".join([*lines, "", self.conclusion])

    def _who(self, ranks: Sequence[int]) -> str:
        return "all" if tuple(ranks) == (JOB,) or len(ranks) == self.world_size else shown_ranks(ranks)

    @property
    def conclusion(self) -> str:
        """In one line."""
        differing = len(merged(one for one in self.findings if one.verdict is Verdict.DIFFERS))
        odd = len(merged(one for one in self.findings if one.verdict is Verdict.ODD))
        ended = f"ended early: {self.reason}; " if self.reason else ""
        found = f"{differing} comparison(s) differ" if differing else "what was compared agrees"
        return f"{ended}{found}; {odd} slow or odd" if odd else f"{ended}{found}"


def nodes_of(arrived: Arrived, findings: Sequence[Finding], slow: Mapping[str, Sequence[str]]) -> tuple[Node, ...]:
    """Every node, with what was found odd about its ranks and what is slower there than elsewhere."""
    homes = {one.rank: one.node for one in arrived.facts}
    odd: dict[tuple[str, str, str], list[int]] = {}
    for one in findings:
        if one.verdict in (Verdict.DIFFERS, Verdict.ODD) and one.rank in homes:
            odd.setdefault((homes[one.rank], one.subject, one.found), []).append(one.rank)
    remarks: dict[str, list[str]] = {name: [] for name in arrived.nodes}
    for (node, subject, found), ranks in odd.items():
        remarks[node].append(f"{ranks_in_words(ranks)}: {subject} {found}")
    for node, said in remarks.items():
        said += slow.get(node, ())
    return tuple(
        Node(name, tuple(one.rank for one in ranks), f"{len(ranks)} × {ranks[0].device}", tuple(said))
        for (name, ranks), said in zip(arrived.nodes.items(), remarks.values(), strict=True)
    )


def _table_of(nodes: Sequence[Node]) -> list[str]:
    first = sorted(nodes, key=lambda one: not one.remarks)[:MOST_NODES] if len(nodes) > MOST_NODES else nodes
    rows = ((one.name, shown_ranks(one.ranks), one.device, "; ".join(one.remarks) or "nothing") for one in first)
    lines = columns([("node", "ranks", "device", "slow or odd"), *rows])
    more = len(nodes) - len(first)
    return [*lines, f"and {more:,} more nodes"] if more else lines
