"""Two steps of the real model on random data: the engine that training uses, every layer, every message.

All sequences are the same, so every replica of the model has to compute the same loss: a replica that computes another
one is found too, and not only one that fails.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parcompile.plan import Plan
from parcompile.runtime.drawing import trains_at_random
from parcompile.runtime.engine import initialize
from parcompile.runtime.groups import Mesh
from parcompile.runtime.inject.injection import random_model
from parcompile.runtime.preflight.findings import Finding, Verdict
from parcompile.runtime.profiling.links import synchronize
from parcompile.runtime.profiling.recorder import forget_peak, peak_bytes
from parcompile.spec import Precision

from .agreement import Arrived

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
