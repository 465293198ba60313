"""Contract: a batch grows as Megatron-LM's does, and every figure of a step asks the one function that says so."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from layout_cases import compile_tree
from test_import_megatron import imported

from parcompile.backends.megatron.write import arguments, as_list
from parcompile.backends.reading import Outcome, RefusedError
from parcompile.backends.registry import losses
from parcompile.cli import cli
from parcompile.pipeline import compile_file
from parcompile.plan import Plan, plan_from_tree, plan_tree
from parcompile.rules import example_spec
from parcompile.spec import RampupBatchSize, learning_rate

MEGATRON: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {
    (3, 7, 100, 45): [(0, 0, 3), (6, 18, 10), (8, 38, 17), (9, 55, 24), (10, 79, 31), (11, 110, 45)],
    (8, 8, 1000, 64): [
        *((0, 0, 8), (18, 144, 16), (27, 288, 24), (33, 432, 32), (38, 592, 40), (42, 752, 48)),
        *((45, 896, 56), (47, 1008, 64)),
    ],
    (6, 3, 7, 18): [(0, 0, 6), (1, 6, 15), (2, 21, 18)],
    (1, 1, 6, 50): [(0, 0, 1), (1, 1, 9), (2, 10, 50)],
    (5, 5, 55, 30): [(0, 0, 5), (3, 15, 10), (4, 25, 15), (5, 40, 20), (6, 60, 30)],
}
"""Start, increment, samples, global batch: steps and samples before each size, and the size, of megatron-core 0.16.1
(`RampupBatchsizeNumMicroBatchesCalculator`)."""


@pytest.mark.parametrize("given", MEGATRON)
def test_batches_are_those_of_megatron(given: tuple[int, int, int, int]) -> None:
    *values, full = given
    assert list(RampupBatchSize(*values).sizes(full)) == MEGATRON[given]


def test_what_steps_took_is_what_a_loop_adds_up() -> None:
    ramp, full = RampupBatchSize(3, 7, 100), 45
    for begun in (0, 1, 17, 79, 100, 101, 500):
        consumed = begun
        for steps in range(40):
            assert ramp.samples_after(steps, full, begun) == consumed
            assert begun or ramp.steps_of(consumed, full) == steps
            consumed += ramp.batch(consumed, full)
    assert ramp.steps_of(4, full) is ramp.steps_of(111, full) is None


def test_a_ramp_of_a_quadrillion_samples_is_found_at_once() -> None:
    sizes = RampupBatchSize(1, 1, 10**15).sizes(10_001)
    assert len(sizes) == 10_001
    assert sizes[-1][1:] == (10**15 + sizes[-2][2] - (10**15 - sizes[-2][1]) % sizes[-2][2], 10_001)


RAMP = {"start": 8, "increment": 8, "samples": 1000}


def plan_of(folder: Path, **training: Any) -> Plan:
    """Llama 3 8B with 64 sequences a step on 8 ranks of dp."""
    given = {"rampup_batch_size": RAMP, **training}
    return compile_tree(example_spec({"training": {name: value for name, value in given.items() if value}}), folder)


def test_the_rate_follows_the_samples(tmp_path: Path) -> None:
    """One of a schedule's steps is 64 samples: the rates are those of a run without a ramp that saw as many."""
    schedule = {"type": "cosine", "warmup_steps": 10, "total_steps": 50, "min_lr": 1e-5}
    growing, fixed = (
        plan_of(tmp_path, lr_scheduler=schedule, rampup_batch_size=ramp).spec.training for ramp in (RAMP, None)
    )
    for step, samples, _ in MEGATRON[8, 8, 1000, 64]:
        assert growing.samples_after(step) == samples
        if samples % 64 == 0:
            assert learning_rate(growing, step + 1) == learning_rate(fixed, samples // 64 + 1)
        assert learning_rate(growing, 7, samples) == learning_rate(growing, step + 1)
    last = plan_of(tmp_path, train_steps=60, lr_scheduler={"type": "linear", "warmup_steps": 0}).spec.training
    end = last.samples_after(60)
    assert learning_rate(last, 60) == pytest.approx(3e-4 * last.batch(last.samples_after(59)) / end)
    assert learning_rate(last, 61) == 0.0


def test_a_plan_with_a_ramp_is_read_as_it_is_written(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan_from_tree(plan_tree(plan)) == plan
    for key, value in (("start", 65), ("increment", 5), ("samples", 0), ("increment", 0)):
        tree: Any = copy.deepcopy(plan_tree(plan))
        tree["training"]["rampup_batch_size"][key] = value
        with pytest.raises(ValueError, match=r"rampup_batch_size|plan_hash|changed"):
            plan_from_tree(tree)


def test_every_target_but_megatron_names_what_is_lost(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, train_steps=100)
    for name, found in losses(plan, ["deepspeed", "torchtitan", "accelerate", "transformers", "megatron"]).items():
        named = [one for one in found if one.what == "rampup_batch_size 8 8 1000"]
        assert len(named) == (name != "megatron"), name
    found = losses(plan_of(tmp_path, train_steps=20), ["megatron"])["megatron"]
    (short,) = [one.why for one in found if "train" in one.what]
    assert short == "--train-samples 176 ends within the ramp, and Megatron-LM makes a further step"


LLAMA = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000 --make-vocab-size-divisible-by 8 "
    "--max-position-embeddings 64 --seq-length 64 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --ffn-hidden-size 128 --attention-dropout 0 "
    "--hidden-dropout 0 --bf16 --lr 1e-4 --micro-batch-size 1 --global-batch-size 64 "
    "--tensor-model-parallel-size 2"
)


@pytest.mark.parametrize(
    ("options", "steps", "schedule"),
    [
        ("--train-samples 6400", 131, {"type": "linear", "total_steps": 100}),
        ("--train-samples 6390 --lr-decay-style cosine", 131, {"type": "cosine", "total_steps": None}),
        ("--train-samples 2288 --lr-decay-style cosine --lr-warmup-samples 640", 67, {"warmup_steps": 10}),
        ("--train-samples 2288 --lr-decay-style linear --lr-decay-samples 1920", 67, {"total_steps": 30}),
        (
            "--train-samples 2288 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-samples 320",
            67,
            {"decay_steps": 5},
        ),
    ],
)
def test_a_ramp_of_megatron_comes_and_goes(options: str, steps: int, schedule: dict[str, Any]) -> None:
    given = f"{LLAMA} --rampup-batch-size 8 8 1000 {options}".split()
    result = imported(given)
    assert result.spec["training"]["rampup_batch_size"] == RAMP
    outcomes = {one.option: one.outcome for one in result.accounts}
    assert outcomes["rampup_batch_size"] is outcomes["train_samples"] is Outcome.CARRIED
    assert result.plan is not None, (result.questions, [one.message for one in result.diagnostics])
    assert result.plan.spec.training.train_steps == steps
    found = result.spec["training"].get("lr_scheduler", {})
    assert {key: found.get(key) for key in schedule} == schedule
    written = arguments(result.plan)
    assert written["rampup_batch_size"] == [8, 8, 1000]
    assert not [name for name in written if "iters" in name]
    again = imported(as_list(written))
    assert again.plan is not None
    assert again.plan.spec.training == result.plan.spec.training
    assert not [one.option for one in again.of(Outcome.LOST)]


def test_samples_that_end_within_the_ramp_are_no_steps() -> None:
    result = imported(f"{LLAMA} --rampup-batch-size 8 8 1000 --train-samples 144".split())
    (lost,) = [one for one in result.of(Outcome.LOST) if one.option == "train_samples"]
    assert "144 samples end within the ramp, where Megatron-LM goes on a step" in lost.detail


@pytest.mark.parametrize("ramp", ["8 8", "8 8 1000 4", "8 8 x"])
def test_a_ramp_of_other_than_three_numbers_is_refused(ramp: str) -> None:
    with pytest.raises((RefusedError, AssertionError), match="rampup"):
        imported(f"{LLAMA} --rampup-batch-size {ramp} --train-samples 144".split())


def test_a_search_takes_layouts_that_divide_every_batch(tmp_path: Path) -> None:
    """dp 8 with a micro-batch of 2 would not divide the first batch of 8; of 64 alone it would be among the fastest."""
    tree = example_spec({"training": {"micro_batch_size": None, "sequence_length": 512, "rampup_batch_size": RAMP}})
    del tree["training"]["micro_batch_size"]
    file, chosen = tmp_path / "spec.json", tmp_path / "chosen.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    found = CliRunner().invoke(cli, ["search", str(file), "--top", "100", "--format", "json", "-o", str(chosen)])
    assert found.exit_code == 0, found.output
    layouts = [one["layout"] for one in json.loads(found.output)["fitting"]]
    assert len(layouts) > 5
    assert all(8 % (one["dp"] * one["micro_batch_size"]) == 0 for one in layouts)
    assert compile_file(chosen)[0] is not None


def test_an_example_of_the_schema_compiles(tmp_path: Path) -> None:
    plan, checked = compile_file(Path(__file__).parents[1] / "specs/positive/B010-multiples-of-dp.json")
    assert plan is not None
    assert plan.spec.training.rampup_batch_size == RampupBatchSize(8, 8, 1000)
    assert [one.code for one in checked.diagnostics].count("B011") == 1
    assert plan.with_whole_batch.spec.training.rampup_batch_size is None
