"""Hugging Face's `Trainer` around a plan: its callbacks, logging and schedules; the plan's model, groups and batches.

Trainer builds its own engine through accelerate, which hands DeepSpeed an mpu only for Ulysses, and counts every rank
as data-parallel. So the engine gets the plan's mpu while `train` runs, batches come from `PlanLoader`, and the batch
size is left to what DeepSpeed makes of the plan's. Needs the extra `[hf]` and accelerate.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from parcompile.backends.deepspeed.write import ds_config
from parcompile.plan import Plan

from .checkpoint import load, save
from .data import PlanLoader
from .deepspeed_patches.engine import initialize_with
from .engine import options_for_deepspeed, prepare, seed_ranks, take_over
from .engine.loop import evaluate
from .errors import RunError
from .groups import Mesh, join
from .groups.mesh import Mpu
from .inject.adapters import INJECTED_FIRST
from .inject.loading import load_pretrained
from .model.building import build_model

__all__ = ["PlanTrainer", "training_arguments"]

_DECIDED = (
    "deepspeed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "max_grad_norm",
    "bf16",
    "fp16",
    "seed",
    "learning_rate",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
)


def training_arguments(plan: Plan, output_dir: str, *, max_steps: int, **others: Any) -> TrainingArguments:
    """Arguments that say what the plan says; `others` are free.

    Raises:
        RunError: an argument is the plan's to decide.
    """
    if decided := sorted(set(others) & set(_DECIDED)):
        raise RunError(f"the plan decides {', '.join(decided)}: change the spec and compile it again", everywhere=True)
    training = plan.spec.training
    config = ds_config(plan)
    # Trainer would compare it with a product over all ranks, as if each were data-parallel.
    config.pop("train_batch_size")
    if training.lr_scheduler is not None:
        # The engine follows the plan's schedule; Trainer would compare these with its own, and max_steps with its end.
        config["scheduler"]["params"] = {}
    options: dict[str, Any] = {"save_strategy": "no", "remove_unused_columns": False, "lr_scheduler_type": "constant"}
    # Without it accelerate has DeepSpeed compile a C++ extension for CPU ranks, which nothing here uses.
    options["use_cpu"] = plan.spec.cluster.accelerator == "cpu"
    return TrainingArguments(
        output_dir=output_dir,
        max_steps=max_steps,
        deepspeed=config,
        per_device_train_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        max_grad_norm=training.gradient_clipping,
        bf16=training.precision.value == "bf16",
        fp16=training.precision.value == "fp16",
        seed=training.seed,
        learning_rate=training.optimizer.lr,
        adam_beta1=training.optimizer.betas[0],
        adam_beta2=training.optimizer.betas[1],
        adam_epsilon=training.optimizer.eps,
        weight_decay=training.optimizer.weight_decay,
        **{**options, **others},
    )


class PlanTrainer(Trainer):  # type: ignore[misc]
    """`Trainer(model, args, train_dataset)` for a plan.

    Checkpoints are those of `parcompile.runtime.checkpoint`, in the folder `checkpoints` of the output folder.

    Args:
        plan: the plan.
        args: from `training_arguments`.
        train_dataset: samples for `PlanLoader`.
        eval_dataset: samples for `evaluate`.
        model: as in `initialize`, or the path of a Hugging Face folder; None builds the plan's.
        peft_config: a `LoraConfig` of peft: adapters are put on the model before it is injected, drawn after
            `torch.manual_seed` of the plan's seed where the model is given whole.
        others: what `Trainer` takes, such as callbacks. Optimizers are the plan's.

    Raises:
        RunError: as `initialize`.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        args: TrainingArguments,
        train_dataset: Sequence[Any],
        eval_dataset: Sequence[Any] | None = None,
        model: nn.Module | str | Path | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        self.mesh: Mesh = join(plan)
        self._batches = PlanLoader(train_dataset, self.mesh)
        self._waiting: list[dict[str, Any]] = []
        model = prepare(plan, self.mesh, _adapted(plan, model, peft_config))
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **others)
        seed_ranks(self.mesh)  # Trainer has seeded all ranks alike
        # The divisor of the loss counts accumulation steps already; Trainer is to divide by them, as DeepSpeed would.
        self.model_accepts_loss_kwargs = False

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> Any:
        """As in `Trainer`, from the first step, or after the last checkpoint (True) or that of a folder."""
        resume = None
        if resume_from_checkpoint:
            resume = _Resume(self, self._folder if resume_from_checkpoint is True else Path(resume_from_checkpoint))
            self.add_callback(resume)
        try:
            given = functools.partial(options_for_deepspeed, self.mesh)
            with initialize_with(Mpu(self.mesh), lambda engine: take_over(engine, self.mesh), given):
                return super().train(**others)
        finally:
            if resume is not None:
                self.remove_callback(resume)

    @property
    def _folder(self) -> Path:
        return Path(self.args.output_dir) / "checkpoints"

    def get_train_dataloader(self) -> PlanLoader:
        """This rank's micro-batches, without end."""
        return self._batches

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """The loss of this rank's sequences."""
        loss: Tensor = model(**inputs).loss
        return loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **others: Any) -> Tensor:
        """As in `Trainer`; through a pipeline the micro-batches of a step go together, when the last has come."""
        if self.mesh.size("pp") == 1:
            loss: Tensor = super().training_step(model, inputs, *args, **others)
            return loss
        self._waiting.append(inputs)
        if len(self._waiting) < self.args.gradient_accumulation_steps:
            return torch.zeros((), device=self.mesh.device)
        batches, self._waiting = self._waiting, []
        whole: Tensor = self.model_wrapped.train_batch(iter(batches))
        return whole

    def evaluate(
        self, eval_dataset: Sequence[Any] | None = None, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> dict[str, float]:
        """The loss of `parcompile.runtime.evaluate`, under way or after `train`.

        Raises:
            RunError: there is no data set, or no engine yet.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None or not hasattr(self.model_wrapped, "mesh"):
            raise RunError("evaluate needs an eval_dataset and an engine, which train makes", everywhere=True)
        metrics = {f"{metric_key_prefix}_loss": evaluate(self.model_wrapped, dataset)}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model, or its adapters, for `from_pretrained`, and the tokenizer. Every rank calls it.

        Raises:
            RunError: as `save_pretrained` of an injected model.
        """
        folder = output_dir or self.args.output_dir
        self.model.save_pretrained(folder)
        if self.args.should_save and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        save(self.model_wrapped, self._folder, self.state.global_step, keep=self.args.save_total_limit)


def _adapted(plan: Plan, model: nn.Module | str | Path | None, peft_config: Any) -> nn.Module | None:
    """The model that is to be injected, with adapters where they are asked for.

    Raises:
        RunError: the model is injected, or has adapters.
    """
    if isinstance(model, str | Path):
        return load_pretrained(model, plan, peft_config)
    if peft_config is None:
        return model
    if getattr(model, "parcompile_mesh", None) is not None:
        raise RunError(INJECTED_FIRST, everywhere=True)
    if hasattr(model, "peft_config"):
        raise RunError("a model that has adapters is given with a peft_config: leave one of them out", everywhere=True)
    from peft import get_peft_model

    model = build_model(plan) if model is None else model
    with torch.random.fork_rng():
        torch.manual_seed(plan.spec.training.seed)
        adapted: nn.Module = get_peft_model(model, peft_config)
    return adapted


class _Resume(TrainerCallback):  # type: ignore[misc]
    """Loads a checkpoint when the engine is there and nothing is trained yet."""

    def __init__(self, trainer: PlanTrainer, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 -- Trainer's
        trainer = self._trainer
        done = load(trainer.model_wrapped, self._folder)
        if done >= state.max_steps:
            raise RunError(f"the checkpoint has made {done} steps, and max_steps is {state.max_steps}", everywhere=True)
        state.global_step = trainer._batches.step = done
        # What Trainer divides its logged loss and its speed by.
        trainer._globalstep_last_logged = trainer._initial_global_step = done
