"""Contract: with the optimizer on the host a plan trains as without, and its checkpoints go on with and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from closeness import assert_close, judge
from drawn_stages import compare, draw
from families import tiny_config
from ranks import run_ranks
from test_sharded_weights import plan_of, train_and_go_on
from training_runs import compared, initial_model, samples, train_in_one_process, train_with_engine, whole_weights

from parcompile.cost.offload import host_memory
from parcompile.plan import Plan
from parcompile.runtime.preflight import preflight
from parcompile.spec.values import workload_of

SP = {"tp": 2, "sequence_parallel": True}
MOE: dict[str, Any] = {"model": tiny_config("mixtral"), "whole_model": True}
TWO = {"micro_batch_size": 1}
OPTIMIZER, WEIGHTS = {"on_host": True}, {"weights_on_host": True}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (plan_of(4, SP, 2, on_host=True, training=TWO), plan_of(2, {"cp": 2}, 1)),
        (plan_of(2, {"cp": 2}, 3), plan_of(2, {"tp": 2}, 1, on_host=True)),
        (plan_of(2, {"ep": 2}, 1, on_host=True, **MOE), plan_of(2, {"ep": 2, "cp": 2}, 3, on_host=True, **MOE)),
        (plan_of(2, {"cp": 2}, 3, weights_on_host=True), plan_of(4, SP, 3, on_host=True, weights_on_host=True)),
    ],
    ids=[
        "stage 2, then stage 1 without",
        "stage 3 without, then stage 1",
        "experts at stage 1, then at stage 3",
        "weights, then the optimizer too",
    ],
)
def test_an_optimizer_on_the_host_trains_as_one_process(first: Plan, second: Plan, tmp_path: Path) -> None:
    train_and_go_on(first, second, tmp_path)


def with_own_optimizer(_rank: int, plan: Plan) -> dict[str, Any]:
    """Three steps of an AdamW that a script brings, whose loops compute the same on every device."""
    from parcompile.runtime import initialize
    from parcompile.runtime.deepspeed_patches.norm import tensors_on_host

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)

    engine, _, loader, _ = initialize(
        plan=plan, model=initial_model(plan), training_data=samples(plan), optimizer=adam, self_check=False
    )
    batches = iter(loader)
    losses, norms = zip(
        *((float(engine.train_batch(batches)), float(engine.get_global_grad_norm())) for _ in range(3)), strict=True
    )
    moments = [one for state in engine.optimizer.optimizer.state.values() for one in state.values() if one.dim()]
    states = moments if plan.spec.offload_optimizer else []
    host = sum(one.nbytes for one in (*tensors_on_host(engine.optimizer), *states))
    return {"losses": losses, "norms": norms, "parameters": whole_weights(engine.module), "host": host}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "parallelism", "stage", "sums", "there"),
    [
        (2, {"pp": 2}, 1, "fp32", OPTIMIZER),
        (2, {}, 1, "fp32", OPTIMIZER),
        (4, {"tp": 2, "cp": 2}, 2, "fp32", OPTIMIZER),
        (2, {}, 2, "bf16", OPTIMIZER),
        (2, {}, 3, "fp32", OPTIMIZER),
        (2, {}, 3, "fp32", WEIGHTS),
        (4, {"tp": 2}, 3, "bf16", OPTIMIZER | WEIGHTS),
    ],
    ids=[
        "pp2 at stage 1",
        "dp2 at stage 1",
        "tp2 cp2 at stage 2",
        "dp2 at stage 2, sums in bf16",
        "dp2 at stage 3",
        "weights of dp2",
        "weights and optimizer of tp2 dp2",
    ],
)
def test_steps_in_bf16_are_the_same_bits_on_the_host(
    world: int, parallelism: dict[str, Any], stage: int, sums: str, there: dict[str, bool]
) -> None:
    training = {**TWO, "precision": "bf16", "gradient_accumulation_dtype": sums}
    plans = [plan_of(world, parallelism, stage, training=training, **one) for one in (there, {})]
    offloaded, here = (run_ranks(world, with_own_optimizer, plan) for plan in plans)
    planned = host_memory(workload_of(plans[0].spec))
    assert planned is not None
    assert max(one["host"] for one in offloaded) == planned.total_bytes
    for one, other in zip(offloaded, here, strict=True):
        assert one["losses"] == other["losses"]
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-6)  # a sum in another order
        assert all(one["parameters"][name].equal(weight) for name, weight in other["parameters"].items())


REPEATED: dict[str, Any] = {
    "model": tiny_config("phi3", num_key_value_heads=2, initializer_range=0.1),
    "whole_model": True,
}
"""Rows of a fused weight that two of four tp ranks hold."""


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [2, 3])
def test_repeated_rows_count_once_in_the_norm(stage: int) -> None:
    plan = plan_of(4, {"tp": 4}, stage, on_host=True, training=TWO, **REPEATED)
    ranks = run_ranks(4, train_with_engine, plan, True, 3)
    judge(compared(plan, ranks, lambda seed: train_in_one_process(plan, masked=True, steps=3, seed=seed)))


@pytest.mark.ranks
def test_repeated_rows_count_once_where_bf16_is_summed_in_fp32() -> None:
    """At stage 1 by DeepSpeed's norm, at stage 0 by one of ours."""
    training = {**TWO, "precision": "bf16"}
    at_0, at_1 = (plan_of(4, {"tp": 4}, stage, on_host=False, training=training, **REPEATED) for stage in (0, 1))
    for own, deepspeeds in zip(*(run_ranks(4, train_with_engine, plan, True, 3) for plan in (at_0, at_1)), strict=True):
        assert own["losses"] == pytest.approx(deepspeeds["losses"], rel=1e-5)
        assert own["norms"] == pytest.approx(deepspeeds["norms"], rel=1e-5)


