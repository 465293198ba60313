"""Hugging Face's `Trainer` around a plan: its callbacks, logging and schedules; the plan's model, groups and batches.

Trainer builds its own engine through accelerate, which hands DeepSpeed an mpu only for Ulysses, and counts every rank
as data-parallel. So the engine gets the plan's mpu while `train` runs, batches come from `PlanLoader`, and the batch
size is left to what DeepSpeed makes of the plan's. Needs the extra `[hf]` and accelerate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from parcompile.plan import Plan
from parcompile.targets.deepspeed import ds_config

from .batches import PlanLoader
from .errors import RunError
from .groups import Mesh, join
from .inject import inject
from .model import build_model
from .mpu import Mpu

__all__ = ["PlanTrainer", "training_arguments"]

_DECIDED = (
    "deepspeed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
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
    options: dict[str, Any] = {"save_strategy": "no", "remove_unused_columns": False, "lr_scheduler_type": "constant"}
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

    Args:
        plan: the plan.
        args: from `training_arguments`.
        train_dataset: samples for `PlanLoader`.
        model: as in `initialize`; None builds the plan's.
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
        model: nn.Module | None = None,
        **others: Any,
    ) -> None:
        self.mesh: Mesh = join(plan)
        model = build_model(plan) if model is None else model
        if getattr(model, "parcompile_mesh", None) is not self.mesh:
            model = inject(model, self.mesh)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **others)
        # The divisor of the loss counts accumulation steps already; Trainer is to divide by them, as DeepSpeed would.
        self.model_accepts_loss_kwargs = False

    def train(self, resume_from_checkpoint: Any = None, **others: Any) -> Any:
        """As in `Trainer`, from the first step."""
        if resume_from_checkpoint:
            _refuse("resume_from_checkpoint", "resume with initialize and parcompile.runtime.checkpoint.load")
        with _engines_of(self.mesh):
            found = super().train(**others)
        self.model_wrapped.mesh = self.mesh  # what checkpoint.save looks for
        return found

    def get_train_dataloader(self) -> PlanLoader:
        """This rank's micro-batches, without end."""
        return PlanLoader(self.train_dataset, self.mesh)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """This rank's part of the loss."""
        loss: Tensor = model(**inputs).loss
        return loss

    def training_step(self, *args: Any, **others: Any) -> Tensor:
        """As in `Trainer`, which logs the mean over all ranks: the parts of a sequence add up."""
        loss: Tensor = super().training_step(*args, **others)
        return loss * self.mesh.size("cp")

    def evaluate(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: Trainer would gather logits that are cut along the vocabulary."""
        _refuse("evaluate", "call the engine on batches of PlanLoader under torch.no_grad(), and reduce_loss")

    def save_model(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: Trainer would write one tensor-parallel rank's weights as the model."""
        _refuse("save_model", "call parcompile.runtime.checkpoint.save(trainer.model_wrapped, folder, step)")

    _save_checkpoint = save_model


def _refuse(what: str, instead: str) -> NoReturn:
    raise RunError(f"PlanTrainer does not {what}: {instead}", everywhere=True)


@contextlib.contextmanager
def _engines_of(mesh: Mesh) -> Iterator[None]:
    """Engines that accelerate builds meanwhile get the plan's groups."""
    import deepspeed

    with mock.patch.object(deepspeed, "initialize", functools.partial(deepspeed.initialize, mpu=Mpu(mesh))):
        yield
