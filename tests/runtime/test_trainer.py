"""Contract: Hugging Face's Trainer around a plan trains, logs and saves what one process does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, nudge
from expert_runs import Case
from families import tiny_config
from ranks import run_ranks
from training_runs import (
    initial_model,
    make_plan,
    samples,
    train_in_one_process,
    trainer_arguments,
    whole_parameters,
)

from parcompile.plan import Plan
from parcompile.runtime.deepspeed_patches.optimizer_state import parameter_groups
from parcompile.runtime.run_log import read_rows
from parcompile.show.run import read_run

pytest.importorskip("accelerate")
pytestmark = pytest.mark.ranks

STEPS = 3


def train(rank: int, plan: Plan, folder: str, resume: bool) -> dict[str, Any]:
    """Three steps, two of them saved; resumed, the third alone. The evaluation is on the next step's data."""
    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import PlanTrainer, training_arguments

    options = {
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": STEPS,
    }
    args = training_arguments(plan, folder, max_steps=STEPS, **options)
    data = samples(plan)
    next_batch = data[STEPS * plan.spec.training.global_batch_size :][: plan.spec.training.global_batch_size]

    trainer = PlanTrainer(plan=plan, args=args, train_dataset=data, eval_dataset=next_batch, model=initial_model(plan))
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoints/step-2" if resume else None)
    trainer.save_model(f"{folder}/saved")
    found: dict[str, Any] = {"flos": trainer.state.total_flos}
    found["groups"] = [len(group) for group in parameter_groups(trainer.model_wrapped.optimizer)]
    try:
        training_arguments(plan, folder, max_steps=1, bf16=1)
    except RunError as error:
        found["said"] = str(error)
    for kind in ("loss", "grad_norm", "eval_loss"):
        found[kind] = [entry[kind] for entry in trainer.state.log_history if kind in entry]
    return found


