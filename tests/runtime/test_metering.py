"""What a step's row of metrics holds, on live ranks: the slow rank is named, figures are those of one process."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_runs import Case
from ranks import run_ranks
from training_runs import initial_model, make_plan, samples, train_in_one_process

from parcompile.cost.estimate import estimate
from parcompile.cost.step import utilisation
from parcompile.plan import Plan
from parcompile.runtime.errors import RunError
from parcompile.runtime.run_log import RunLog, prometheus_text
from parcompile.spec.values import workload_of

ONE = {"micro_batch_size": 1}
SLOW_SECONDS = 0.15


def measure(
    rank: int, plan: Plan, slow: int | None = None, steps: int = 3, every: int = 10, *, overflows: bool = False
) -> list[dict[str, float]]:
    """The rows of some steps, in which one rank sleeps, or gradients are too large for fp16 at any scale."""
    from parcompile.runtime import StepMeter, decay_groups, initialize

    engine, _, loader, _ = initialize(
        plan=plan,
        model=initial_model(plan),
        training_data=samples(plan),
        model_parameters=lambda model: decay_groups(model, 0.1),
        stop_on_nonfinite=None,
    )
    if rank == slow:
        engine.module.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
    for parameter in engine.module.parameters() if overflows else ():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    engine.optimizer.param_groups[1]["lr"] = 5e-5
    meter, batches = StepMeter(engine, every), iter(loader)
    return [meter.train_batch(batches) for _ in range(steps)]


@pytest.mark.ranks
@pytest.mark.parametrize("parallelism", [{}, {"tp": 2}, {"pp": 2}], ids=["dp2", "tp2", "pp2"])
def test_a_row_has_the_figures_of_one_process_and_names_the_rank_that_the_other_waits_for(
    parallelism: dict[str, int],
) -> None:
    plan = make_plan(2, parallelism, training=ONE)
    first, second = run_ranks(2, measure, plan, 1)
    alone, training = train_in_one_process(plan, steps=1), plan.spec.training
    for row in (first[0], second[0]):
        assert row["loss"] == pytest.approx(alone["losses"][0], rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(alone["norms"][0], rel=1e-5)
        assert row["lr"] == training.optimizer.lr
        assert row["lr/1"] == 5e-5
        assert row["tokens"] == training.global_batch_size * training.sequence_length
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["nonfinite_steps"] == 0
        assert not {"mfu", "skipped_steps", "slowest_rank"} & row.keys()
    phases = [second[0][f"phase_seconds/{name}"] for name in ("forward", "backward", "optimizer")]
    assert 0.5 * second[0]["seconds"] < sum(phases) <= second[0]["seconds"]
    for found in (first, second):
        # The message of step 2 is read in step 3.
        assert [("memory_peak_bytes" in row) for row in found] == [False, False, True]
        assert found[2]["slowest_rank"] == 1
        assert found[2]["slowest_seconds"] - found[2]["fastest_seconds"] > 0.5 * SLOW_SECONDS
        assert 2**26 < found[2]["memory_peak_bytes"] < 2**36
    assert first[2]["memory_peak_bytes"] == second[2]["memory_peak_bytes"]


def fullest(plan: Plan) -> dict[str, float]:
    """Of each layer the choices of the fullest expert over the mean, in the first step, with transformers alone."""
    training, model = plan.spec.training, initial_model(plan)
    moe = plan.spec.model.shape.moe
    assert moe is not None
    ids = torch.stack([one["input_ids"] for one in samples(plan)[: training.global_batch_size]])
    counts: dict[str, torch.Tensor] = {}

    def look(layer: str) -> Any:
        def keep(_: Any, __: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            chosen = logits.reshape(-1, logits.shape[-1]).topk(moe.num_experts_per_token).indices.flatten()
            counts[layer] = torch.bincount(chosen, minlength=moe.num_choices).double()

        return keep

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(look(name.split(".")[2]))
    model(input_ids=ids)
    return {f"router_load/{layer}": float(one.max() / one.mean()) for layer, one in counts.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{"pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 2}], ids=["pp2 ep2", "tp2 cp2 ep2"])
def test_the_load_of_routers_is_that_of_one_process_in_every_layer(layout: dict[str, int]) -> None:
    router = {"router": {"aux_loss": 0.01, "aux_loss_scope": "global_batch"}}
    case = Case("mixtral", {**layout, **({"dp": 2} if "pp" in layout else {})}, router)
    plan = case.plan()
    expected = fullest(plan)
    assert len(expected) == 4
    for found in run_ranks(case.ranks, measure, plan, None, 2, 1):
        assert {name: value for name, value in found[1].items() if name.startswith("router_load")} == pytest.approx(
            expected
        )
        assert not any(name.startswith("router_load") for name in found[0])


def skip_steps(_: int, plan: Plan) -> list[dict[str, float]]:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # CPUs compute in it, and DeepSpeed refuses it there
    return measure(0, plan, overflows=True)


@pytest.mark.ranks
def test_steps_that_fp16_skips_are_counted_and_have_an_infinite_norm() -> None:
    plan = make_plan(1, {}, training={"precision": "fp16"})
    rows = run_ranks(1, skip_steps, plan)[0]
    assert [row["skipped_steps"] for row in rows] == [1, 2, 3]
    assert all(math.isinf(row["gradient_norm"]) and math.isfinite(row["loss"]) for row in rows)
    assert {row["nonfinite_steps"] for row in rows} == {0}


def lose_steps(_: int, plan: Plan) -> list[dict[str, float]]:
    return measure(0, plan, steps=2, overflows=True)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1])
def test_steps_without_a_finite_norm_are_counted(stage: int) -> None:
    rows = run_ranks(1, lose_steps, make_plan(1, {}, extra={"zero": {"stage": stage}}))[0]
    assert [row["nonfinite_steps"] for row in rows] == [1, 2]
    assert not any(math.isfinite(row["gradient_norm"]) for row in rows)


def test_utilisation_is_that_of_the_estimate() -> None:
    work = workload_of(make_plan(2, {"tp": 2}, training=ONE).spec)
    time_ = estimate(work).time
    assert utilisation(work, time_.tokens_per_second_per_gpu) == pytest.approx(time_.utilisation)
    assert utilisation(work, 2.0) == 2 * utilisation(work, 1.0) > 0


def test_the_file_for_prometheus_holds_the_last_value_of_each_figure(tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "run.prom"
    with RunLog(tmp_path, prometheus=file) as log:
        log.add(1, loss=2.5, eval_loss=3.0)
        log.add(2, loss=float("inf"), **{"router_load/3": 1.25})
    assert file.read_text(encoding="utf-8") == (
        "# TYPE parcompile_step gauge\nparcompile_step 2.0\n# TYPE parcompile_loss gauge\nparcompile_loss +Inf\n"
        "# TYPE parcompile_eval_loss gauge\nparcompile_eval_loss 3.0\n"
        '# TYPE parcompile_router_load gauge\nparcompile_router_load{part="3"} 1.25\n'
    )
    assert file.stat().st_mode & 0o444 == 0o444  # the exporter is another user
    assert list(file.parent.iterdir()) == [file]
    said = prometheus_text({'eval_loss/a"b\\c\nd': float("nan"), "eval_loss": -float("inf"), "a-b": 1})
    assert said == (
        "# TYPE parcompile_eval_loss gauge\n"
        'parcompile_eval_loss{part="a\\"b\\\\c\\nd"} NaN\nparcompile_eval_loss -Inf\n'
        "# TYPE parcompile_a_b gauge\nparcompile_a_b 1.0\n"
    )
    with pytest.raises(RunError, match=r"reads files that end in \.prom: write .*run\.prom"):
        RunLog(tmp_path, prometheus=tmp_path / "run.txt")


def test_a_file_for_prometheus_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    with (
        pytest.warns(UserWarning, match=r"run\.prom cannot be written"),
        RunLog(tmp_path, prometheus=tmp_path / "taken" / "run.prom") as log,
    ):
        log.add(1, loss=2.5)
    assert [row["loss"] for row in log.rows()] == [2.5]


def test_a_run_names_its_plans_from_the_steps_on_that_they_ran(tmp_path: Path) -> None:
    one, other = make_plan(1, {}, training=ONE), make_plan(2, {"tp": 2}, training=ONE)
    for plan, first in ((one, 0), (one, 3), (other, 5), (other, 8)):
        RunLog(tmp_path, first, plan=plan)
    size = {"global_batch_size": one.spec.training.global_batch_size, "device": "cpu"}
    named = {"after_step": 0, "plan": one.plan_hash, "world_size": 1, **size}
    also = {"after_step": 5, "plan": other.plan_hash, "world_size": 2, **size}
    assert json.loads((tmp_path / "run.json").read_text("utf-8")) == {"format": 1, "plans": [named, also]}
    RunLog(tmp_path, 4, plan=one)  # a step before the second plan
    assert json.loads((tmp_path / "run.json").read_text("utf-8"))["plans"] == [named]
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=r"run\.json does not name the plans of a run"):
        RunLog(tmp_path, 5, plan=one)
    RunLog(tmp_path, plan=one)  # a new run does not read it
    assert json.loads((tmp_path / "run.json").read_text("utf-8"))["plans"] == [named]
    RunLog(tmp_path)
    assert not (tmp_path / "run.json").exists()


# The loss on held-out data.

SIZES = {"news": 3, "code": 5}
"""Sequences of each domain: with two to a batch and two ranks of dp, the last ones have less than the others."""


def domains(plan: Plan) -> dict[str, list[dict[str, torch.Tensor]]]:
    held = samples(plan, masked=True)
    return {"news": held[: SIZES["news"]], "code": held[SIZES["news"] : sum(SIZES.values())]}


def held_out(rank: int, plan: Plan) -> dict[str, Any]:
    from parcompile.runtime import evaluate, evaluate_domains, initialize

    engine, _, _, _ = initialize(plan=plan, model=initial_model(plan))
    data = domains(plan)
    found: dict[str, Any] = {
        "all": evaluate_domains(engine, data),
        "one": evaluate_domains(engine, {"n": data["news"]}),
    }
    nothing = [{name: torch.full_like(one, -100 if name == "labels" else 1) for name, one in data["news"][0].items()}]
    for name, wrong in (("empty", {**data, "void": nothing}), ("none", {})):
        try:
            evaluate_domains(engine, wrong)
        except RunError as error:
            found[name] = str(error)
    try:
        evaluate(engine, nothing)
    except RunError as error:
        found["evaluate"] = str(error)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "parallelism", [{"tp": 2, "cp": 2}, {"pp": 2}, {"cp": 2}], ids=["tp2 cp2", "pp2 dp2", "cp2 dp2"]
)
def test_losses_of_held_out_domains_are_those_of_one_process(parallelism: dict[str, int]) -> None:
    plan = make_plan(4, parallelism, training={"micro_batch_size": 2})
    model, sums = initial_model(plan).double(), {}
    for name, data in domains(plan).items():
        with torch.no_grad():
            logits = model(input_ids=torch.stack([one["input_ids"] for one in data])).logits[:, :-1].flatten(0, 1)
        labels = torch.stack([one["labels"] for one in data])[:, 1:].flatten()
        total = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        sums[name] = (float(total), int((labels != -100).sum()))
    losses = {f"/{name}": total / count for name, (total, count) in sums.items()}
    losses[""] = sum(total for total, _ in sums.values()) / sum(count for _, count in sums.values())
    # The mean of the domains' means is another number.
    assert abs(losses[""] - (losses["/news"] + losses["/code"]) / 2) > 1e-4
    expected = {f"eval_loss{name}": loss for name, loss in losses.items()}
    expected |= {f"eval_perplexity{name}": math.exp(loss) for name, loss in losses.items()}
    for found in run_ranks(4, held_out, plan):
        assert found["all"] == pytest.approx(expected, rel=1e-6)
        assert found["one"] == pytest.approx(
            {"eval_loss": losses["/news"], "eval_perplexity": math.exp(losses["/news"])}, rel=1e-6
        )
        assert found["empty"] == "no token of void is predicted: nothing to evaluate"
        assert found["none"] == "there is no data set: nothing to evaluate"
        assert found["evaluate"] == "no token of the 1 samples to evaluate is predicted"
