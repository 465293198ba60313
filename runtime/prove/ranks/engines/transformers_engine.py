"""transformers' Trainer over data-parallel ranks, as scripts call it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from ..cells import AUX_LOSS, Cell, OtherEngineError
from ..reference import STEPS, Batch, optimizer_of, rows
from . import fsdp_on_cpu, whole_parameters

os.environ["ACCELERATE_USE_CPU"] = "true"

PACKAGES = ("transformers", "accelerate", "torch")
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "dtype": ("fp32",),
    "wrapper": ("ddp", "fsdp2"),
    "tp": (1, 2),
    "ep": (1, 2),
    **AUX_LOSS,
}
"""The Trainer's own loss is computed in fp32 whatever the weights are, and bf16 on CPUs is autocast."""


supports, shims = fsdp_on_cpu.unsupported, fsdp_on_cpu.shims


class _Run:
    """The Trainer trains all steps at once; its log has each, and those before a resume."""

    def __init__(self, model: nn.Module, cell: Cell, resume_from: str | None = None) -> None:
        fsdp_on_cpu.install(cell)
        options: dict[str, Any] = {}
        own = fsdp_on_cpu.distributed(model, cell)
        if cell["wrapper"] == "fsdp2" and own is model:
            settings = {"version": 2, "fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
            options = {"fsdp": "full_shard", "fsdp_config": settings}
        options |= {"per_device_train_batch_size": cell["micro_batch"], "max_steps": STEPS, "logging_steps": 1}
        options |= {"gradient_accumulation_steps": cell["accumulation"], "max_grad_norm": cell["clipping"] or 1e9}
        options |= {"lr_scheduler_type": "constant", "learning_rate": 1e-2, "save_steps": STEPS - 1, "report_to": []}
        options |= {"save_strategy": "steps" if cell["resume"] else "no", "remove_unused_columns": False}
        options |= {
            "output_dir": f"{tempfile.gettempdir()}/trainer",
            "use_cpu": True,
            "ddp_backend": "gloo",
            "disable_tqdm": True,
        }
        arguments = TrainingArguments(**options)
        self.params: list[dict[str, Tensor]] = []
        self.trainer = _Sequential(
            model=own,
            args=arguments,
            train_dataset=rows(cell),
            callbacks=[_Watch(self, cell["resume"] and resume_from is None)],
            data_collator=default_data_collator,
        )
        self.trainer.train(resume_from_checkpoint=resume_from)
        fsdp_on_cpu.refuse_other(self.trainer.model_wrapped, cell)
        if arguments.world_size != dist.get_world_size() if dist.is_initialized() else cell["dp"] != 1:
            raise OtherEngineError(f"the Trainer ran on {arguments.world_size} ranks of {cell['dp']}")
        log = [one for one in self.trainer.state.log_history if "loss" in one][STEPS - 1 if resume_from else 0 :]
        self.steps = iter([(float(one["loss"]), one.get("grad_norm")) for one in log])


build = _Run


def step(engine: _Run, batch: Batch, cell: Cell) -> tuple[float, float | None]:  # noqa: ARG001
    """What the log has of the next step."""
    return next(engine.steps)


def save(engine: _Run, folder: Path, cell: Cell) -> None:
    """The Trainer saved already; it is looked up where it did."""


def load(model: nn.Module, folder: Path, cell: Cell) -> _Run:  # noqa: ARG001
    """The last step, by the Trainer that resumes."""
    return _Run(model, cell, f"{tempfile.gettempdir()}/trainer/checkpoint-{STEPS - 1}")


def full_parameters(engine: _Run, cell: Cell) -> dict[str, Tensor]:  # noqa: ARG001
    """Whole parameters by the names of transformers, after the first step and after all."""
    return engine.params.pop(0)


class _Sequential(Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def create_optimizer(self, *_: Any, **__: Any) -> Any:
        self.optimizer: Any = getattr(self, "optimizer", None) or optimizer_of(self.model.parameters())
        return self.optimizer


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Keeps whole parameters after the first and the last step of a run; one that is resumed ends where it saved."""

    def __init__(self, run: _Run, ends: bool) -> None:
        self._run, self._ends = run, ends

    def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        trainer = self._run.trainer
        self._run.params[1:] = [whole_parameters(trainer.accelerator.unwrap_model(trainer.model_wrapped))]

    def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
        control.should_training_stop |= self._ends
        return control
