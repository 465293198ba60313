"""Contract: the losses of routers are those of one process, whatever the layout and the accumulation.

`.ci/expert_matrix.py --routers` runs every scope over all axes.
"""

from __future__ import annotations

import pytest
from closeness import judge
from expert_runs import Case
from router_runs import compare, router

_PAIRS = {"global_batch_size": 8, "micro_batch_size": 2}
CASES = {
    "over a step of two micro-batches, pp2 × cp2 × ep2": Case(
        "deepseek_v3", {"pp": 2, "cp": 2, "ep": 2}, {**_PAIRS, **router("global_batch")}
    ),
    "over sequences, tp2 with sequence parallelism, full recomputation": Case(
        "mixtral", {"tp": 2, "sequence_parallel": True}, {"activation_checkpointing": "full", **router("sequence")}
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_losses_of_routers_give_the_numbers_of_one_process(name: str) -> None:
    judge(compare(CASES[name]))
