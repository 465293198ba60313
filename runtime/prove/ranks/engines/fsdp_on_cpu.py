"""accelerate takes FSDP for GPUs alone, and gives CPUs DDP without a word: its state is told that these are GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..cells import Cell, has_experts

SHIM = "accelerate's state says MULTI_GPU where it is MULTI_CPU, and its device is cpu"


def unsupported(cell: Cell) -> str | None:
    """Why a cell with the feature `wrapper` is not run with FSDP; None where it is, or asks for DDP."""
    if cell["wrapper"] == "fsdp2" and cell["dp"] == 1:
        return "FSDP shards over at least two ranks"
    if cell["wrapper"] == "fsdp2" and has_experts(cell):
        return "FSDP2 of stacked experts is not built by this adapter"
    return None


def shims(cell: Cell) -> tuple[str, ...]:
    """What of the engine is replaced in a cell."""
    return (SHIM,) if cell["wrapper"] == "fsdp2" else ()


def install(cell: Cell) -> None:
    """In this process, before accelerate looks at where it is."""
    if not shims(cell):
        return
    dist.init_process_group("gloo")
    prepare: Any = PartialState._prepare_backend

    def prepared(self: Any, *given: Any, **further: Any) -> tuple[str, Any]:
        backend, kind = prepare(self, *given, **further)
        return backend, DistributedType.MULTI_GPU if kind == DistributedType.MULTI_CPU else kind

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend, PartialState.set_device = prepared, set_device


def refuse_other(model: nn.Module, cell: Cell) -> None:
    """That what accelerate built is what the cell asks for.

    Raises:
        RuntimeError: it is not.
    """
    expected = {"ddp": DistributedDataParallel, "fsdp2": FSDPModule}[cell["wrapper"]]
    if cell["dp"] > 1 and not isinstance(model, expected):
        raise RuntimeError(f"accelerate built {type(model).__name__}, not {expected.__name__}")
