"""A loop of one's own around accelerate: DDP and FSDP2, its data loader, accumulation and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import Tensor, nn

from ..cells import AUX_LOSS, Cell
from ..reference import STEPS, Batch, balance, counted, inputs, optimizer_of, rows, token_sum
from ..tracing import full
from . import fsdp_on_cpu, whole_parameters

PACKAGES = ("accelerate", "transformers", "torch")
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "fp64"),
    "wrapper": ("ddp", "fsdp2"),
    "tp": (1, 2),
    **AUX_LOSS,
}
"""bf16 on CPUs is autocast, which rounds elsewhere than a copy of the weights does."""


supports, shims = fsdp_on_cpu.unsupported, fsdp_on_cpu.shims


class _Run:
    """The accelerator of a cell on this rank, with what it prepared."""

    def __init__(self, model: nn.Module, cell: Cell) -> None:
        fsdp_on_cpu.install(cell)
        plugin = None
        if cell["wrapper"] == "fsdp2":
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        further: dict[str, Any] = {}
        if cell["tp"] > 1:
            further["parallelism_config"] = ParallelismConfig(dp_shard_size=cell["dp"], tp_size=cell["tp"])
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=cell["accumulation"], fsdp_plugin=plugin, **further
        )
        model = fsdp_on_cpu.distributed(model, cell)
        loader: Any = torch.utils.data.DataLoader(cast(Any, rows(cell)), batch_size=cell["micro_batch"])
        self.model, self.optimizer, loader = self.accelerator.prepare(model, optimizer_of(model.parameters()), loader)
        fsdp_on_cpu.refuse_other(self.model, cell)
        self.loader = loader
        self.micro_batches: Iterator[Batch] = iter(loader)


build = _Run


def step(engine: _Run, batch: Batch, cell: Cell) -> tuple[float, float | None]:
    """On the next micro-batches."""
    total, norm = torch.zeros((), dtype=torch.float64), cast(Any, None)
    for _ in range(cell["accumulation"]):
        micro = next(engine.micro_batches)
        with engine.accelerator.accumulate(engine.model):
            # It divides by the accumulation steps, and its wrappers by ranks.
            times = cell["dp"] * cell["accumulation"]
            outputs = engine.model(**inputs(cell, micro))
            loss = token_sum(outputs.logits, micro["labels"]) / counted(batch) + balance(cell, outputs) / times
            engine.accelerator.backward(loss * times)
            if engine.accelerator.sync_gradients:
                norm = engine.accelerator.clip_grad_norm_(engine.model.parameters(), cell["clipping"] or math.inf)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            total += loss.detach()
    whole = engine.accelerator.reduce(total)
    return float(whole) / cell["tp"], None if norm is None else float(full(norm))


def save(engine: _Run, folder: Path, cell: Cell) -> None:  # noqa: ARG001
    """What `load` goes on from."""
    engine.accelerator.save_state(str(folder))


def load(model: nn.Module, folder: Path, cell: Cell) -> _Run:
    """What was saved, in front of the last step's micro-batches."""
    run = _Run(model, cell)
    run.accelerator.load_state(str(folder))
    run.micro_batches = iter(run.accelerator.skip_first_batches(run.loader, (STEPS - 1) * cell["accumulation"]))
    return run


def full_parameters(engine: _Run, cell: Cell) -> dict[str, Tensor]:  # noqa: ARG001
    """Whole parameters by the names of transformers."""
    return whole_parameters(engine.accelerator.unwrap_model(engine.model))
