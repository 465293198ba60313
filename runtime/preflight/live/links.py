"""Process groups and links, tried by all ranks: who answers in which order, and how quickly.

A collective takes as long as its slowest rank, on all ranks: it says that something is slow, not who. So neighbours
exchange a message in pairs too; whoever is slow with both neighbours is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parcompile.cost.coefficients import time_values
from parcompile.machines import Link
from parcompile.plan import Plan
from parcompile.runtime.groups import Mesh
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.preflight.findings import Finding, Verdict
from parcompile.runtime.profiling.links import (
    NETWORK,
    NODE,
    LinkRate,
    PairRate,
    link_classes,
    matmul_rates,
    own_link_rates,
    pair_rates,
)
from parcompile.spec.values import workload_of
from parcompile.units import format_bandwidth, format_compute, format_seconds

from .agreement import JOB, Arrived


def compare_live_groups(mesh: Mesh) -> list[Finding]:
    """Every group of this rank gathers its members' ranks, and they are those of the plan. All ranks call it."""
    found = []
    for name, group in mesh.groups.items():
        mine = torch.tensor([mesh.rank], device=mesh.device)
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, mine, group=group)
        live, planned = [int(one) for one in everyones], list(mesh.plan.groups.of_rank(name, mesh.rank))
        if live != planned:
            detail = f"group {name} of rank {mesh.rank} is {live}, the plan says {planned}"
            found.append(Finding(mesh.rank, "process groups", _ranks(planned), _ranks(live), Verdict.DIFFERS, detail))
    if not found:
        count = str(len(mesh.groups))
        found.append(Finding(mesh.rank, "process groups", count, f"{count} answered as planned", Verdict.AGREES))
    return found


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}, … {ranks[-1]}]" if len(ranks) > 8 else f"[{shown}]"


SLOW_AGAINST_PRESET = 0.5
"""Share of the rate that the estimate counts on, below which a link is called slow. Estimates err by about 10 %."""
SLOW_AGAINST_OTHERS = 0.7
"""Share of the others' median below which a node, a rank or a pair is called slow."""
COLLECTIVES = ("all-reduce",)
"""What presets are made of: `parcompile profile`."""
TITLES = {NODE: "in a node", NETWORK: "between nodes"}


@dataclass(frozen=True, slots=True)
class LinkMeasurements:
    """What one rank measured."""

    links: list[LinkRate]
    pairs: list[PairRate]
    flops_per_s: float

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> LinkMeasurements:
        """What the rank sent as the fields of this class."""
        links = [LinkRate(**one) for one in tree["links"]]
        return cls(links, [PairRate(**one) for one in tree["pairs"]], tree["flops_per_s"])


def measure(plan: Plan, device: torch.device, nodes: Sequence[str], seconds: float) -> LinkMeasurements:
    """All ranks call it together; about `seconds` are spent.

    Raises:
        ValueError: the nodes have different numbers of ranks.
    """
    products = matmul_rates(device, TORCH_DTYPES[plan.spec.training.precision], seconds / 4)
    links = own_link_rates(device, nodes, seconds / 2, COLLECTIVES)
    pairs = pair_rates(device, nodes, seconds / 4)
    return LinkMeasurements(links, pairs, max(one.per_second for one in products))


def compare_links(arrived: Arrived, measured: Sequence[LinkMeasurements]) -> Iterator[Finding]:
    """Rate and latency of each class of links against what the plan's estimate counts on."""
    plan = arrived.plan
    work = workload_of(plan.spec)
    values, machine = time_values(work), work.machine
    classes = link_classes([one.node for one in arrived.facts])
    for name, link in ((NODE, machine.node_link), (NETWORK, machine.network_link)):
        if name not in classes:
            continue
        every = zip(*(one.links for one in measured), strict=True)
        slowest = [max(rates, key=lambda one: one.seconds) for rates in every if rates[0].link == name]
        rate = max(one.bytes_per_s for one in slowest)
        counted_on = link.bytes_per_s * values[f"{name}_link"]
        whose = f"; preset {plan.spec.cluster.accelerator}: {link.title}"
        yield _rate(f"rate {TITLES[name]}", counted_on, rate, whose, format_bandwidth)
        least = min(slowest, key=lambda one: one.size)
        yield _latency(f"latency {TITLES[name]}", link, least)
    best = min(one.flops_per_s for one in measured)
    counted_on = machine.matmul_flops_per_s(work.element_bytes) * values["matmul"]
    yield _rate("matrix products", counted_on, best, ", on the slowest rank", format_compute)


