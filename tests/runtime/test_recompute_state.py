"""Contract: a recomputed layer works on the micro-batch of its own forward pass, not on that of the latest one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_within
from ranks import run_ranks
from torch import Tensor
from training_runs import initial_model, make_plan

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks


def _batches(mesh: Any, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two micro-batches of other documents and, packed, of other lengths."""
    from parcompile.runtime import PackedPlanLoader, split_batch

    generator = torch.Generator().manual_seed(0)
    if kind == "packed":
        lengths = (5, 11, 3, 7, 16, 9, 4, 4, 8, 2, 13, 3)
        batches = iter(PackedPlanLoader([torch.randint(0, 61, (one,), generator=generator) for one in lengths], mesh))
        return next(batches), next(batches)

    def borders(rows: int, *lengths: int) -> dict[str, Any]:
        ids = torch.randint(0, 61, (rows, 16), generator=generator)
        positions = torch.cat([torch.arange(one) for one in lengths]).expand(rows, -1)
        return split_batch({"input_ids": ids, "labels": ids, "position_ids": positions}, mesh)

    return borders(2, 5, 11), borders(1, 8, 8)


def two_forwards(rank: int, plan: Plan, kind: str) -> float:
    """The relative error of the first batch's gradients when a second forward pass comes before its backward."""
    from parcompile.runtime.engine import prepare
    from parcompile.runtime.groups import join

    mesh = join(plan)
    model = prepare(plan, mesh, initial_model(plan), self_check=False)
    first, second = _batches(mesh, kind)

    def gradients() -> Tensor:
        found = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        model.zero_grad()
        return found

    model(**first).loss.backward()
    expected = gradients()
    loss = model(**first).loss
    model(**second)
    loss.backward()
    return float((gradients() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["documents", "packed"])
@pytest.mark.parametrize("parallelism", [{}, {"tp": 2, "sequence_parallel": True}], ids=["one rank", "tp2 sp"])
def test_two_forward_passes_before_a_backward_do_not_mix(kind: str, parallelism: dict[str, Any]) -> None:
    ranks = parallelism.get("tp", 1)
    training = {"activation_checkpointing": "full", "global_batch_size": 4, "micro_batch_size": 2}
    plan = make_plan(ranks, parallelism, training=training)
    for error in run_ranks(ranks, two_forwards, plan, kind, timeout=60):
        assert_within(error, 3e-6)
