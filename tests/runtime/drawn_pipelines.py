"""Pipelines drawn at random: the suite trains a few of them, `.ci/pipeline_matrix.py` as many as one likes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from closeness import Margin
from ranks import run_ranks
from training_runs import compared, make_plan, train_in_one_process, train_with_engine

from parcompile.plan import Plan

STEPS = 3
SMALL_WEIGHTS = {"initializer_range": 0.1}
"""Up to 12 layers with weights twice as large multiply what fp32 rounds: one process is then 6e-6 off float64."""
SMOOTH_ADAM = {"lr": 1e-3, "eps": 1e-5}
"""With Adam's usual eps a gradient that is rounding noise becomes a full step. One process in fp32 with small weights
is then up to 3e-5 off one in float64. With this eps it is 1e-6 off."""
MODELS: tuple[dict[str, Any], ...] = (
    {},
    {"tie_word_embeddings": True},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    {"model_type": "phi3", "num_key_value_heads": 1, "pad_token_id": None},
    {"model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
)


def draw(number: int, most_ranks: int) -> tuple[Plan, str]:
    """A valid plan with pipeline stages, and what it is; the same for the same number."""
    choose = random.Random(number)
    while True:
        drawn = _drawn(choose, most_ranks)
        try:
            return make_plan(drawn[0], drawn[1], model=drawn[2], training=drawn[3]), _text(*drawn)
        except AssertionError:  # a rule refuses it
            continue


def _drawn(choose: random.Random, most_ranks: int) -> tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]:
    pp = choose.choice([size for size in (2, 2, 3, 4) if size <= most_ranks])
    parallelism: dict[str, Any] = {"pp": pp}
    world = pp
    for axis in choose.sample(["tp", "cp", "dp"], 3):
        size = choose.choice([1, 2, 4] if axis == "cp" else [1, 2])
        if world * size <= most_ranks and size > 1:
            parallelism[axis] = size
            world *= size
    virtual, layers = choose.choice([1, 1, 2, 3]), pp * choose.choice([1, 2])
    if virtual > 1:
        parallelism["num_virtual_stages_per_pipeline_rank"] = virtual
        layers = pp * virtual
    elif choose.random() < 0.4:
        parallelism["num_layers_in_first_pipeline_stage"] = layers // pp + 1
        layers += 1
    if "tp" in parallelism:
        parallelism["sequence_parallel"] = choose.random() < 0.6
    if "cp" in parallelism:
        two_levels = ["usp", "usp"] if parallelism["cp"] > 2 else []
        parallelism["cp_implementation"] = choose.choice(["ring", "all_gather", "ulysses", *two_levels])
        parallelism["cp_layout"] = choose.choice(["zigzag", "striped", "contiguous"])
    parallelism["order"] = "-".join(choose.sample(["tp", "cp", "dp", "pp"], 4)) + "-ep"
    micro_batches, micro = choose.choice(range(1, 9)), choose.choice([1, 2])
    training = {
        "micro_batch_size": micro,
        "global_batch_size": micro * micro_batches * parallelism.get("dp", 1),
        "activation_checkpointing": choose.choice(["none", "selective", "full"]),
        "sequence_length": choose.choice([16, 24]),
        "optimizer": SMOOTH_ADAM,
    }
    return world, parallelism, {**SMALL_WEIGHTS, **choose.choice(MODELS), "num_hidden_layers": layers}, training


def _text(world: int, parallelism: dict[str, Any], model: dict[str, Any], training: dict[str, Any]) -> str:
    kinds = {"num_virtual_stages_per_pipeline_rank": "virtual", "num_layers_in_first_pipeline_stage": "first stage"}
    axes = ", ".join(f"{kinds.get(key, key)} {value}" for key, value in parallelism.items() if value is not False)
    batches = training["global_batch_size"] // training["micro_batch_size"] // parallelism.get("dp", 1)
    tied = ", tied" if model.get("tie_word_embeddings") else ""
    name = f"{model.get('model_type', 'llama')}{tied}, {model['num_hidden_layers']} layers"
    steps = f"{batches} x {training['micro_batch_size']}, {training['sequence_length']} tokens"
    return f"{world} ranks: {axes}; {name}; {steps}; recompute {training['activation_checkpointing']}"


def compare(plan: Plan, *, z_loss: float = 0.0) -> list[Margin]:
    """Trains a plan on live ranks and in one process."""
    ranks: Sequence[dict[str, Any]] = run_ranks(plan.world_size, train_with_engine, plan, True, STEPS, z_loss)
    return compared(
        plan, ranks, lambda seed: train_in_one_process(plan, masked=True, steps=STEPS, z_loss=z_loss, seed=seed)
    )
