"""Contract: ZeRO stage 0 in 16 bits steps, scales its loss and skips steps as stage 1 does, which shards its states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks


def steps(rank: int, plan: Plan, folder: str) -> dict[str, Any]:
    """Four steps, of which the second meets a gradient that is no number on the last rank; saved and loaded again."""
    from deepspeed.accelerator import get_accelerator

    from parcompile.runtime import initialize
    from parcompile.runtime.checkpoint import load, save

    # DeepSpeed takes no fp16 on CPUs, which compute in it nonetheless.
    get_accelerator().is_fp16_supported = lambda: True
    engine, _, loader, _ = initialize(
        plan=plan, model=initial_model(plan), training_data=samples(plan), stop_on_nonfinite=None
    )
    batches, found = iter(loader), []
    for step in range(4):
        spoilt = rank == 1 and step == 1
        hook = next(engine.module.parameters()).register_hook(lambda one: one * float("nan")) if spoilt else None
        loss = float(engine.train_batch(batches))
        if hook is not None:
            hook.remove()
        norm = float(engine.get_global_grad_norm())
        found.append((loss, norm, engine.skipped_steps, scale_of(engine)))
    weights = {name: one.detach().float().clone() for name, one in engine.module.named_parameters()}
    save(engine, folder, 4)
    before = state_of(engine)
    batches = iter(loader)
    engine.train_batch(batches)
    changed = [not torch.equal(one, other) for one, other in zip(before, state_of(engine), strict=True)]
    load(engine, folder)
    same = [torch.equal(one, other) for one, other in zip(before, state_of(engine), strict=True)]
    return {"steps": found, "weights": weights, "changed": any(changed), "same": all(same)}


def scale_of(engine: Any) -> float:
    """What the loss is multiplied by: DeepSpeed's optimizer for sums in fp32 has no scaler."""
    return float(getattr(getattr(engine.optimizer, "loss_scaler", None), "cur_scale", 1.0))


def state_of(engine: Any) -> list[torch.Tensor]:
    """Copies of all that a run goes on from."""
    tensors = [*engine.module.parameters()]
    for master, state in engine.optimizer.optimizer.state.items():
        tensors += [master, *(value for value in state.values() if isinstance(value, torch.Tensor))]
    counters = [engine.global_steps, engine.skipped_steps, scale_of(engine)]
    return [*(one.detach().clone() for one in tensors), torch.tensor(counters), torch.get_rng_state()]


@pytest.mark.parametrize(("precision", "sums"), [("bf16", "fp32"), ("fp16", "fp16")])
def test_whole_and_sharded_states_are_updated_alike(precision: str, sums: str, tmp_path: Path) -> None:
    training = {"precision": precision, "gradient_accumulation_dtype": sums, "micro_batch_size": 1}
    training |= {"loss_scale": 0} if precision == "fp16" else {}
    plans = [make_plan(2, {"tp": 1}, training=training, extra={"zero": {"stage": stage}}) for stage in (0, 1)]
    whole, sharded = (run_ranks(2, steps, plan, str(tmp_path / str(plan.spec.zero_stage))) for plan in plans)
    assert all(one["changed"] and one["same"] for one in whole)
    assert whole[0]["steps"] == whole[1]["steps"]
    for (loss, norm, skipped, scale), (other_loss, other_norm, other_skipped, other_scale) in zip(
        whole[0]["steps"], sharded[0]["steps"], strict=True
    ):
        # The order of sums is the same, that of squares in the norm is not.
        assert_close(loss, other_loss, limit=3e-3)
        assert (skipped, scale) == (other_skipped, other_scale)
        if 0 < other_norm < float("inf"):
            assert_close(norm, other_norm, limit=6e-3)
        else:
            assert not 0 <= norm < 1e9
    assert whole[0]["steps"][-1][2] >= 1
    assert_close(whole[0]["weights"], sharded[0]["weights"], limit=2**-6)
