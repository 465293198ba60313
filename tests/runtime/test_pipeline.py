"""Contract: a plan with pipeline stages gives the numbers of one process, whatever else it does.

Three AdamW steps with clipping on live ranks, in fp32. Losses, gradient norms and every gathered parameter, as
`closeness.py` judges them. `.ci/pipeline_matrix.py` draws many more; `docs/pipeline.md` has what it gave.
"""

from __future__ import annotations

from typing import Any

import pytest
from closeness import judge
from drawn_pipelines import compare, draw
from training_runs import make_plan

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

TWO_EACH = {"num_hidden_layers": 4}
ONE = {"micro_batch_size": 1}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: ranks, parallelism, model, training
    "pp2": (2, {"pp": 2}, {}, ONE),
    "pp2, tied embeddings, one micro-batch": (2, {"pp": 2}, {"tie_word_embeddings": True}, {}),
    "pp4, fewer micro-batches than stages": (4, {"pp": 4}, TWO_EACH, {"micro_batch_size": 2}),
    "pp4, eight micro-batches, full recomputation": (
        4,
        {"pp": 4},
        TWO_EACH,
        {**ONE, "global_batch_size": 8, "activation_checkpointing": "full"},
    ),
    "pp2, the first stage recomputes, the last does not": (
        2,
        {"pp": 2},
        {},
        {**ONE, "activation_checkpointing": ["full", "none"]},
    ),
    "pp2 uneven, three micro-batches": (
        2,
        {"pp": 2, "num_layers_in_first_pipeline_stage": 1},
        {"num_hidden_layers": 3},
        {**ONE, "global_batch_size": 3},
    ),
    "pp2 with two virtual stages, tied": (
        2,
        {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {**TWO_EACH, "tie_word_embeddings": True},
        ONE,
    ),
    "pp4 with two virtual stages, groups of more than pp": (
        4,
        {
            "pp": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
            "microbatch_group_size_per_virtual_pipeline_stage": 6,
        },
        {"num_hidden_layers": 8},
        {**ONE, "global_batch_size": 12},
    ),
    "pp2 × tp2 with sequence parallelism, tied": (
        4,
        {"pp": 2, "tp": 2, "sequence_parallel": True},
        {"tie_word_embeddings": True},
        ONE,
    ),
    "pp2 × tp2 with a sequence of 18, sequence parallelism, seven micro-batches": (
        4,
        {"pp": 2, "tp": 2, "sequence_parallel": True},
        {},
        {**ONE, "sequence_length": 18, "global_batch_size": 7},
    ),
    "pp2 × cp2, five micro-batches": (4, {"pp": 2, "cp": 2}, {}, {**ONE, "global_batch_size": 5}),
    "pp2 × cp2, ulysses, virtual stages, six micro-batches": (
        4,
        {"pp": 2, "cp": 2, "cp_implementation": "ulysses", "num_virtual_stages_per_pipeline_rank": 2},
        TWO_EACH,
        {**ONE, "global_batch_size": 6},
    ),
    "pp2 × cp4, usp": (8, {"pp": 2, "cp": 4, "cp_implementation": "usp"}, {}, ONE),
    "pp2 × dp2, selective recomputation": (
        4,
        {"pp": 2, "dp": 2},
        {"tie_word_embeddings": True},
        {**ONE, "activation_checkpointing": "selective"},
    ),
    "balanced experts (mixtral), pp2 × cp2": (
        4,
        {"pp": 2, "cp": 2},
        {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
        {"micro_batch_size": 4},
    ),
    "pp2 × tp2 × cp2": (8, {"pp": 2, "tp": 2, "cp": 2}, {}, ONE),
}


def assert_same(plan: Plan, **loss: float) -> None:
    assert not plan.refusals
    judge(compare(plan, **loss))


@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_numbers_of_one_process(name: str) -> None:
    world_size, parallelism, model, training = CASES[name]
    assert_same(make_plan(world_size, parallelism, model=model, training=training))


def test_a_z_loss_is_that_of_one_process() -> None:
    plan = make_plan(4, {"pp": 2, "tp": 2}, training=ONE)
    assert_same(plan, z_loss=0.01)


@pytest.mark.parametrize("number", range(6))
def test_drawn_pipelines_give_the_numbers_of_one_process(number: int) -> None:
    plan, text = draw(number, most_ranks=4)
    print(text)  # noqa: T201 -- shown when it fails
    assert_same(plan)
