"""Contract: under cp a model's loss has the value of whole sequences on every rank; backward does not wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_close
from families import tiny_config
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks


class Watched:
    """A collective under way that notes what was there when somebody waited for it."""

    def __init__(self, work: Any, reached: list[str]) -> None:
        self.work, self.reached = work, reached
        self.found: list[str] | None = None

    def wait(self) -> None:
        self.work.wait()
        self.found = list(self.reached)


def read_losses(rank: int, plan: Plan) -> dict[str, Any]:
    """The losses of two micro-batches, read in several ways; whether backward waited for the second."""
    from parcompile.runtime import initialize, reduce_loss
    from parcompile.runtime.loss import own_part

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan, masked=True))
    batches, mesh = iter(loader), engine.mesh
    first = engine(**next(batches)).loss
    read = {
        "item": first.item(),
        "detached": float(first.detach().clone()),
        "printed": float(f"{first:.9f}"),
        "doubled": float(first * 2) / 2,
        "summed": float(torch.stack([first, first]).sum()) / 2,
        "returned": float(engine.backward(first)) * plan.spec.training.gradient_accumulation_steps,
    }
    engine.step()
    reached: list[str] = []
    engine.module.get_input_embeddings().weight.register_post_accumulate_grad_hook(lambda _: reached.append("backward"))
    second = engine(**next(batches)).loss
    work = Watched(second._work, reached) if mesh.size("cp") > 1 else None
    if work is not None:
        second._work = work
    engine.backward(second)
    engine.step()
    with torch.no_grad():
        evaluated = float(engine(**next(batches)).loss)
    return {
        "first": read,
        "second": float(second),
        "reduced": reduce_loss(second, mesh),
        "part": float(own_part(second)),
        "evaluated": evaluated,
        "waited": None if work is None else work.found,
        "norm": float(engine.get_global_grad_norm()),
    }


@pytest.mark.parametrize("kind", ["llama", "balanced experts"])
def test_the_loss_is_that_of_whole_sequences_on_every_rank_and_late(kind: str) -> None:
    model = tiny_config("mixtral", output_router_logits=True, router_aux_loss_coef=0.5) if kind != "llama" else {}
    training = {"micro_batch_size": 2, "global_batch_size": 4}
    layouts = [(1, {}), (2, {"cp": 2}) if kind == "llama" else (4, {"tp": 2, "cp": 2, "sequence_parallel": True})]
    plans = [
        make_plan(world, axes, model=model, whole_model=kind != "llama", training=training) for world, axes in layouts
    ]
    (expected,), ranks = (run_ranks(plan.world_size, read_losses, plan) for plan in plans)
    whole = expected["first"]["item"]
    for found in ranks:
        assert_close(found["first"], dict.fromkeys(found["first"], whole))
        for name in ("second", "reduced", "evaluated", "norm"):
            assert_close(found[name], expected[name], about=name)
        assert found["waited"] == ["backward"]  # the value was waited for, and only behind the last gradient
    parts = [found["part"] for found in ranks]
    assert_close(sum(parts) / plans[1].spec.parallelism.tp, expected["second"])
    assert min(parts) < 0.9 * expected["second"]
