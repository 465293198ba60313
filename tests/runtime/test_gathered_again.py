"""Contract: with `training.gather_inputs_again` blocks gather their inputs again, as counted, and train as without.

`.ci/pipeline_matrix.py --draws gather` draws as many plans as one likes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from closeness import judge
from families import tiny_config
from ranks import run_ranks
from training_runs import compared, make_plan, train_in_one_process, train_with_engine

from parcompile.cost.collectives import collectives
from parcompile.cost.footprint import footprint
from parcompile.cost.step import step_terms
from parcompile.model.derived_rows import shared_inputs
from parcompile.plan import Plan
from parcompile.runtime.preflight import preflight
from parcompile.spec.values import workload_of

SP = {"tp": 2, "sequence_parallel": True}


def plan_of(
    world: int,
    parallelism: dict[str, Any],
    family: str = "llama",
    stage: int = 1,
    changes: dict[str, Any] | None = None,
    **training: Any,
) -> Plan:
    return make_plan(
        world,
        parallelism,
        model=tiny_config(family, **(changes or {"initializer_range": 0.1})),
        whole_model=True,
        training={"micro_batch_size": 1, "gather_inputs_again": True, **training},
        extra={"zero": {"stage": stage}},
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan",
    [
        plan_of(2, SP, "gpt2", stage=0),
        plan_of(2, SP, "cohere", micro_batch_size=2),
        plan_of(4, {**SP, "cp": 2}, stage=2, activation_checkpointing="full"),
        plan_of(4, {**SP, "dp": 2}, "qwen3", stage=3),
        plan_of(2, SP, "qwen2", activation_checkpointing="mlp"),
        plan_of(4, {**SP, "ep": 2}, "mixtral"),
        plan_of(4, {**SP, "pp": 2}, activation_checkpointing=["full", "none"]),
    ],
    ids=[
        "gpt2, stage 0",
        "norms of heads",
        "recomputed, cp2, stage 2",
        "stage 3",
        "beside a part",
        "experts",
        "stages",
    ],
)
def test_it_trains_as_one_process(plan: Plan) -> None:
    ranks = run_ranks(plan.world_size, train_with_engine, plan, True, 3)
    judge(compared(plan, ranks, lambda seed: train_in_one_process(plan, masked=True, steps=3, seed=seed)))


FAMILIES = {
    **dict.fromkeys(("llama", "gpt2", "gemma2", "olmo2", "cohere", "phi3", "falcon", "bloom"), ("attention", "mlp")),
    **dict.fromkeys(("opt", "mixtral", "qwen2_moe"), ("attention",)),
    "minicpm3": ("mlp",),
}
"""Fused and single matrices, norms of heads, linears of MLPs in the layer itself, experts, latent attention."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "full", "mlp"])
def test_messages_are_those_planned(family: str, recompute: str) -> None:
    if recompute == "mlp" and family == "opt":
        recompute = "attention"  # the linears of its MLPs stand in the layer
    training = {"sequence_length": 32, "activation_checkpointing": recompute, "precision": "bf16"}
    again, kept = (plan_of(2, SP, family, **training, gather_inputs_again=one) for one in (True, False))
    assert shared_inputs(again.spec.model.shape) == {*FAMILIES[family]}
    report = preflight(again, ranks=[1])
    (sent,) = [one for one in report.findings if one.subject == "sent over tp"]
    assert sent.verdict.value == "agrees", report.text()
    first, second = (
        collectives(workload_of(one.spec), one.spec.stages[0])["tp", "all-gather"].messages for one in (again, kept)
    )
    # Of two layers, in four micro-batches.
    assert first - second == (2 * 4 * len(FAMILIES[family]) if recompute in ("none", "full") else 0)


SIZES = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("parallelism", "training", "saved_mib"),
    [
        ({"tp": 4}, {}, 192),  # 8 layers, 2 blocks, 3/4 of 16 MiB
        ({"tp": 2, "pp": 2}, {}, 128),  # 4 layers, of two micro-batches
        ({"tp": 4}, {"tiled_mlp": True}, 96),  # of attention alone
        ({"tp": 4}, {"activation_checkpointing": "full"}, 23.6),  # of a layer, less what its MLP takes backward
    ],
    ids=["tp4", "tp2 pp2", "tiled", "recomputed"],
)
def test_memory_is_that_of_preflight(parallelism: dict[str, Any], training: dict[str, Any], saved_mib: float) -> None:
    chosen = {"sequence_length": 8192, "micro_batch_size": 1, "precision": "bf16", "gather_inputs_again": True}
    plan = make_plan(4, {**SP, **parallelism}, model=SIZES, whole_model=True, training={**chosen, **training})
    (peak,) = [one for one in preflight(plan, ranks=[0]).findings if one.subject == "peak of the step"]
    (off,) = re.findall(r"\(([-+][\d.]+)%\)", peak.found)
    assert abs(float(off)) < 1
    again = workload_of(plan.spec)
    kept = replace(again, gathers_inputs=False)
    first, second = (footprint(one).peak.total_bytes for one in (again, kept))
    assert second - first == pytest.approx(saved_mib * 2**20, rel=0.05)
    first, second = (step_terms(one).tp_bytes for one in (again, kept))
    assert first > second
