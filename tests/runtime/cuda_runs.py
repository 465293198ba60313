"""Small plans of families for GPUs, run on `cuda` without one: what they send, wait for and compute attention by.

    python tests/runtime/cuda_runs.py FAMILY …

prints a line of JSON for each run. It has to be a process of its own: `cuda` has to be there before its first backward
pass. The suite runs a few families, `.ci/cuda_table.py` all of them.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
from families import tiny_config
from training_runs import make_plan

from parcompile.plan import Plan

ROUGHLY = {"activations of a micro-batch", "peak of the step"}
"""What is not compared to the byte, and is larger than everything else in so small a model."""
RANK = 1


@dataclass
class CudaRun:
    """One run, and what was found."""

    family: str
    layout: str
    differs: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    """Those that docs/cuda.md does not list."""
    kernels: list[str] = field(default_factory=list)
    slower: list[str] = field(default_factory=list)
    note: str = ""


def drawn(family: str, count: int = 2) -> Iterator[tuple[str, Plan, bool]]:
    """Plans that are valid for a family, drawn so that all of them together cover every pair; packed or not."""
    choose, seen, tries = random.Random(family), 0, 0
    while seen < count and tries < 40:
        tries += 1
        axes: dict[str, Any] = {axis: 2 for axis in ("tp", "cp", "pp") if choose.random() < 0.75}
        world = 2 ** len(axes)
        packed, training = choose.random() < 0.4, {"precision": "bf16", "micro_batch_size": 1}
        training["activation_checkpointing"] = choose.choice(["none", "full"])
        text = [f"{axis} 2" for axis in axes]
        config = tiny_config(family)
        if "moe_intermediate_size" in config:  # rows of which two ranks of tp have a multiple of 16 bytes
            config["moe_intermediate_size"] = 32
        if choose.random() < 0.6 and any("expert" in key for key in config):
            axes |= {"ep": 2} if world > 2 or "cp" in axes else {"ep": 2, "dp": 2}
            world = max(world, 2) * (2 if "dp" in axes else 1)
            text.append("ep 2")
        if "tp" in axes and choose.random() < 0.5:
            axes["sequence_parallel"] = True
            text.append("sp")
        machine = choose.choice(["h100-sxm", "a100-80gb"])
        training |= {"sequence_length": 32, "global_batch_size": 8}
        try:
            plan = make_plan(
                world,
                axes,
                model=config,
                training=training,
                whole_model=True,
                extra={"cluster": {"gpus_per_node": world, "accelerator": machine}},
            )
        except AssertionError:  # a rule refuses it
            continue
        if plan.refusals:
            continue
        seen += 1
        text += ["packed"] if packed else []
        text += ["recomputed"] if training["activation_checkpointing"] == "full" else []
        yield f"{machine}: {' · '.join(text) or 'one rank'}", plan, packed


def run(family: str, layout: str, plan: Plan, packed: bool) -> CudaRun:
    """Runs one rank."""
    from parcompile.runtime.preflight import preflight

    borders = [[0, 10, 12, 32]] if packed else None
    report = preflight(plan, [min(RANK, plan.world_size - 1)], documents=borders)
    found = CudaRun(family, layout)
    if "cuda without a GPU" not in report.notes[0]:
        found.differs.append(report.notes[0])
    for one in report.findings:
        if one.subject == "host waits" and one.detail:
            found.waits.append(one.detail)
        elif one.subject.startswith("attention of"):
            found.kernels.append(one.found + (f": {one.detail}" if one.detail else ""))
        elif one.subject == "a slower kernel":
            found.slower.append(one.found)
        elif one.verdict.value == "DIFFERS" and one.subject not in ROUGHLY:
            found.differs.append(f"{one.subject}: {one.detail}")
    return found


PLANTED = {
    ".item()": lambda x: x.sum().item(),
    "a copy from pages that may move": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "a copy from pinned pages": lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
    "tensors of two devices": lambda x: x + torch.ones(x.shape),
}
"""What a layer does beside its work, by what is to be found of it."""


def planted() -> Iterator[CudaRun]:
    """Runs of a model with something planted in its norms."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    extra = {"cluster": {"gpus_per_node": 2, "accelerator": "h100-sxm"}}
    plan = make_plan(2, {"dp": 2}, training={"precision": "bf16", "micro_batch_size": 1}, extra=extra)
    forward = LlamaRMSNorm.forward
    for text, does in PLANTED.items():

        def disturbed(self: Any, x: Any, does: Any = does) -> Any:
            if x.device.type == "cuda":  # injection tries masks on the meta device
                does(x)
            return forward(self, x)

        with mock.patch.object(LlamaRMSNorm, "forward", disturbed):
            yield run("planted", text, plan, packed=False)


SHARDED: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 3": ("bf16", {"stage": 3}),
    "optimizer on the host, stage 1": ("bf16", {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
    "optimizer on the host, stage 2 in fp32": ("fp32", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    "optimizer on the host, stage 3": ("bf16", {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
    "both on the host": (
        "bf16",
        {"stage": 3, **{key: {"device": "cpu"} for key in ("offload_optimizer", "offload_param")}},
    ),
}


def sharded() -> Iterator[CudaRun]:
    """Runs at ZeRO stages, and with states on the host."""
    extra = {"cluster": {"gpus_per_node": 4, "accelerator": "h100-sxm"}}
    for text, (precision, zero) in SHARDED.items():
        training = {"precision": precision, "micro_batch_size": 1}
        yield run(
            "sharded", text, make_plan(4, {"tp": 2}, training=training, extra={**extra, "zero": zero}), packed=False
        )


def main(families: Sequence[str], count: int = 2) -> None:
    """Prints what was found."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    apart = {"planted": planted, "sharded": sharded}
    for family in families:
        if family in apart:
            for found in apart[family]():
                print(json.dumps(asdict(found)), flush=True)  # noqa: T201
            continue
        for layout, plan, packed in drawn(family, count):
            print(json.dumps(asdict(run(family, layout, plan, packed))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