def remarks(arrived: Arrived, measured: Sequence[LinkMeasurements]) -> dict[str, list[str]]:
    """What is slower than elsewhere, by node."""
    found: dict[str, list[str]] = {name: [] for name in arrived.nodes}
    nodes = [one.node for one in arrived.facts]
    usual = statistics.median(one.flops_per_s for one in measured)
    for facts, one in zip(arrived.facts, measured, strict=True):
        if one.flops_per_s < SLOW_AGAINST_OTHERS * usual:
            found[facts.node].append(
                f"rank {facts.rank}: matrix products at {one.flops_per_s / usual:.0%} of the others' rate"
            )
    for node, share in _slow_nodes(nodes, measured).items():
        found[node].append(f"links in the node at {share:.0%} of the other nodes' rate")
    for link in (NODE, NETWORK):
        pairs = [pair for one in measured for pair in one.pairs if pair.link == link]
        for rank, text in slow_pairs(pairs).items():
            found[nodes[rank]].append(f"rank {rank}: {text} ({TITLES[link]})")
    return found


def slow_pairs(pairs: Sequence[PairRate]) -> dict[int, str]:
    """Ranks that are slow with every neighbour that is not slow with all others too; a single slow pair names both.

    `pairs` holds each of them once. With fewer than three there is nothing to compare with.
    """
    if len(pairs) < 3:
        return {}
    usual = statistics.median(pair.bytes_per_s for pair in pairs)
    slow = [pair for pair in pairs if pair.bytes_per_s < SLOW_AGAINST_OTHERS * usual]
    count: dict[int, int] = {}
    for pair in slow:
        for rank in (pair.rank, pair.peer):
            count[rank] = count.get(rank, 0) + 1
    found: dict[int, str] = {}
    for pair in slow:
        share = f"{pair.bytes_per_s / usual:.0%} of the usual rate"
        most = max(count[pair.rank], count[pair.peer])
        for rank, peer in ((pair.rank, pair.peer), (pair.peer, pair.rank)):
            if count[rank] == most:
                found[rank] = f"{found[rank]}, {peer}" if rank in found else f"{share} with rank {peer}"
    return found


def _slow_nodes(nodes: Sequence[str], measured: Sequence[LinkMeasurements]) -> Mapping[str, float]:
    """Nodes whose own links are slow, with their share of the median."""
    by_node: dict[str, list[float]] = {}
    for node, one in zip(nodes, measured, strict=True):
        inside = [link.bytes_per_s for link in one.links if link.link == NODE]
        if inside:
            by_node.setdefault(node, []).append(max(inside))
    if len(by_node) < 2:
        return {}
    rates = {node: min(ranks) for node, ranks in by_node.items()}
    usual = statistics.median(rates.values())
    return {node: rate / usual for node, rate in rates.items() if rate < SLOW_AGAINST_OTHERS * usual}


def _rate(subject: str, counted_on: float, rate: float, whose: str, form: Callable[[float], str]) -> Finding:
    wrong = rate < SLOW_AGAINST_PRESET * counted_on
    detail = f"{rate / counted_on:.0%} of what the estimate counts on{whose}" if wrong else ""
    planned, found = form(counted_on), form(rate)
    return Finding(JOB, subject, planned, found, Verdict.ODD if wrong else Verdict.AGREES, detail)


def _latency(subject: str, link: Link, found: LinkRate) -> Finding:
    seconds, expected = found.seconds, link.latency_seconds
    shown = format_seconds(seconds)
    if not expected:
        return Finding(JOB, subject, "not in the preset", shown, Verdict.AGREES)
    wrong = seconds > expected / SLOW_AGAINST_PRESET
    detail = f"{seconds / expected:.1f} times the preset's, for {found.size} bytes" if wrong else ""
    return Finding(JOB, subject, format_seconds(expected), shown, Verdict.ODD if wrong else Verdict.AGREES, detail)
