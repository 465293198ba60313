"""Weight decay that changes: the numbers are Megatron-LM's, it comes back from its options, and others name it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_import_megatron import LLAMA, MODEL, carried

import parcompile
from parcompile.backends.artefacts import to_text
from parcompile.backends.kinds import BUILT_IN
from parcompile.backends.megatron.write import arguments, as_list
from parcompile.backends.reading import Outcome
from parcompile.backends.registry import losses
from parcompile.plan import Plan, plan_from_tree, plan_tree
from parcompile.show.pictures import Subject, rates
from parcompile.spec import weight_decay_of

OF_MEGATRON = {
    "linear": [0.01, 0.0175, 0.025, 0.0325, 0.04, 0.0475, 0.055, 0.0625, 0.07, 0.0775, 0.085, 0.0925, 0.1, 0.1],
    "cosine": [
        *(0.01, 0.0115333, 0.0160289, 0.0231802, 0.0325, 0.0433531, 0.055),
        *(0.0666469, 0.0775, 0.0868198, 0.0939711, 0.0984667, 0.1, 0.1),
    ],
}
"""What `OptimizerParamScheduler.get_wd` of Megatron-Core (00caa53) gives before step 1, 2, 3, … of 12, from 0.01."""
OPTIONS = "--train-iters 12 --lr 1e-4 --start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style"


def plan_of(style: str | None, **training: Any) -> Plan:
    optimizer = {"start_weight_decay": 0.01, "weight_decay": 0.1, "weight_decay_style": style}
    said = {
        "sequence_length": 1024,
        "global_batch_size": 64,
        "micro_batch_size": 1,
        "train_steps": 12,
        "optimizer": {name: value for name, value in optimizer.items() if value is not None},
        **training,
    }
    machines = {"nodes": 1, "gpus_per_node": 8}
    return parcompile.compile({"version": 1, "model": {"preset": "qwen3-0.6b"}, "cluster": machines, "training": said})


@pytest.mark.parametrize("style", OF_MEGATRON)
def test_each_step_has_the_decay_of_megatron(style: str) -> None:
    training = plan_of(style).spec.training
    found = [weight_decay_of(training, step) for step in range(1, 15)]
    assert found == pytest.approx(OF_MEGATRON[style], rel=1e-5)  # the table has six digits


def test_it_is_linear_where_no_style_is_given_and_stays_without_a_start() -> None:
    assert plan_of(None).spec.training.optimizer.weight_decay_style == "linear"
    stays = plan_of(None, optimizer={"weight_decay": 0.1}).spec.training
    assert {weight_decay_of(stays, step) for step in (1, 6, 99)} == {0.1}


def test_where_the_batch_grows_samples_count() -> None:
    ramp = {"start": 16, "increment": 16, "samples": 128}
    training = plan_of("linear", rampup_batch_size=ramp).spec.training
    taken, end = training.samples_after(5), training.samples_after(12)
    assert taken < 5 * 64
    assert weight_decay_of(training, 6) == pytest.approx(0.01 + 0.09 * taken / end)
    assert weight_decay_of(training, 3, taken) == weight_decay_of(training, 6)


@pytest.mark.parametrize("style", OF_MEGATRON)
def test_it_comes_back_from_megatrons_options(style: str) -> None:
    result = carried(f"{MODEL} {LLAMA} {OPTIONS} {style}")
    assert result.plan is not None
    assert not [one for one in result.of(Outcome.LOST) if "decay" in one.option]
    optimizer = result.plan.spec.training.optimizer
    found = optimizer.start_weight_decay, optimizer.weight_decay, optimizer.weight_decay_style
    assert found == (0.01, 0.1, style)
    assert optimizer.no_weight_decay == "vectors"
    words = " ".join(map(str, as_list(arguments(result.plan))))
    assert f"--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style {style}" in words
    again = carried(words)
    assert again.plan is not None and again.plan.spec.training == result.plan.spec.training


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (OPTIONS.replace("0.01", "0.2") + " linear", "Megatron-LM refuses a weight decay that falls: 0.2 > 0.1"),
        ("--lr 1e-4 --weight-decay-incr-style cosine", "Megatron-LM refuses cosine without start_weight_decay"),
        (
            OPTIONS.replace("--train-iters 12", "") + " linear",
            "until the end of train_steps, which this file does not say",
        ),
    ],
)
def test_what_a_spec_cannot_say_is_named(options: str, why: str) -> None:
    lost = carried(f"{MODEL} {LLAMA} {options}").of(Outcome.LOST)
    assert any(why in one.detail for one in lost if one.option == "weight_decay_incr_style"), lost


def test_targets_without_it_name_it() -> None:
    plan = plan_of("cosine", lr_scheduler={"type": "constant", "warmup_steps": 2})
    named = {name for name, found in losses(plan, BUILT_IN).items() if any("start_weight" in one.what for one in found)}
    assert named == {"deepspeed", "torchtitan", "accelerate", "accelerate-deepspeed", "transformers", "llamafactory"}
    fatal = losses(plan_of("cosine"), ("axolotl", "trl"))
    assert all(any(one.fatal and "start_weight" in one.what for one in found) for found in fatal.values())


def test_the_picture_says_it() -> None:
    subject = Subject.of(plan_of("cosine"))
    assert rates.verdict(subject.plan.spec.training).endswith("Weight decay goes from 0.01 to 0.1 (cosine)")
    rows = rates.rows(subject)
    assert rows[0] == ("step", "rate", "weight decay")
    assert (rows[1][2], rows[-1][2]) == ("0.01", f"{OF_MEGATRON['cosine'][11]:.6g}")


def test_the_plans_file_keeps_it() -> None:
    plan = plan_of("cosine")
    assert plan_from_tree(json.loads(to_text(plan_tree(plan)))).spec.training == plan.spec.training
