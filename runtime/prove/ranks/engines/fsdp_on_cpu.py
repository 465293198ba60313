"""accelerate takes FSDP for GPUs alone, and gives CPUs DDP without a word: its state is told that these are GPUs.

Tensor and expert parallelism are transformers' own: it loads a model with a `DistributedConfig`.
"""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..cells import Cell, OtherEngineError, has_experts

SHIM = "accelerate's state says MULTI_GPU where it is MULTI_CPU, and its device is cpu"


def unsupported(cell: Cell) -> str | None:
    """Why a cell with the feature `wrapper` is not run with FSDP; None where it is, or asks for DDP."""
    if cell["wrapper"] == "fsdp2" and cell["dp"] == 1:
        return "FSDP shards over at least two ranks"
    if cell["tp"] > 1 or cell.get("ep", 1) > 1:
        return _undistributed(cell)
    if cell["wrapper"] == "fsdp2" and has_experts(cell):
        return "FSDP2 of stacked experts is not built by this adapter"
    return None


def _undistributed(cell: Cell) -> str | None:
    if importlib.util.find_spec("transformers.distributed") is None:
        return "this version of transformers has no DistributedConfig"
    from transformers.distributed import DistributedConfig

    if "tp_size" not in inspect.signature(DistributedConfig).parameters:
        return "this version of transformers has no DistributedConfig with tp_size"
    if cell["dp"] > 1 and cell["wrapper"] == "ddp":
        return "transformers shards over ranks beside tp: wrapper fsdp2"
    if cell.get("ep", 1) > 1 and (not has_experts(cell) or cell["dp"] * cell["tp"] == 1):
        return "ep deals experts to ranks of dp and tp"
    if cell["dtype"] == "fp64" or cell["resume"]:
        return "this adapter distributes a model in fp32 that starts"
    return None


def distributed(model: Any, cell: Cell) -> Any:
    """The model whose parameters are spread by transformers over ranks of tp and ep, and those beside them.

    Raises:
        OtherEngineError: it has no spread parameters.
    """
    if cell["tp"] == 1 and cell.get("ep", 1) == 1:
        return model
    from transformers.distributed import DistributedConfig

    folder = Path(tempfile.gettempdir()) / "whole"
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    sizes = {"tp_size": cell["tp"], "fsdp_size": cell["dp"], "ep_size": cell.get("ep", 1)}
    kernel = {"attn_implementation": "sdpa", "dtype": torch.float32}
    own = type(model).from_pretrained(folder, distributed_config=DistributedConfig(**sizes), **kernel).train()
    if not any(isinstance(parameter, DTensor) for parameter in own.parameters()):
        raise OtherEngineError("transformers spread no parameter")
    return own


def shims(cell: Cell) -> tuple[str, ...]:
    """What of the engine is replaced in a cell."""
    return (SHIM,) if cell["wrapper"] == "fsdp2" or cell["tp"] > 1 or cell.get("ep", 1) > 1 else ()


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
        OtherEngineError: it is not.
    """
    expected = {"ddp": DistributedDataParallel, "fsdp2": FSDPModule}[cell["wrapper"]]
    if cell["dp"] > 1 and not isinstance(model, expected) and shims(cell) == shims({**cell, "tp": 1, "ep": 1}):
        raise OtherEngineError(f"accelerate built {type(model).__name__}, not {expected.__name__}")