def loss_of(folder: Path, plan: Plan) -> float:
    """Of what `save_model` wrote after the last step, with transformers alone, on the next step's data."""
    from transformers import AutoModelForCausalLM

    size = plan.spec.training.global_batch_size
    batch = samples(plan)[STEPS * size : (STEPS + 1) * size]
    ids, labels = (torch.stack([sample[key] for sample in batch]) for key in ("input_ids", "labels"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return float(model(input_ids=ids, labels=labels).loss)


def in_one_process(plan: Plan, seed: int | None = None) -> dict[str, Any]:
    return train_in_one_process(plan, steps=STEPS + 1, seed=seed, of_trainer=True)


def assert_trained(rank: dict[str, Any], plan: Plan) -> None:
    """As one process, and evaluated on what it would train on next."""

    def one_process(seed: int | None) -> dict[str, Any]:
        found = in_one_process(plan, seed)
        losses = found["losses"]
        return {"loss": losses[:STEPS], "grad_norm": found["norms"][:STEPS], "eval_loss": losses[STEPS:]}

    expected = one_process(None)
    assert_close({key: rank[key] for key in expected}, expected, rerun=one_process)
    tokens = STEPS * plan.spec.training.global_batch_size * plan.spec.training.sequence_length
    assert rank["flos"] == 6 * tokens * initial_model(plan).num_parameters(exclude_embeddings=True)


def assert_reported(folder: Path, plan: Plan, rank: dict[str, Any]) -> None:
    """metrics.jsonl has every step of the log once, also behind a resume, for `parcompile report`."""
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for name, key in (("loss", "loss"), ("gradient_norm", "grad_norm")):
        assert [row[name] for row in rows] == rank[key]
    tokens = plan.spec.training.global_batch_size * plan.spec.training.sequence_length
    for row in rows:
        assert row["tokens"] == tokens
        assert row["tokens_per_s"] == pytest.approx(tokens / row["seconds"])
        assert row["memory_peak_bytes"] > 0
    found = read_run(folder)
    assert len(found.of_plan(plan.plan_hash)) == STEPS
    assert (folder / "loss.svg").exists()


@pytest.mark.parametrize("other", ["cp", "pp"])
def test_the_trainer_trains_evaluates_saves_and_resumes_a_plan(other: str, tmp_path: Path) -> None:
    """With kv heads that both tp ranks hold in a part of a weight, and layers that are recomputed."""
    training = {
        "activation_checkpointing": "full",
        "micro_batch_size": 1,
        "eval_micro_batch_size": 2,
        "eval_global_batch_size": 2,
    }
    model = {"model_type": "phi3", "num_key_value_heads": 1, "pad_token_id": None}
    plan = make_plan(4, {"tp": 2, other: 2}, model=model, training=training)
    ranks = run_ranks(4, train, plan, str(tmp_path), False)
    for rank in ranks:
        assert_trained(rank, plan)
        assert "the plan decides bf16" in rank["said"]
    assert_close(
        loss_of(tmp_path / "saved", plan), train_in_one_process(plan, steps=STEPS + 1, of_trainer=True)["losses"][STEPS]
    )
    assert_reported(tmp_path, plan, ranks[0])
    again = run_ranks(4, train, plan, str(tmp_path), True)
    assert_reported(tmp_path, plan, ranks[0])
    for kind in ("loss", "grad_norm", "eval_loss"):
        assert again[0][kind] == ranks[0][kind][-1:]


@pytest.mark.parametrize(("left_out", "decayed"), [("vectors", False), ("biases_and_norms", True), (None, True)])
def test_the_trainer_decays_what_the_plan_says_or_as_it_does_itself(
    left_out: str | None, decayed: bool, tmp_path: Path
) -> None:
    """Sinks of attention have one dim: Megatron-LM does not decay them, Trainer does."""
    optimizer = {"lr": 1e-3, **({} if left_out is None else {"no_weight_decay": left_out})}
    training = {"optimizer": optimizer, "activation_checkpointing": "full"}
    plan = make_plan(1, {}, model=tiny_config("gpt_oss"), whole_model=True, training=training)
    names = {name: one.dim() > 1 and not name.endswith("bias") for name, one in initial_model(plan).named_parameters()}
    names.update({name: decayed for name in names if name.endswith("sinks")})
    (found,) = run_ranks(1, train, plan, str(tmp_path), False)
    assert found["groups"] == [sum(names.values()), len(names) - sum(names.values())]


def test_the_trainer_trains_experts_that_are_dealt_over_ranks(tmp_path: Path) -> None:
    """At ZeRO stage 0, whose optimizer Trainer gets in DeepSpeed's place."""
    training = {"activation_checkpointing": "full", "eval_micro_batch_size": 2, "eval_global_batch_size": 4}
    plan = Case("mixtral", {"dp": 2, "ep": 2}, training, zero=0).plan()
    for rank in run_ranks(2, train, plan, str(tmp_path), False):
        assert_trained(rank, plan)
    assert_close(
        loss_of(tmp_path / "saved", plan), train_in_one_process(plan, steps=STEPS + 1, of_trainer=True)["losses"][STEPS]
    )


@pytest.mark.parametrize(
    ("optimizer", "zero"),
    [
        ({"type": "muon", "lr": 0.01, "eps": 1e-3, "ns_dtype": "fp32"}, {"stage": 2}),
        ({"type": "adagrad", "lr": 0.01}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
        ({"type": "adamw", "lr": 1e-3, "weight_decay": 0.1}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    ],
    ids=["muon", "adagrad on the host", "adamw on the host"],
)
def test_the_trainer_trains_with_the_plans_optimizer(
    optimizer: dict[str, Any], zero: dict[str, Any], tmp_path: Path
) -> None:
    training = {"activation_checkpointing": "full", "eval_micro_batch_size": 2, "eval_global_batch_size": 4}
    plan = make_plan(4, {"tp": 2}, training={**training, "optimizer": optimizer}, extra={"zero": zero})
    for rank in run_ranks(4, train, plan, str(tmp_path), False):
        assert_trained(rank, plan)


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Of different lengths, the first third without labels."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        ids = torch.randint(3, 61, (7 + 4 * number % 10,), generator=generator)
        found.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(len(ids)) < len(ids) // 3, -100)})
    return found


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that pads to the longest of the batch."""
    pad: Callable[..., torch.Tensor] = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids, labels = ([one[name] for one in samples] for name in ("input_ids", "labels"))
    mask = pad([torch.ones_like(one) for one in ids])
    return {"input_ids": pad(ids), "labels": pad(labels, padding_value=-100), "attention_mask": mask}


def metrics(given: Any) -> dict[str, float]:
    """Of whole logits."""
    logits, labels = torch.tensor(given.predictions)[:, :-1], torch.tensor(given.label_ids)[:, 1:]
    chosen = logits[labels != -100]
    assert chosen.shape[-1] == 61
    return {"best": float(chosen.amax(-1).mean()), "spread": float(chosen.std())}


def with_a_margin(kind: Any) -> Any:
    """A class with a loss of its own, which looks at single sequences and whole logits."""

    class Margin(kind):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")[:, 1:]
            outputs = model(**inputs)
            logs = outputs.logits[:, :-1].log_softmax(-1)
            chosen = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels != -100)
            loss = -torch.nn.functional.logsigmoid(0.1 * chosen.sum(-1) + 3).mean()
            return (loss, outputs) if return_outputs else loss

    return Margin


def script(kind: Any, plan: Plan, folder: str, own: bool, nudged: int | None = None, **given: Any) -> Any:
    """What somebody has written for `Trainer`, without a plan."""
    from transformers import TrainingArguments

    kind = with_a_margin(kind) if own else kind
    args = TrainingArguments(
        folder, num_train_epochs=2, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="epoch",
        eval_strategy="epoch", per_device_eval_batch_size=2, use_cpu=True, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True, **given,  # the first one: not that of the last step
    )  # fmt: skip
    model, data = initial_model(plan), rows(13)
    nudge(model, nudged)
    trainer = kind(
        model=model,
        args=args,
        train_dataset=data[: 8 if own else 10],
        eval_dataset=data[10:],
        data_collator=padded,
        compute_metrics=metrics,
    )
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[dict[str, float]]:
    clocks = ("runtime", "per_second")
    lines = trainer.state.log_history
    return [{name: value for name, value in one.items() if not name.endswith(clocks)} for one in lines[:-1]]


def in_a_script(rank: int, plan: Plan, folder: str, own: bool) -> dict[str, Any]:
    from transformers import LlamaForSequenceClassification, Trainer

    from parcompile.runtime import RunError
    from parcompile.runtime.trainer import parallelise

    kind = parallelise(Trainer, plan)
    trainer = script(kind, plan, folder, own)
    trainer.save_model(f"{folder}/saved")
    found = {"rank": rank, "log": logged(trainer), "said": []}
    found["parameters"] = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    for call in (
        lambda: script(kind, plan, folder, own, learning_rate=3e-3),
        lambda: script(kind, plan, folder, own, neftune_noise_alpha=5.0, accelerator_config={"split_batches": True}),
        lambda: trainer.train(resume_from_checkpoint=f"{folder}/nothing"),
        lambda: script(kind, plan, folder, own, save_total_limit=1),
        lambda: parallelise(trainer, plan),
        lambda: kind(model=LlamaForSequenceClassification(trainer.model.config), args=trainer.args),
    ):
        try:
            call()
        except RunError as error:
            found["said"].append(str(error))
    return found


@pytest.mark.parametrize("own", [False, True], ids=["tp2 x cp2", "cp2 x dp2, a loss of its own"])
def test_a_script_for_trainer_trains_by_a_plan_with_a_line_more(own: bool, tmp_path: Path) -> None:
    """Every line of the log: loss, gradient norm, learning rate, epoch, step, evaluation, metrics; and all weights."""
    from transformers import Trainer

    axes, training = ({"cp": 2}, {"micro_batch_size": 1}) if own else ({"tp": 2, "cp": 2}, {"micro_batch_size": 2})
    plan = make_plan(4, axes, training=training)
    spec = plan.spec.training

    def one_process(seed: int | None) -> dict[str, Any]:
        trainer = script(Trainer, plan, str(tmp_path / "plain"), own, seed, **trainer_arguments(plan))
        parameters = {name: one.detach() for name, one in trainer.model.named_parameters()}
        return {"log": logged(trainer), "parameters": parameters}

    expected = one_process(None)
    ranks = run_ranks(4, in_a_script, plan, str(tmp_path), own)
    found = {"log": ranks[0]["log"], "parameters": whole_parameters(plan, ranks)}
    assert_close(found, expected, rerun=one_process)
    for rank in ranks:
        assert rank["log"] == ranks[0]["log"]
        differs, ignored, resumes, removes, instance, classifier = rank["said"]
        assert "neftune_noise_alpha is 5.0: each rank would draw noise of its own" in ignored
        assert "accelerator_config.split_batches is True" in ignored
        assert f"learning_rate is 0.003, the plan has {spec.optimizer.lr}" in differs
        assert "nothing has no trainer_state.json: a parallelised trainer resumes from" in resumes
        assert "save_total_limit 1 may remove the checkpoint that load_best_model_at_end loads" in removes
        assert "takes a class of transformers' Trainer" in instance
        assert "LlamaForSequenceClassification is a classifier of sequences, and the plan is for" in classifier
        assert "write num_labels under model in the spec" in classifier


def order_of(rank: int) -> list[int]:
    import torch.distributed as dist
    from torch.utils.data import RandomSampler

    from parcompile.runtime.trainer import OneOrder

    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    return list(OneOrder(RandomSampler(range(20)), dist.group.WORLD))


def test_ranks_draw_one_order_where_the_sampler_draws_from_torchs_generator() -> None:
    first, second = run_ranks(2, order_of)
    assert first == second != sorted(first)


def uncounted(_: int, plan: Plan, on_ranks: bool, folder: str) -> list[list[float]]:
    """Losses and norms of two epochs of nine samples, under a Trainer that gives its loss no number of tokens."""
    from transformers import Trainer, TrainingArguments

    from parcompile.runtime.trainer import parallelise

    kind = parallelise(Trainer, plan) if on_ranks else Trainer
    given = {} if on_ranks else {**trainer_arguments(plan), "per_device_train_batch_size": 1}
    given |= {} if on_ranks else {"gradient_accumulation_steps": plan.spec.training.global_batch_size}
    args = TrainingArguments(folder, num_train_epochs=2, logging_steps=1, report_to=[], use_cpu=True, **given)
    trainer = kind(model=initial_model(plan), args=args, train_dataset=samples(plan)[:9])
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    return [[line[name] for line in log] for name in ("loss", "grad_norm")]


def test_a_last_batch_counts_in_full_where_the_loss_gets_no_number_of_tokens(tmp_path: Path) -> None:
    """One sample is left for two ranks at the end of each epoch."""
    plan = make_plan(2, {}, training={"global_batch_size": 4, "micro_batch_size": 1})
    (expected,) = run_ranks(1, uncounted, plan, False, str(tmp_path / "one"))
    for found in run_ranks(2, uncounted, plan, True, str(tmp_path / "two")):
        assert len(found[0]) == 6
        assert found == [pytest.approx(one, rel=1e-4) for one in expected]
