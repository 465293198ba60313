"""The schedule of a step, pass by pass, takes the time that the estimate's closed form says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from parcompile.cost.step import timing
from parcompile.cost.workload import Workload
from parcompile.plan import load_plan
from parcompile.show.pictures.timeline import MOST_PASSES, timetable
from parcompile.spec.values import workload_of

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def work() -> Workload:
    found = workload_of(load_plan(GOLDEN / "llama-3-70b-512-gpus").spec)
    return replace(found, stage_layers=None)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 32, 4000])
def test_1f1b_takes_what_the_estimate_says(work: Workload, pp: int, micro_batches: int) -> None:
    one = replace(work, pp=pp, dp=64 // pp, micro_batches=micro_batches)
    step = timing(one).step
    laid = timetable(one, step)
    # Stages are even but for the head, which is on the last one: the closed form is exact.
    assert laid.seconds == pytest.approx(step.seconds - step.gradients - step.optimizer, rel=1e-9)
    assert len(laid.passes) <= 2 * MOST_PASSES
    assert laid.left_out == micro_batches - len(laid.passes) // (2 * pp)


@pytest.mark.parametrize("virtual", [2, 5])
def test_interleaving_shortens_the_bubble(work: Workload, virtual: int) -> None:
    one = replace(work, pp=4, dp=16, virtual_stages=virtual, micro_batches=16)
    step = timing(one).step
    laid = timetable(one, step)
    # The closed form counts the exchanges of the bubble once for each virtual stage: at most 2 (p - 1) v hops more.
    hops = step.exchange * (one.pp - 1) / (one.micro_batches + one.pp - 1)
    estimate = step.seconds - step.gradients - step.optimizer
    assert estimate - hops <= laid.seconds <= estimate
    plain = replace(one, virtual_stages=1)
    assert laid.idle_share < timetable(plain, timing(plain).step).idle_share


def test_each_pass_starts_after_what_it_needs_and_no_stage_does_two_at_once(work: Workload) -> None:
    one = replace(work, pp=4, dp=16, virtual_stages=2, micro_batches=8)
    laid = timetable(one, timing(one).step)
    stops = {(p.forward, p.chunk * 4 + p.stage, p.micro_batch): p.stop for p in laid.passes}
    assert len(stops) == len(laid.passes) == 2 * 8 * 2 * 4
    for p in laid.passes:
        here = p.chunk * 4 + p.stage
        before = (True, here - 1, p.micro_batch) if p.forward else (False, here + 1, p.micro_batch)
        assert p.start >= stops.get(before, 0.0)
        assert p.forward or p.start >= stops[True, here, p.micro_batch]
    for stage in range(4):
        mine = sorted((p for p in laid.passes if p.stage == stage), key=lambda p: p.start)
        assert all(first.stop <= second.start + 1e-12 for first, second in pairwise(mine))
