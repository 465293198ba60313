"""Contract: the first loss or norm that is not finite ends the run, and no checkpoint of such weights is `latest`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from training_runs import make_plan, samples

from parcompile.plan import Plan
from parcompile.runtime import RunError, initialize
from parcompile.runtime.checkpoint import load, save

pytestmark = pytest.mark.ranks


def engine_of(plan: Plan, **options: Any) -> tuple[Any, Any]:
    engine, _, loader, _ = initialize(
        plan=plan, training_data=samples(plan) * 10, measurements=False, self_check=False, **options
    )
    return engine, iter(loader)


def damage(engine: Any, what: str) -> None:
    """From here on this rank's loss is that, whatever the model says."""

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        if what == "no number":
            output.loss = output.loss * float("nan")
        elif what == "infinite":
            # Its gradient is finite, as where a label's logit is masked.
            output.loss.data.fill_(float("inf"))
        return output

    engine.module.register_forward_hook(spoil)


def ended_with(engine: Any, batches: Any) -> tuple[str, bool]:
    """How the next step ends."""
    try:
        engine.train_batch(batches)
    except RunError as error:
        return str(error), error.everywhere
    return "", True


def train_until_lost(rank: int, plan: Plan, folder: Path) -> dict[str, Any]:
    engine, batches = engine_of(plan)
    for step in (1, 2):
        engine.train_batch(batches)
        save(engine, folder, step)
    if rank == 1:
        damage(engine, "no number")
    found: dict[str, Any] = {"ended": ended_with(engine, batches)}
    if rank == 1:
        next(engine.module.parameters()).data.view(-1)[0] = float("nan")  # as a step in bf16 leaves it
    try:
        save(engine, folder, 3)
    except RunError as error:
        found["refused"] = str(error)
    found["warned"] = save(engine, folder, 3, on_error="warn")
    found["latest"] = (folder / "latest").read_text(encoding="utf-8").strip()
    found["step"] = load(engine, folder)
    return found


@pytest.mark.parametrize(("axes", "zero"), [({}, 0), ({"pp": 2}, 1)])
def test_the_first_loss_that_is_no_number_ends_the_run_and_latest_stays(
    tmp_path: Path, axes: dict[str, int], zero: int
) -> None:
    plan = make_plan(2, axes, extra={"zero": {"stage": zero}})
    found = run_ranks(2, train_until_lost, plan, tmp_path)
    for one in found:
        text, everywhere = one["ended"]
        assert everywhere
        assert "step 3: the gradient norm is not a finite number; the loss is not finite on rank 1." in text
        assert f"checkpoint of step 2 or before: {tmp_path / 'step-2'}" in text
        assert "are not finite numbers; the last checkpoint is step-2" in one["refused"]
        assert one["warned"] is None
        assert one["latest"] == "step-2"
        assert one["step"] == 2


def train_with_infinite_loss(rank: int, plan: Plan) -> list[tuple[str, bool]]:
    engine, batches = engine_of(plan)
    engine.train_batch(batches)
    if rank == 1:
        damage(engine, "infinite")
    loss = engine(**next(batches)).loss
    engine.backward(loss)
    try:
        engine.step()  # not train_batch, which sums the loss over all ranks after it
    except RunError as error:
        return [(str(error), error.everywhere)]
    return [("", True)]


def test_an_infinite_loss_with_a_finite_norm_ends_the_run_on_its_rank() -> None:
    first, second = run_ranks(2, train_with_infinite_loss, make_plan(2, {}))
    assert first == [("", True)]
    ((text, everywhere),) = second
    assert text.startswith("step 2: the loss is not a finite number on rank 1.")
    assert not everywhere


def train_and_allow(_: int, plan: Plan, allowed: int | None, steps: int) -> list[tuple[str, bool]]:
    engine, batches = engine_of(plan, stop_on_nonfinite=allowed)
    damage(engine, "no number")
    return [ended_with(engine, batches) for _ in range(steps)]


def test_as_many_steps_as_are_allowed_may_be_lost() -> None:
    plan = make_plan(1, {})
    first, second = run_ranks(1, train_and_allow, plan, 2, 2)[0]
    assert first == ("", True)
    assert second[0].startswith("step 2 (2 steps in a row): the gradient norm is not a finite number")
    assert run_ranks(1, train_and_allow, plan, None, 3)[0] == [("", True)] * 3


def skip_steps(_: int, plan: Plan) -> list[tuple[str, bool]]:
    """The loss is finite, and its gradient is too large for fp16, whatever the scale."""
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed takes no fp16 on CPUs, which compute in it nonetheless.
    get_accelerator().is_fp16_supported = lambda: True
    engine, batches = engine_of(plan)
    for parameter in engine.module.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    found = []
    while not found or not found[-1][0]:
        found.append(ended_with(engine, batches))
    return found


@pytest.mark.parametrize("zero", [0, 1])
def test_steps_that_a_dynamic_loss_scale_skips_end_a_run_only_when_they_never_end(zero: int) -> None:
    plan = make_plan(1, {}, training={"precision": "fp16"}, extra={"zero": {"stage": zero}})
    found = run_ranks(1, skip_steps, plan)[0]
    # From 2^16 down to 1, and DeepSpeed lets one step pass before it halves the scale for the first time.
    assert [text for text, _ in found[:-1]] == [""] * 17
    assert "loss scale of fp16 is at its minimum: it has skipped the 17 steps before" in found[-1][0]
