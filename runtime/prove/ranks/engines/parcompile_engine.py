"""The runtime of parcompile: a spec of the cell, its plan, and the engine that executes it."""

from __future__ import annotations

import functools
import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..cells import AUX_LOSS, Cell, batch_size, has_experts, planned
from ..reference import ADAMW, STEPS, Batch, configuration, rows, sequence_length

os.environ["DS_ACCELERATOR"] = "cpu"

import parcompile
from parcompile.runtime import checkpoint, initialize
from parcompile.runtime.settings import HEARTBEAT

for _name in ("parcompile.api", "torch._inductor.compile_fx"):
    importlib.import_module(_name)  # what each rank would import, once in front of all forks: two seconds of each

PACKAGES = ("parcompile", "deepspeed", "transformers", "torch")
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "dtype": ("fp32",),  # in which exported weights are compared
    "stage": (1, 0, 2),
    "tp": (1, 2),
    "cp": (1, 2),
    "pp": (1, 2),
    "ep": (1, 2),
    "sequence_parallel": (False, True),
    "checkpointing": ("none", "full"),
    **AUX_LOSS,
    "plan": ("",),
}


def supports(cell: Cell) -> str | None:
    """None where the engine has such a run, else why it has not."""
    if cell["ep"] > 1 and (not has_experts(cell) or cell["dp"] * cell["cp"] % cell["ep"]):
        return "ep takes experts, and ranks of dp and cp that it divides"
    if cell["sequence_parallel"] and cell["tp"] == 1:
        return "sequence parallelism goes with tp"
    if cell["plan"] or cell["stage"] == 2:
        return _refused(json.dumps({**cell, "masks": "none", "seed": 0, "resume": False, "packed": False}))
    return None


@functools.cache
def _refused(cell: str) -> str | None:
    """What the compiler says against a cell."""
    with tempfile.TemporaryDirectory() as folder:
        checked = parcompile.check(spec_of(json.loads(cell), Path(folder)), estimate=False)
    wrong = [finding.message for finding in checked.diagnostics if finding.is_error or finding.code.startswith("X")]
    return wrong[0] if wrong else None


class _Run:
    """The engine of a cell, and its batches in order, from that of step `first` on."""

    def __init__(self, model: nn.Module, cell: Cell, first: int = 0) -> None:
        os.environ[HEARTBEAT] = "0"  # the server watches its processes
        # The same path on every rank: it is part of the plan.
        plan = parcompile.compile(spec_of(cell, Path(tempfile.gettempdir()) / "config"), estimate=False)
        samples = rows(cell)[first * batch_size(cell) :]
        self.engine, _, loader, _ = initialize(plan=plan, model=model, training_data=samples, measurements=False)
        assert loader is not None
        self.batches = iter(loader)


def spec_of(cell: Cell, folder: Path) -> dict[str, Any]:
    """The cell as a spec, whose model is in a folder."""
    config, given = configuration(cell), planned(cell)
    folder.mkdir(exist_ok=True)
    own = Path(tempfile.mkdtemp(dir=folder))
    config.save_pretrained(own)
    (own / "config.json").replace(folder / "config.json")
    axes = {axis: cell[axis] for axis in ("dp", "tp", "cp", "pp", "ep") if axis != "ep" or cell["ep"] > 1}
    return {
        "version": 1,
        "name": "cell",
        "model": {"hf_config": str(folder / "config.json")},
        "cluster": {"gpus_per_node": cell["dp"] * cell["tp"] * cell["cp"] * cell["pp"], "accelerator": "cpu"},
        "parallelism": {
            "make_vocab_size_divisible_by": 8,
            **given.get("parallelism", {}),
            **axes,
            "sequence_parallel": cell["sequence_parallel"],
        },
        "training": {
            "sequence_length": sequence_length(cell),
            "global_batch_size": batch_size(cell),
            "micro_batch_size": cell["micro_batch"],
            "precision": "fp32",
            "gradient_clipping": cell["clipping"],
            "activation_checkpointing": given.get("activation_checkpointing", cell["checkpointing"]),
            "optimizer": {**ADAMW, "betas": list(ADAMW["betas"])},
        },
        "zero": {"stage": cell["stage"]},
        "deepspeed": given.get("deepspeed", {}),
    }


build = _Run


def step(engine: _Run, batch: Batch, cell: Cell) -> tuple[float, float | None]:  # noqa: ARG001 -- the loader has it
    """On the next global batch."""
    loss = float(engine.engine.train_batch(engine.batches))
    return loss, float(engine.engine.get_global_grad_norm())


def save(engine: _Run, folder: Path, cell: Cell) -> None:  # noqa: ARG001
    """What `load` goes on from."""
    checkpoint.save(engine.engine, folder, STEPS - 1)


def load(model: nn.Module, folder: Path, cell: Cell) -> _Run:
    """What was saved, in front of the last step."""
    run = _Run(model, cell, STEPS - 1)
    checkpoint.load(run.engine, folder)
    return run


def full_parameters(engine: _Run, cell: Cell) -> dict[str, Tensor]:  # noqa: ARG001
    """Whole parameters by the names of transformers."""
    from transformers import AutoModelForCausalLM

    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    engine.engine.module.save_pretrained(folder[0])
    dist.barrier()
    model: Any = AutoModelForCausalLM.from_pretrained(folder[0])
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
