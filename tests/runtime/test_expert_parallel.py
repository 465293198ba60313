"""Contract: experts that are dealt over ranks train as in one process.

Three AdamW steps with clipping, in fp32 on live ranks: losses, gradient norms and every parameter agree within 1e-5
relative, what fp32 sums in another order can reach. `.ci/expert_matrix.py` runs every combination of the axes.
"""

from __future__ import annotations

import pytest
from expert_runs import Case, difference, one_sided

TOLERANCE = 1e-5

CASES = {
    "dp2 × ep2 (mixtral)": Case("mixtral", {"dp": 2, "ep": 2}),
    "cp2 × ep2, full recomputation": Case("deepseek_v3", {"cp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
    "tp2 × dp2 × ep2, sequence parallelism": Case(
        "deepseek_v3", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}
    ),
    "pp2 × dp2 × ep2, and no experts in the first stage": Case(
        "deepseek_v3", {"pp": 2, "dp": 2, "ep": 2}, {}, {"first_k_dense_replace": 2}
    ),
    "cp2 × dp2 × ep2, two ranks for each expert, ulysses": Case(
        "mixtral", {"cp": 2, "dp": 2, "ep": 2, "cp_implementation": "ulysses"}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_on_other_ranks_give_the_numbers_of_one_process(name: str) -> None:
    assert max(difference(CASES[name])) < TOLERANCE


def test_a_rank_whose_experts_get_no_token_takes_part_in_everything() -> None:
    case = Case("deepseek_v3", {"dp": 4, "ep": 2}, {}, {"first_k_dense_replace": 1})
    assert max(difference(case, built=one_sided)) < TOLERANCE
