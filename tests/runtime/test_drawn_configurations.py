"""Contract: whatever a configuration says is computed, in any layout, or it is refused with the name of the key.

A sample; `.ci/configuration_matrix.py` draws as many as one likes, and `docs/configurations.md` has what it found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import ROUNDING, TIMES, Margin, record
from configuration_runs import Outcome, cases, outcomes
from drawn_configurations import LAYOUTS, Drawn, draw, varied

from parcompile.model.catalogue import RUNTIME_FAMILIES

pytestmark = pytest.mark.ranks

COUNT = 10
SAMPLE = (("tp 2, sequence parallel", 2000), ("cp 2", 2010), ("pp 2", 2020))
"""Layouts, and the number of the first draw."""
DEALT = ("dp 2 x ep 2", 9100)
"""The same, of families with experts alone."""

FOUND: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "tp 2, sequence parallel": (
        ("deepseek_v3", {"output_router_logits": True}),
        ("gpt_oss", {"intermediate_size": 12}),
        ("olmo", {"attention_bias": True}),
    )
}
"""What draws have found, by layout: a key without effect in transformers that was taken for one with; experts whose
slices are too narrow for torch's grouped matmul; projections with biases that are clipped in place."""


@pytest.mark.parametrize(("layout", "first"), (*SAMPLE, DEALT))
def test_a_drawn_configuration_trains_as_in_one_process_or_is_refused_by_name(layout: str, first: int) -> None:
    known = [Drawn(0, family, layout, changes) for family, changes in FOUND.get(layout, ())]
    drawn = cases(first, COUNT, layout)
    found = outcomes([*known, *drawn])
    assert len(found) == len(drawn) + len(known)
    wrong = [f"{one.drawn.text}: {one.worst:.1e} {one.text}" for one in found if one.kind == "different"]
    assert wrong == []
    equal = [one for one in found if one.kind == "equal"]
    assert len(equal) >= COUNT - 3
    for one in found:
        if one.kind in ("equal", "rounded"):
            limit = max(ROUNDING[torch.float32], TIMES * (one.noise or 0.0))
            record(Margin(one.drawn.text, one.worst, limit, one.noise))


def test_the_sample_has_a_family_once() -> None:
    families = [one.family for layout, first in SAMPLE for one in cases(first, COUNT, layout)]
    assert len(families) == len(set(families)) == 3 * COUNT
    assert {layout for layout, _ in SAMPLE} <= LAYOUTS.keys()


def test_a_number_draws_the_same_each_time() -> None:
    one = draw(7, RUNTIME_FAMILIES)
    assert one == draw(7, RUNTIME_FAMILIES) != draw(7 + len(RUNTIME_FAMILIES), RUNTIME_FAMILIES)
    assert varied(one) >= set(one.changes)
    assert Outcome(one, "equal").worst == 0.0
