"""The peers of the adapter's benchmark: engines that train the same model on the same two ranks.

Each function is called on every rank with the folder of a Hugging Face model and the settings of the run, and returns
how a step is made: a function from the whole batch [B, S] to the loss.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Step = Callable[[Tensor], float]


def ds_config(settings: dict[str, Any], dp: int) -> dict[str, Any]:
    """What the plan says too: AdamW of torch, fp32, ZeRO stage 1, clipping."""
    return {
        "train_micro_batch_size_per_gpu": settings["batch"] // dp,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": settings["lr"], "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }


def deepspeed_dp(folder: str, settings: dict[str, Any]) -> Step:
    """Plain DeepSpeed: the whole model on each rank, half of the sequences."""
    engine = _engine(_model(folder), ds_config(settings, 2))

    def step(ids: Tensor) -> float:
        mine = ids.chunk(2)[dist.get_rank()]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / 2

    return step


def deepspeed_autotp(folder: str, settings: dict[str, Any]) -> Step:
    """DeepSpeed's AutoTP in training mode, the model cut by its own rules."""
    # It counts both ranks as data-parallel while it reads its configuration: no train_batch_size fits.
    config = ds_config(settings, 1) | {"tensor_parallel": {"autotp_size": 2}}
    engine = _engine(_model(folder), config)

    def step(ids: Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def transformers_tp(folder: str, settings: dict[str, Any]) -> Step:
    """transformers' own tensor parallelism (DTensor), with torch's optimizer: it has no engine."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).train()
    # Cut and whole parameters do not mix in one call of torch's optimizers and norms.
    parameters = list(model.parameters())
    groups = [[one for one in parameters if isinstance(one, DTensor) is cut] for cut in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups if group], settings["lr"], betas=(0.9, 0.95), weight_decay=0.1
    )

    def clip() -> None:
        norms = [torch.nn.utils.get_total_norm([one.grad for one in group]) for group in groups if group]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        factor = min(1.0, 1.0 / (float(torch.stack(norms).norm()) + 1e-6))
        for parameter in parameters:
            parameter.grad.mul_(factor)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip()
        optimizer.step()
        return float(loss.detach())

    return step


def _model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def start_deepspeed() -> None:
    """Lets DeepSpeed begin on this rank, without extensions of C++ and without its talk."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed

    from parcompile.runtime.deepspeed_patches.engine import forbid_jit_builds

    forbid_jit_builds()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo")


def _engine(model: Any, config: dict[str, Any]) -> Any:
    import deepspeed

    start_deepspeed()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    engine.train()
    return engine


PEERS: dict[str, Callable[[str, dict[str, Any]], Step]] = {
    "DeepSpeed, dp 2": deepspeed_dp,
    "DeepSpeed AutoTP, tp 2": deepspeed_autotp,
    "transformers, tp 2": transformers_tp,
}
