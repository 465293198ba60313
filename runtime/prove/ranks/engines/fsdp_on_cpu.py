"""accelerate takes FSDP for GPUs alone, and gives CPUs DDP without a word: its state is told that these are GPUs.

Tensor and expert parallelism are transformers' own: it loads a model with a `DistributedConfig`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import tempfile
from collections.abc import Collection
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

from ..cells import Cell, OtherEngineError, has_experts, refusal

SHIM = "accelerate's state says MULTI_GPU where it is MULTI_CPU, and its device is cpu"


def unsupported(cell: Cell) -> str | None:
    """Why a cell with the feature `wrapper` is not run with FSDP; None where it is, or asks for DDP."""
    sharded, ep, own = cell["wrapper"] == "fsdp2", cell.get("ep", 1) > 1, _distributes(cell)
    fewer = "this version of transformers has no DistributedConfig with tp_size"
    return refusal(
        (sharded and cell["dp"] == 1, "FSDP shards over at least two ranks"),
        (sharded and has_experts(cell) and not own, "FSDP2 of stacked experts is not built by this adapter"),
        (own and "tp_size" not in _distributed_parameters(), fewer),
        (own and cell["dp"] > 1 and not sharded, "transformers shards over ranks beside tp: wrapper fsdp2"),
        (ep and not has_experts(cell), "ep takes experts"),
        (ep and cell["dp"] * cell["tp"] == 1, "ep deals experts to ranks of dp and tp"),
        (own and (cell["dtype"] == "fp64" or cell["resume"]), "this adapter distributes a model in fp32 that starts"),
    )


def _distributes(cell: Cell) -> bool:
    return bool(cell["tp"] > 1 or cell.get("ep", 1) > 1)


@functools.cache
def _distributed_parameters() -> Collection[str]:
    if importlib.util.find_spec("transformers.distributed") is None:
        return ()
    from transformers.distributed import DistributedConfig

    return inspect.signature(DistributedConfig).parameters


def distributed(model: Any, cell: Cell) -> Any:
    """The model whose parameters are spread by transformers over ranks of tp and ep, and those beside them.

    Raises:
        OtherEngineError: it has no spread parameters.
    """
    if not _distributes(cell):
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
    return (SHIM,) if cell["wrapper"] == "fsdp2" or _distributes(cell) else ()


def install(cell: Cell) -> None:
    """In this process, before accelerate looks at where it is."""
    if not shims(cell):
        return
    dist.init_process_group("gloo")
    prepare: Any = PartialState._prepare_backend

    def prepared(self: Any, *given: Any, **further: Any) -> tuple[str, Any]:
        backend, kind = prepare(self, *given, **further)
        return backend, DistributedType.MULTI_GPU if kind == DistributedType.MULTI_CPU else kind

    PartialState._prepare_backend = prepared
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def refuse_other(model: nn.Module, cell: Cell) -> None:
    """That what accelerate built is what the cell asks for.

    Raises:
        OtherEngineError: it is not.
    """
    expected = {"ddp": DistributedDataParallel, "fsdp2": FSDPModule}[cell["wrapper"]]
    if cell["dp"] > 1 and not isinstance(model, expected):
        raise OtherEngineError(f"accelerate built {type(model).__name__}, not {expected.__name__}")
