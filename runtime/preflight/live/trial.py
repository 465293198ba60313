"""What all ranks try together: their process groups, their links, and two steps of the real model on random data.

A collective takes as long as its slowest rank, on all ranks: it says that something is slow, not who. So neighbours
exchange a message in pairs too; whoever is slow with both neighbours is named.

Steps run the engine that training uses, every layer, every message. All sequences are the same, so every replica of the
model has to compute the same loss: a replica that computes another one is found too, and not only one that fails.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.cost.coefficients import time_values
from parcompile.machines import Link
from parcompile.plan import Plan
from parcompile.runtime.drawing import trains_at_random
from parcompile.runtime.engine import initialize
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.injection import random_model
from parcompile.runtime.model.text_head import TORCH_DTYPES
from parcompile.runtime.preflight.findings import Finding, Verdict, group_in_words
from parcompile.runtime.profiling.links import (
    NETWORK,
    NODE,
    LinkRate,
    PairRate,
    link_classes,
    matmul_rates,
    own_link_rates,
    pair_rates,
    synchronize,
)
from parcompile.runtime.profiling.recorder import forget_peak, peak_bytes
from parcompile.runtime.transport.backend import gather_tensors
from parcompile.spec import Precision
from parcompile.spec.values import workload_of
from parcompile.units import format_bandwidth, format_compute, format_seconds

from .agreement import JOB, Arrived


def compare_live_groups(mesh: Mesh) -> list[Finding]:
    """Every group of this rank gathers its members' ranks, and they are those of the plan. All ranks call it."""
    found = []
    for name, group in mesh.groups.items():
        everyones = gather_tensors(torch.tensor([mesh.rank], device=mesh.device), group)
        live, planned = [int(one) for one in everyones], list(mesh.plan.groups.of_rank(name, mesh.rank))
        if live != planned:
            detail = f"group {name} of rank {mesh.rank} is {live}, the plan says {planned}"
            both = group_in_words(planned), group_in_words(live)
            found.append(Finding(mesh.rank, "process groups", *both, Verdict.DIFFERS, detail))
    if not found:
        count = str(len(mesh.groups))
        found.append(Finding(mesh.rank, "process groups", count, f"{count} answered as planned", Verdict.AGREES))
    return found


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
        yield _latency(f"latency {TITLES[name]}", link, min(slowest, key=lambda one: one.size))
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
        if inside := [link.bytes_per_s for link in one.links if link.link == NODE]:
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


STEPS = 2
LOSSES = f"losses of {STEPS} steps"
TOLERANCES = {Precision.FP32: 1e-5, Precision.BF16: 1e-3, Precision.FP16: 1e-3}
"""Relative, between replicas with the same weights and data: kernels may add in another order."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one rank saw of the steps. `losses` are its own, as `parcompile.runtime.loss` divides them."""

    losses: list[float]
    norms: list[float]
    """Of the gradients; of all ranks together."""
    seconds: list[float]
    peak_bytes: int
    at_random: bool
    """Something is drawn in training, such as dropout: equal samples give other losses."""


def run_trial(mesh: Mesh, build: Callable[[], nn.Module] | None) -> Trial:
    """`STEPS` optimizer steps with all their micro-batches. All ranks call it together.

    Raises:
        RunError: the model cannot be built, injected or run.
    """
    plan = mesh.plan
    training = plan.spec.training
    generator = torch.Generator().manual_seed(training.seed)
    tokens = torch.randint(plan.spec.model.shape.vocab_size, (training.sequence_length,), generator=generator)
    model = random_model(plan) if build is None else build()
    engine, _, loader, _ = initialize(
        plan=plan, model=model, training_data=[tokens], measurements=False, stop_on_nonfinite=None
    )
    assert loader is not None
    # Building the model may have taken more than training does.
    forget_peak(mesh.device)
    losses, norms, seconds, batches = [], [], [], iter(loader)
    for _ in range(STEPS):
        synchronize(mesh.device)
        started = time.perf_counter()
        with engine.loop.together():
            ended = engine.loop.train(batches)
            losses.append(_of_pipeline(ended, mesh) / training.gradient_accumulation_steps)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        synchronize(mesh.device)
        seconds.append(time.perf_counter() - started)
    peak, at_random = peak_bytes(mesh.device), trains_at_random(engine.module)
    engine.destroy()
    del engine, loader, batches, model
    gc.collect()
    if mesh.device.type != "cpu":
        torch.cuda.empty_cache()
    return Trial(losses, norms, seconds, peak, at_random)


