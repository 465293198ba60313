"""Compares on rank 0 what all ranks reported: do they run the same, on the nodes where the plan puts them?

Each rank is compared with what most ranks report, so that one rank that differs is named and not all the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from parcompile.backends.artefacts import variables
from parcompile.plan import Plan
from parcompile.runtime.preflight.findings import Finding, Verdict, ranks_in_words

from .facts import Facts

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
    elsewhere = [one.rank for one in arrived.facts if one.world_size != arrived.world_size]
    if elsewhere:
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
