"""Contract: while the batch grows, ranks train as one process does on the same samples, through a change of layout too.

Six steps, of which the fifth is the first with the whole batch: 4, 4, 8, 12, 16 and 16 samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import router_runs
import torch
from closeness import assert_close, nudge
from expert_runs import Case
from ranks import run_ranks
from training_runs import (
    initial_model,
    make_plan,
    plain_optimizer,
    samples,
    whole_parameters,
    whole_weights,
)

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

BATCHES = [slice(0, 4), slice(4, 8), slice(8, 16), slice(16, 28), slice(28, 44), slice(44, 60)]
"""4 + 4 · int(samples before / 8) up to sample 24, and 16 behind it."""
TRAINING: dict[str, Any] = {
    "global_batch_size": 16,
    "rampup_batch_size": {"start": 4, "increment": 4, "samples": 24},
    # Adam hides a gradient of another scale.
    "optimizer": {"lr": 1e-2, "eps": 1e-3},
    "micro_batch_size": 1,
}


def train(
    rank: int, plan: Plan, until: int, folder: str, resume: bool, by_hand: bool = False, routers: bool = False
) -> dict[str, Any]:
    from parcompile.runtime import StepMeter, initialize
    from parcompile.runtime.checkpoint import load, save

    data = router_runs.padded(plan) if routers else samples(plan, masked=True)
    engine, _, loader, _ = initialize(plan=plan, model=initial_model(plan), training_data=data)
    done, batches, meter = load(engine, folder) if resume else 0, iter(loader), StepMeter(engine)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "rates": [], "tokens": []}
    for _ in range(done, until):
        found["rates"].append(engine.get_lr()[0])
        if by_hand:
            losses = []
            found["tokens"].append(engine.train_batch_size() * plan.spec.training.sequence_length)
            for _ in range(engine.gradient_accumulation_steps()):
                losses.append(engine(**next(batches)).loss)
                engine.backward(losses[-1])
                engine.step()
            loss = torch.stack([one.detach() for one in losses]).mean()
            torch.distributed.all_reduce(loss, group=engine.mesh.group("dp"))
            found["losses"].append(float(loss) / engine.mesh.size("dp"))
        else:
            row = meter.train_batch(batches)
            found["losses"].append(row["loss"])
            found["tokens"].append(row["tokens"])
        found["norms"].append(float(engine.get_global_grad_norm()))
    assert loader.step == until - 1  # the last micro-batch is taken, and the next step not begun
    save(engine, folder, until)
    return {"rank": rank, **found, "parameters": whole_weights(engine.module), "samples": engine.global_samples}


def train_in_one_process(
    plan: Plan, seed: int | None = None, batches: Sequence[slice] = tuple(BATCHES)
) -> dict[str, Any]:
    """A plain loop of torch, whose rates are written out."""
    model, training = initial_model(plan), plan.spec.training
    nudge(model, seed)
    optimizer, data = plain_optimizer(model, plan), samples(plan, masked=True)
    losses, norms, rates = [], [], []
    for place in batches:
        ids, labels = (torch.stack([one[key] for one in data[place]]) for key in ("input_ids", "labels"))
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        # A warm-up of one whole batch, 16 samples, then a cosine that ends with the training, after 60.
        progress = max(0.0, (place.start - 16) / (60 - 16))
        rates.append(1e-2 * (place.start / 16 if place.start < 16 else (1 + math.cos(math.pi * progress)) / 2))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clipping or math.inf)))
        optimizer.step()
        losses.append(float(loss.detach()))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "rates": rates, "parameters": parameters}


def compare(
    first: Plan,
    second: Plan,
    until: int,
    folder: Path,
    expected: Callable[[int | None], dict[str, Any]],
    *how: bool,
    batches: Sequence[slice] = tuple(BATCHES),
) -> None:
    """The first plan trains up to a step, the second to the end."""
    begun = run_ranks(first.world_size, train, first, until, str(folder), False, *how)
    ended = run_ranks(second.world_size, train, second, len(batches), str(folder), True, *how)
    reference = expected(None)
    joined: dict[str, Any] = {key: [*begun[0][key], *ended[0][key]] for key in reference if key != "parameters"}
    joined["parameters"] = whole_parameters(second, ended)
    assert_close(joined, reference, rerun=expected)
    length = first.spec.training.sequence_length
    tokens = [(one.stop - one.start) * length for one in batches]
    assert [*begun[0]["tokens"], *ended[0]["tokens"]] == tokens
    assert ended[0]["samples"] == batches[-1].stop


def plan_of(layout: dict[str, Any], stage: int, clipping: float, micro: int = 1) -> Plan:
    layers = {"num_hidden_layers": 4} if "virtual_pipeline_model_parallel_size" in layout else {}
    ranks = math.prod(layout.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    schedule = {"type": "cosine", "warmup_steps": 1}
    training = {
        **TRAINING,
        "micro_batch_size": micro,
        "gradient_clipping": clipping,
        "lr_scheduler": schedule,
        "train_steps": len(BATCHES),
    }
    return make_plan(ranks, layout, model=layers, training=training, extra={"zero": {"stage": stage}})


Layout = tuple[dict[str, Any], int, int]
"""Axes, stage of ZeRO, micro-batch."""
CHANGES: list[tuple[str, Layout, Layout, int, float, bool]] = [
    ("tp 2 dp 2 to cp 2 dp 2", ({"tp": 2, "dp": 2}, 1, 1), ({"cp": 2, "dp": 2}, 2, 2), 3, 0.5, False),
    ("dp 4 to tp 2 cp 2", ({"dp": 4}, 3, 1), ({"tp": 2, "cp": 2, "sequence_parallel": True}, 1, 1), 2, 0.0, False),
    ("cp 2 to dp 2, by hand", ({"cp": 2}, 0, 2), ({"dp": 2}, 0, 1), 1, 0.5, True),
    ("pp 2 dp 2 to one rank", ({"pp": 2, "dp": 2}, 1, 1), ({}, 2, 4), 3, 0.0, False),
    ("tp 2 to pp 2 cp 2", ({"tp": 2}, 2, 4), ({"pp": 2, "cp": 2}, 1, 2), 4, 0.5, False),
    ("cp 2 dp 2 to dp 4, stage 3", ({"cp": 2, "dp": 2}, 3, 2), ({"dp": 4}, 3, 1), 2, 0.5, True),
]


@pytest.mark.parametrize("change", CHANGES, ids=[one[0] for one in CHANGES])
def test_the_batch_grows_as_in_one_process(
    change: tuple[str, Layout, Layout, int, float, bool], tmp_path: Path
) -> None:
    _, (one, stage, micro), (other, other_stage, other_micro), until, clipping, by_hand = change
    first, second = plan_of(one, stage, clipping, micro), plan_of(other, other_stage, clipping, other_micro)
    compare(first, second, until, tmp_path, lambda seed: train_in_one_process(first, seed), by_hand)


def test_the_samples_that_were_taken_decide_after_another_batch(tmp_path: Path) -> None:
    """One step of 8 samples, without a ramp: two steps of one later batch and rate stand at the same sample."""
    schedule = {"lr_scheduler": {"type": "cosine", "warmup_steps": 2}, "train_steps": 8}
    fixed = {**TRAINING, "global_batch_size": 8, "rampup_batch_size": None, "gradient_clipping": 0.5, **schedule}
    first = make_plan(2, {"cp": 2}, training={name: value for name, value in fixed.items() if value is not None})
    batches = [slice(0, 8), *BATCHES[2:]]

    def expected(seed: int | None) -> dict[str, Any]:
        return train_in_one_process(second, seed, batches)

    second = plan_of({"tp": 2, "dp": 2}, 2, 0.5)
    compare(first, second, 1, tmp_path, expected, batches=batches)


def refused(rank: int, plan: Plan) -> list[str]:
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import parallelise, training_arguments

    said = []
    for make in (
        lambda: training_arguments(plan, "unused", max_steps=1),
        lambda: parallelise(Trainer, plan)(args=TrainingArguments(output_dir="unused", use_cpu=True)),
        lambda: parallelise(Accelerator, plan)(),
    ):
        try:
            make()
        except RunError as error:
            said.append(str(error))
    return said


def test_loops_with_as_many_micro_batches_in_every_step_refuse_it() -> None:
    (said,) = run_ranks(1, refused, plan_of({}, 1, 0.5))
    names = ("Hugging Face's Trainer", "Hugging Face's Trainer", "a loop of accelerate")
    assert len(said) == len(names)
    for sentence, name in zip(said, names, strict=True):
        assert "training.rampup_batch_size grows the batch from 4 to 16" in sentence
        assert f"{name} takes the same number of micro-batches" in sentence


def test_interleaved_stages_have_the_passes_of_each_batch(tmp_path: Path) -> None:
    layout = {"pp": 2, "virtual_pipeline_model_parallel_size": 2}
    first, second = plan_of(layout, 1, 0.5), plan_of({"pp": 2, "dp": 2, **layout}, 1, 0.5)
    compare(first, second, 3, tmp_path, lambda seed: train_in_one_process(first, seed))


@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}])
def test_losses_of_routers_are_of_the_batch_of_their_step(layout: dict[str, Any], tmp_path: Path) -> None:
    """The first step has one micro-batch on a rank, and no choices of others to know before."""
    training = {**TRAINING, **router_runs.router("global_batch"), "micro_batch_size": 2}
    experts = {"dp": 2, "ep": 2}
    first, second = (Case("mixtral", {**one, **experts}, training, zero=1).plan() for one in (layout, {"cp": 2}))

    def expected(seed: int | None = None) -> dict[str, Any]:
        return router_runs.train_in_one_process(first, seed, BATCHES)

    compare(first, second, 3, tmp_path, expected, False, True)
