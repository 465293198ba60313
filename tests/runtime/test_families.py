"""Contract: every family that the runtime injects gives, in any layout, the numbers of the original in one process.

Two AdamW steps with clipping, in fp32: losses, gradient norms and gathered parameters, as `closeness.py` judges them.
All families share one world per layout. `pytest tests/runtime/test_families.py --family TYPE …` trains these types, or
variants, in tp 2, cp 2, tp 2 × cp 2 with sequence parallelism and pp 2; `--family all` trains all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
from closeness import assert_close, judge
from families import ONE_LAYOUT, RELATIVES, VARIANTS
from family_runs import family_plan, train_injected, train_plain
from ranks import run_ranks
from training_runs import compared

from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.model.families import FAMILIES

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]

REPLICATED = ("qwen3", "gemma3_text", "olmo2", "cohere", "glm", "qwen2_moe", "olmoe", "phi3")
"""Families for tp 4 with 2 kv heads: each way in which a kv head that two ranks hold can matter."""

STAGED = (
    *("llama", "gemma3_text", "mixtral", "deepseek_v3", "gpt_neox", "qwen3", "cohere2"),
    *("hy_v4", "deepseek_v4", "qwen4_exp_text", "gemma3n_text, own keys"),
)
"""Families for stages that are cut further: mixed layer types, experts, latent attention, norms before layers, several
residual streams."""

BETWEEN = ("llama4_text, dense layers between", "qwen3_moe, sparse steps", "ernie4_5_moe, intervals")
"""Variants with dense layers between and behind those with experts."""

MAIN = tuple(family for family in RUNTIME_FAMILIES if family not in RELATIVES)
WITH_CP = tuple(family for family in RUNTIME_FAMILIES if "cp" not in FAMILIES[family].refused_axes)

LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tp2": (2, {"tp": 2}, MAIN),
    "cp2": (2, {"cp": 2}, tuple(family for family in MAIN if family in WITH_CP)),
    "tp2 × cp2, sequence parallel": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}, (*WITH_CP, *BETWEEN)),
    "tp4, kv heads replicated": (4, {"tp": 4}, REPLICATED),
    "pp2": (2, {"pp": 2}, (*(family for family in RUNTIME_FAMILIES if family not in ONE_LAYOUT), *BETWEEN)),
    "pp2 × tp2, sequence parallel": (4, {"pp": 2, "tp": 2, "sequence_parallel": True}, STAGED),
}
EVERY = ("tp2", "cp2", "tp2 × cp2, sequence parallel", "pp2")
"""Layouts in which the families of `--family` are trained: each that it does not refuse."""


def able(named: list[str], parallelism: dict[str, Any]) -> tuple[str, ...]:
    families = [*RUNTIME_FAMILIES, *VARIANTS] if named == ["all"] else named
    refused = {name: FAMILIES[VARIANTS.get(name, (name,))[0]].refused_axes for name in families}
    return tuple(name for name in families if not parallelism.keys() & set(refused[name]))


if named := os.environ.get("TEST_FAMILIES", "").splitlines():
    LAYOUTS = {layout: (*LAYOUTS[layout][:2], able(named, LAYOUTS[layout][1])) for layout in EVERY}

Results = Callable[[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def injected() -> Iterator[Results]:
    """What each rank of a layout found for a family; the world runs once, for all of them."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def results(layout: str, family: str) -> list[dict[str, Any]]:
        if layout not in found:
            world_size, parallelism, families = LAYOUTS[layout]
            plans = [family_plan(name, world_size, parallelism) for name in families]
            ranks = run_ranks(world_size, train_injected, plans, timeout=1700)
            found[layout] = {name: [rank[place] for rank in ranks] for place, name in enumerate(families)}
        return found[layout][family]

    yield results


@pytest.fixture(scope="module")
def plain() -> Callable[[str], Callable[[int | None], dict[str, Any]]]:
    """The original in one process, of weights nudged by a seed: the same for every layout."""

    @cache
    def results(family: str, seed: int | None) -> dict[str, Any]:
        return train_plain(family_plan(family, 1, {}), seed=seed)

    return lambda family: partial(results, family)


@pytest.mark.parametrize(
    ("layout", "family"),
    [(layout, family) for layout, (_, _, families) in LAYOUTS.items() for family in families],
)
def test_an_injected_model_trains_as_the_original(
    layout: str, family: str, injected: Results, plain: Callable[[str], Callable[[int | None], dict[str, Any]]]
) -> None:
    ranks = injected(layout, family)
    assert "error" not in ranks[0], ranks[0]["error"]
    world_size, parallelism, _ = LAYOUTS[layout]
    judge(compared(family_plan(family, world_size, parallelism), ranks, plain(family)))


def refusals(rank: int, plans: list[Any]) -> list[str]:
    return [found.get("error", "") for found in train_injected(rank, plans)]


def test_what_would_train_something_else_is_refused() -> None:
    plans = [
        family_plan("seed_oss", 2, {"tp": 2}, attention_dropout=0.1),
        family_plan("gemma3_text", 2, {"tp": 2}, use_bidirectional_attention=True),
    ]
    dropout, direction = run_ranks(2, refusals, plans)[0]
    assert "SeedOssAttention uses attention dropout 0.1" in dropout
    assert "the mask is open to later tokens" in direction


def test_ranks_agree_on_frequencies_that_follow_the_last_position() -> None:
    """12 of 16 positions are within the original length: rank 1 of a zigzag of 2 holds none beyond."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 5.0]}
    kinds: dict[str, dict[str, Any]] = {
        "phi3": {"rope_type": "longrope", "original_max_position_embeddings": 12, **factors},
        "llama": {"rope_type": "dynamic", "factor": 4.0},
    }
    trained: dict[int, list[Any]] = {}
    for ranks in (1, 2):
        trained[ranks] = [
            family_plan(
                family,
                ranks,
                {"cp": ranks},
                max_position_embeddings=16 if family == "phi3" else 12,
                rope_parameters={"rope_theta": 10000.0, **rope},
            )
            for family, rope in kinds.items()
        ]
    for rank in run_ranks(2, train_injected, trained[2]):
        for found, plan in zip(rank, trained[1], strict=True):
            assert "error" not in found, found["error"]
            assert_close(found["losses"], train_plain(plan)["losses"])