def _of_pipeline(losses: Sequence[Tensor], mesh: Mesh) -> float:
    """The sum of the losses of this rank's micro-batches, wherever in its pipeline they ended."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in losses:
        total += loss
    if (group := mesh.parallel_group("pp")) is not None:
        dist.broadcast(total, group=group, group_src=mesh.size("pp") - 1)
    return float(total)


def compare_trials(arrived: Arrived, trials: Sequence[Trial]) -> Iterator[Finding]:
    """Losses and gradient norms are finite on every rank, and equal wherever they have to be."""
    precision = arrived.plan.spec.training.precision
    if precision is Precision.FP16:
        # A dynamic loss scale starts so high that the first steps overflow: only losses say something.
        trials = [replace(one, norms=[]) for one in trials]
    finite = [all(map(math.isfinite, [*one.losses, *one.norms])) for one in trials]
    own = [all(map(math.isfinite, one.losses)) for one in trials]
    for facts, one, good, mine in zip(arrived.facts, trials, finite, own, strict=True):
        # Norms are of all ranks together: those of others show a loss that broke elsewhere.
        if not good and (not mine or all(own)):
            what = "loss" if not mine else "gradient norm"
            broken = _listed(one.norms if mine else one.losses)
            detail = f"{what} of each step, node {facts.node}"
            yield Finding(facts.rank, LOSSES, "finite", broken, Verdict.DIFFERS, detail)
    if not all(finite):
        return
    tolerance = TOLERANCES[precision]
    replicas = _replicas(arrived.plan, trials)
    usual = [statistics.median(values[step] for values in replicas.values()) for step in range(STEPS)]
    norm = [statistics.median(step) for step in zip(*(one.norms for one in trials), strict=True)]
    for ranks, values in replicas.items():
        for rank in ranks:
            same = _near(values, usual, tolerance) and _near(trials[rank].norms, norm, tolerance)
            detail = ""
            if not same:
                detail = (
                    f"node {arrived.facts[rank].node}, with the same weights and data as the others; gradient norms "
                    f"{_listed(trials[rank].norms) or 'not compared'}, elsewhere {_listed(norm) or 'not compared'}"
                )
            verdict = Verdict.AGREES if same else Verdict.DIFFERS
            yield Finding(rank, LOSSES, _listed(usual), _listed(values), verdict, detail)


def _replicas(plan: Plan, trials: Sequence[Trial]) -> dict[tuple[int, ...], list[float]]:
    """The loss of each step by the ranks that compute it together: a cp group. Its parts are added.

    With dropout, masks of other samples are others: only the tp ranks of one replica are comparable then, so that every
    value is divided by its replica's.
    """
    groups = plan.groups
    found: dict[tuple[int, ...], list[float]] = {}
    for rank in range(len(trials)):
        ranks = tuple(groups.of_rank("cp", rank))
        found[ranks] = [math.fsum(trials[one].losses[step] for one in ranks) for step in range(STEPS)]
    if not any(trial.at_random for trial in trials):
        return found
    firsts = {ranks: tuple(groups.of_rank("cp", groups.of_rank("tp", ranks[0])[0])) for ranks in found}
    return {
        ranks: [value / first for value, first in zip(values, found[firsts[ranks]], strict=True)]
        for ranks, values in found.items()
    }


def _near(values: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(values, others, strict=True))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.7g}" for value in values)
