"""Contract: an engine in pipeline stages is used like any other, holds what is planned, and ends as a whole."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from launched import Ranks, leave
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples, train_in_one_process, train_with_engine

from parcompile.plan import Plan
from parcompile.plan.holding import Holding

pytestmark = pytest.mark.ranks

ONE = {"micro_batch_size": 1}


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def use(rank: int, plan: Plan) -> dict[str, Any]:
    """What a user sees: a step, evaluations of the next one, and what is refused."""
    from parcompile.runtime import RunError, evaluate, initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    training, batches = plan.spec.training, iter(loader)
    found: dict[str, Any] = {"loss": float(engine.train_batch(batches)), "steps": engine.global_steps}
    micro = [next(batches) for _ in range(training.gradient_accumulation_steps)]
    found["eval_batch"] = float(engine.eval_batch(iter(micro)))
    following = samples(plan)[training.global_batch_size : 2 * training.global_batch_size]
    found["evaluate"] = evaluate(engine, following)
    found["evaluate odd"] = evaluate(engine, following[:3])
    found["training"] = engine.module.training
    found["next loss"] = float(engine.train_batch(iter(micro)))
    found["held"] = getattr(engine.loop, "most_held", None)
    said = []
    for wrong in (
        lambda: engine.train_batch(micro),
        lambda: engine.train_batch(iter(micro[:-1])),
        lambda: engine(**micro[0]),
    ):
        try:
            wrong()
            said.append("")
        except RunError as error:
            said.append(str(error))
    try:
        engine.train_batch(iter([]))
    except StopIteration:
        said.append("stopped")
    return {**found, "said": said}


@pytest.mark.parametrize(
    "parallelism", [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "cp": 2}], ids=["one", "tp2", "pp2", "pp2 cp2"]
)
def test_train_batch_and_eval_batch_are_one_form_for_all_layouts(parallelism: dict[str, int]) -> None:
    world_size = 2 ** len(parallelism)
    plan = make_plan(world_size, parallelism, training=ONE)
    expected = train_in_one_process(plan, steps=2)["losses"]
    for rank, found in enumerate(run_ranks(world_size, use, plan)):
        assert_close(found["loss"], expected[0])
        assert found["steps"] == 1
        for name in ("eval_batch", "evaluate", "next loss"):
            assert_close(found[name], expected[1], about=name)
        assert found["evaluate odd"] != found["evaluate"]
        assert found["training"]
        no_iterator, too_few, by_hand, ended = found["said"]
        assert no_iterator == "a list is not an iterator: create one before the first step, batches = iter(loader)"
        assert too_few == "the batches ended after 3 of the 4 micro-batches of a step"
        assert ("Write loss = engine.train_batch(batches)" in by_hand) == ("pp" in parallelism)
        assert ended == "stopped"
        if "pp" in parallelism:
            assert found["held"] == plan.spec.schedule.in_flight(plan.groups.grid.coordinates(rank)["pp"])


def held(rank: int, plan: Plan) -> tuple[int, int]:
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    engine.train_batch(iter(loader))
    return engine.loop.most_held, plan.spec.schedule.in_flight(engine.mesh.index("pp"))


@pytest.mark.parametrize(("virtual", "micro_batches"), [(1, 8), (1, 2), (2, 8)])
def test_activations_of_at_most_the_planned_micro_batches_are_alive(virtual: int, micro_batches: int) -> None:
    parallelism = {"pp": 4, **({"num_virtual_stages_per_pipeline_rank": virtual} if virtual > 1 else {})}
    training = {**ONE, "global_batch_size": micro_batches}
    plan = make_plan(4, parallelism, model={"num_hidden_layers": 8}, training=training)
    found = run_ranks(4, held, plan)
    assert all(live == planned for live, planned in found)
    if virtual == 1:
        assert [live for live, _ in found] == [min(4 - stage, micro_batches) for stage in range(4)]


def train_in_half(rank: int, plan: Plan) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed takes no fp16 on CPUs, which compute in it nonetheless.
    get_accelerator().is_fp16_supported = lambda: True
    return train_with_engine(rank, plan, True, 3)


@pytest.mark.parametrize(
    "training",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "gradient_accumulation_dtype": "fp32"},
        {"precision": "fp16", "loss_scale": 128},
    ],
    ids=["bf16", "bf16 summed in fp32", "fp16 with a scaled loss"],
)
def test_half_precision_stays_within_the_spread_of_one_process_runs(training: dict[str, Any]) -> None:
    """As in `test_same_numbers.py`, whose bounds these are."""
    layouts = [(1, {}, 4), (1, {}, 2), (1, {}, 1), (2, {"pp": 2}, 1)]
    plans = [
        make_plan(world, axes, model={"tie_word_embeddings": True}, training={**training, "micro_batch_size": size})
        for world, axes, size in layouts
    ]
    runs = [run_ranks(plan.world_size, train_in_half, plan)[0] for plan in plans]
    for name, bound in (("losses", 2**-10), ("norms", 5e-3)):
        assert all(relative(run[name][0], runs[0][name][0]) < bound for run in runs[1:])
        *one_process, found = (run[name] for run in runs)
        spread = max(max(map(relative, *pair)) for pair in itertools.combinations(one_process, 2))
        assert 0 < spread < 0.05
        assert max(map(relative, found, one_process[-1])) < 3 * spread


def train_frozen(rank: int, plan: Plan) -> tuple[list[float], list[float]]:
    from parcompile.runtime import initialize

    model = initial_model(plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(("model.layers.1", "model.layers.2"))
    engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples(plan))
    batches, losses, norms = iter(loader), [], []
    for _ in range(2):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def idle(rank: int, plan: Plan) -> str:
    from parcompile.runtime import RunError, initialize

    model = initial_model(plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("model.layers.3")
    try:
        initialize(plan=plan, model=model)
    except RunError as error:
        return str(error)
    return ""


def test_frozen_parameters_stay_out_of_the_norm_and_a_stage_without_any_is_named() -> None:
    model = {"num_hidden_layers": 4, "tie_word_embeddings": True}
    alone, staged = (make_plan(world, axes, model=model, training=ONE) for world, axes in ((1, {}), (2, {"pp": 2})))
    ((losses, norms),) = run_ranks(1, train_frozen, alone)
    for found in run_ranks(2, train_frozen, staged):
        assert_close(found, (losses, norms))
    for said in run_ranks(2, idle, staged):
        assert "stage 0 of pp 2 has no parameter to train" in said


def read_tensors(rank: int, plan: Plan, folder: str) -> tuple[set[str], list[str], int]:
    from parcompile.runtime import initialize, load_pretrained
    from parcompile.runtime.model.pretrained import PretrainedFolder

    read, right = set(), PretrainedFolder.take

    def take(self: PretrainedFolder, name: str, *rest: Any) -> torch.Tensor:
        read.add(name)
        return right(self, name, *rest)

    PretrainedFolder.take = take
    model = load_pretrained(folder, plan)
    assert not any(parameter.is_meta for parameter in model.parameters())
    engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples(plan))
    engine.train_batch(iter(loader))
    return read, [name for name, _ in model.named_parameters()], rank


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path) -> None:
    plan = make_plan(4, {"pp": 2, "tp": 2}, model={"num_hidden_layers": 4}, training=ONE)
    initial_model(plan).save_pretrained(tmp_path)
    for read, names, rank in run_ranks(4, read_tensors, plan, str(tmp_path)):
        held_here = Holding(plan, plan.groups.grid.coordinates(rank)["pp"]).names
        assert names == held_here
        assert read == set(held_here)


def fail_in_stage(folder: Path, plan: Plan, how: str) -> None:
    """The last stage raises, dies or stops in its second step, of which its heartbeat has told."""

    def misbehave(*_: Any) -> None:
        if how == "raises":
            raise ValueError("a wrong layer")
        time.sleep(4)
        os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])

    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=samples(plan))
    batches = iter(loader)
    leave(folder, "loss", str(float(engine.train_batch(batches))))
    if engine.mesh.rank == 1:
        engine.module.get_submodule("model.layers.1").register_forward_pre_hook(misbehave)
    engine.train_batch(batches)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", r"rank 1 on host .* on pipeline stage 1\): ValueError: a wrong layer"),
        ("dies", r"rank 1 on host .* ended without a message.* on pipeline stage 1"),
        ("stops", r"rank 1 on host .* given no sign of life.* on pipeline stage 1"),
    ],
    ids=["raises", "dies", "stops"],
)
def test_a_stage_that_fails_ends_the_others_with_its_name(how: str, said: str, tmp_path: Path) -> None:
    plan = make_plan(2, {"pp": 2}, model={"num_hidden_layers": 2}, training=ONE)
    job = Ranks(tmp_path, 2, fail_in_stage, plan, how, PARCOMPILE_SILENT_TIMEOUT="8")
    try:
        assert job.end(*range(1 + (how == "raises")), within=600) == [1] * (1 + (how == "raises"))
        (line,) = job.said
    finally:
        job.kill()
    assert float((tmp_path / "loss-0").read_text()) > 0, "the first step went through"
    assert "Traceback" not in job.text(0)
    assert re.search(said, line), line
