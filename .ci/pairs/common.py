"""What the scripts of this folder share: a tiny DeepSpeed engine and a tiny Trainer run. Upstream alone is imported."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from typing import Any

import torch
from torch import Tensor, nn


def say(of: str, value: float | Tensor, right: float | Tensor, limit: float = 1e-3) -> None:
    """The last line of a script: what was measured, beside what is right."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"of": of, "value": float(value), "right": float(right), "limit": limit}), flush=True)


def group_of_one() -> None:
    """What torchrun says to its ranks, where nobody launched this script: it is the only one."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def engine_of(model: nn.Module, config: dict[str, Any], optimizer: Any = None, **further: Any) -> Any:
    """DeepSpeed's engine; micro-batch 1, no clipping, SGD with a rate of 1 where nothing else is given.

    A key whose value is None is left out.
    """
    group_of_one()
    import deepspeed

    deepspeed.ops.__compatible_ops__ = dict.fromkeys(getattr(deepspeed.ops, "__compatible_ops__", {}), False)
    deepspeed.init_distributed("gloo")
    whole = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **config,
    }
    if optimizer is None and "optimizer" not in whole:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    whole = {key: value for key, value in whole.items() if value is not None}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=whole, **further)[0]


def trained(config: dict[str, Any], batches: list[list[Tensor]]) -> Tensor:
    """How far the second of three matrices of [16, 16] moves by Muon; a batch is a list of micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    for parameter in model.parameters():
        parameter.use_muon = True  # type: ignore[attr-defined]
    start = model[1].weight.detach().clone()
    engine = engine_of(model, {"optimizer": {"type": "Muon", "params": {"lr": 0.1, "momentum": 0.9}}, **config})
    for batch in batches:
        for micro in batch:
            engine.backward(engine(micro).square().mean())
            engine.step()
    import deepspeed

    with deepspeed.zero.GatheredParameters([model[1].weight], enabled=hasattr(model[1].weight, "ds_id")):
        return (model[1].weight.detach().float() - start).clone()


def trainer_norm(model: nn.Module, rows: list[dict[str, Tensor]], accumulation: int, **options: Any) -> float:
    """The gradient norm of transformers' Trainer in its first step: all rows, in micro-batches of equal size."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    norms = []

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if "grad_norm" in logs:
                norms.append(float(logs["grad_norm"]))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=1, logging_steps=1, report_to=[], save_strategy="no",
            per_device_train_batch_size=len(rows) // accumulation, gradient_accumulation_steps=accumulation,
            max_grad_norm=1e9, disable_tqdm=True, **options,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Log()]).train()
    return norms[0]
