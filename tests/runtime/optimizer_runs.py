"""Drawn runs of an optimizer on live ranks beside the same training in one process."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

from closeness import Margin
from families import tiny_config
from ranks import run_ranks
from training_runs import compared, dp_of, make_plan, train_in_one_process, train_with_engine

from parcompile.plan import Plan

STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp4": (4, {}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2 dp2": (4, {"tp": 2}),
    "tp2 sp dp2": (4, {"tp": 2, "sequence_parallel": True}),
    "cp2 dp2": (4, {"cp": 2}),
    "tp2 sp cp2": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
    "pp2 dp2": (4, {"pp": 2}),
    "pp2 tp2": (4, {"pp": 2, "tp": 2}),
    "ep2": (2, {"ep": 2}),
    "ep2 dp4": (4, {"ep": 2}),
    "ep2 tp2 dp2": (4, {"ep": 2, "tp": 2}),
    "ep2 cp2 dp2": (4, {"ep": 2, "cp": 2}),
    "ep4 over tp2 dp2": (4, {"ep": 4, "tp": 2, "expert_tp": 1}),
}
ZERO_STAGES = {"ep4 over tp2 dp2": (1, 2, 3)}
"""Of a layout for which the runtime refuses some."""
DENSE = ("llama", "gpt2", "phi3", "gemma2", "qwen3_next")
SPARSE = ("mixtral", "qwen3_moe", "deepseek_v3")


@dataclass(frozen=True)
class Cell:
    """One run; the clipping is active at 0.5, and not at 1000."""

    layout: str
    family: str = "llama"
    zero: int = 1
    accumulation: int = 1
    clip: float = 0.5
    optimizer: str = "muon"
    nesterov: bool = True
    adjust_lr: str = "match_rms_adamw"
    bf16: bool = False
    on_host: bool = False
    falls: bool = False
    """The rate warms up and falls."""
    no_weight_decay: str | None = None

    def __str__(self) -> str:
        said = [f"{one.name} {value}" for one in fields(self)[1:] if (value := getattr(self, one.name)) != one.default]
        return ", ".join([self.layout, *said])


CELLS = (
    Cell("tp2 dp2", accumulation=4, no_weight_decay="biases_and_norms"),
    Cell("tp2 sp cp2", "gpt2", zero=2, clip=1000.0, adjust_lr="original"),
    Cell("ep2 tp2 dp2", "mixtral", zero=2, accumulation=4),
    Cell("ep4 over tp2 dp2", "qwen3_moe"),
    Cell("pp2 tp2", accumulation=4, falls=True),
    Cell("ep2 dp4", "mixtral", zero=3, clip=1000.0),
    Cell("tp2 dp2", zero=0, optimizer="sgd", nesterov=False),
    Cell("tp2 sp cp2", zero=1, optimizer="adagrad", falls=True, no_weight_decay="vectors"),
    Cell("ep2 dp4", "mixtral", zero=2, optimizer="adagrad"),
    Cell("tp2 dp2", zero=2, accumulation=4, optimizer="sgd", on_host=True, no_weight_decay="vectors"),
    Cell("ep2 cp2 dp2", "mixtral", zero=3, accumulation=4, optimizer="adagrad", on_host=True, falls=True),
    Cell("tp2 sp dp2", "gpt2", zero=0, accumulation=4, optimizer="adamw", no_weight_decay="vectors", falls=True),
    Cell("ep4 over tp2 dp2", "gpt_oss", clip=1000.0, optimizer="adamw", no_weight_decay="biases_and_norms"),
    Cell("cp2 dp2", "qwen3_next", zero=2, accumulation=4, optimizer="adamw", no_weight_decay="biases_and_norms"),
    Cell("pp2 dp2", "gpt2", zero=1, optimizer="adamw", no_weight_decay="biases_and_norms"),
    Cell("ep2 dp4", "gpt_oss", zero=3, accumulation=4, optimizer="adamw", no_weight_decay="vectors"),
)
"""The sample of the suite: every axis, stage, accumulation and way of the rate. The matrix draws more."""


def draw(number: int) -> Cell:
    """The cell of a number; it is always the same."""
    rng = random.Random(f"optimizers {number}")
    layout = rng.choice(list(LAYOUTS))
    sparse = layout.startswith("ep") or rng.random() < 0.2
    drawn = Cell(
        layout,
        rng.choice(SPARSE if sparse else DENSE),
        rng.choice(ZERO_STAGES.get(layout, (0, 1) if "pp" in layout else (0, 1, 2, 3))),
        rng.choice((1, 4)),
        rng.choice((0.5, 1000.0)),
        rng.choice(("muon", "muon", "muon", "muon", "sgd", "adagrad")),
        rng.random() < 0.7,
        rng.choice(("match_rms_adamw", "original")),
    )
    on_host = drawn.optimizer != "muon" and drawn.zero > 0 and rng.random() < 0.5
    return replace(drawn, on_host=on_host, falls=rng.random() < 0.3)


def plan_of(cell: Cell) -> Plan:
    """The plan of a cell: batches of 16, in as many micro-batches as its accumulation."""
    world, parallelism = LAYOUTS[cell.layout]
    optimizer: dict[str, Any] = {"type": cell.optimizer, "lr": 0.01, "weight_decay": 0.1}
    if cell.no_weight_decay is not None:
        optimizer["no_weight_decay"] = cell.no_weight_decay
    if cell.optimizer in ("muon", "adamw"):
        optimizer["eps"] = 1e-3  # AdamW would hide the scale of gradients
    if cell.optimizer == "muon":
        optimizer |= {"nesterov": cell.nesterov, "adjust_lr": cell.adjust_lr}
        optimizer["ns_dtype"] = "bf16" if cell.bf16 else "fp32"
    elif cell.optimizer == "sgd":
        optimizer |= {"momentum": 0.9, "nesterov": True} if cell.nesterov else {}
    training = {
        "global_batch_size": 16,
        "micro_batch_size": 16 // dp_of(world, parallelism) // cell.accumulation,
        "gradient_clipping": cell.clip,
        "optimizer": optimizer,
    }
    if cell.falls:
        training |= {"train_steps": 2 * STEPS, "lr_scheduler": {"type": "linear", "warmup_steps": 2, "min_lr": 1e-4}}
    zero = {"stage": cell.zero, **({"offload_optimizer": {"device": "cpu"}} if cell.on_host else {})}
    model = tiny_config(cell.family)
    return make_plan(world, dict(parallelism), model=model, whole_model=True, training=training, extra={"zero": zero})


def compare(cell: Cell) -> list[Margin]:
    """How far losses, norms and parameters of the ranks are from those of one process."""
    plan = plan_of(cell)
    ranks = run_ranks(plan.world_size, train_with_engine, plan, True, STEPS)
    return compared(plan, ranks, lambda seed: train_in_one_process(plan, masked=True, steps=STEPS, seed=seed))