def without_a_part(_rank: int, plan: Plan) -> list[float]:
    """Losses and norms of steps of which the second does not use an MLP."""
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    batches, found, mlp = iter(loader), list[float](), engine.module.model.layers[1].mlp
    for step in range(4):
        with mock.patch.object(mlp, "forward", mlp.forward if step != 1 else lambda hidden: hidden):
            found += [float(engine.train_batch(batches)), float(engine.get_global_grad_norm())]
    return found


@pytest.mark.ranks
def test_a_part_that_a_step_does_not_use_has_no_gradient_in_it() -> None:
    """DeepSpeed updates it with that of the step before, on the host and at stage 3."""
    plans = [plan_of(1, {}, stage, on_host=on_host) for stage in (1, 2, 3) for on_host in (False, True)]
    expected, *others = (run_ranks(1, without_a_part, plan)[0] for plan in plans)
    for found in others:
        assert_close(found, expected)


CP: dict[str, Any] = {"tp": 2, "cp": 2, "sequence_parallel": True}
FP32: dict[str, Any] = {"precision": "fp32", "sequence_length": 64, "micro_batch_size": 4}
LONG: dict[str, Any] = {"precision": "bf16", "sequence_length": 512, "micro_batch_size": 1}


@pytest.mark.parametrize(
    ("stage", "there", "further"),
    [
        (1, OPTIMIZER, {"gradient_accumulation_dtype": "fp32"}),
        (2, OPTIMIZER, {}),
        (3, OPTIMIZER, FP32),
        (3, WEIGHTS, FP32),
        (3, OPTIMIZER | WEIGHTS, FP32),
    ],
)
def test_preflight_counts_what_is_on_the_host(stage: int, there: dict[str, bool], further: dict[str, Any]) -> None:
    report = preflight(plan_of(4, CP, stage, **there, training={**LONG, **further}), ranks=[3])
    assert report.agrees, report.text()
    assert "states on the host" in report.text()


@pytest.mark.ranks
@pytest.mark.parametrize("number", [1, 5, 26, 38])
def test_drawn_plans_with_the_optimizer_on_the_host_train_as_one_process(number: int) -> None:
    judge(compare(draw(number, 4, on_host=True)[0]))
