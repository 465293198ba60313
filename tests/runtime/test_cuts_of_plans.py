"""Our cut of every parameter beside transformers' own plan of tensor parallelism, for each type that has a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from drawn_configurations import draw
from families import FAMILIES, tiny_config
from plan_styles import cut_dim

from parcompile.model import Parameter
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.tables import Derived, parameters, table_of

LAYER = "model.layers.{layer}"
DRAWN = 2
"""Configurations drawn for each type, beside those below."""

JOINED = "transformers cuts the joined outputs as one and gathers them before use; we cut each part, and gather nothing"
STATES = "transformers computes the states of all heads on every rank; ours has those of its heads, and we add up"
AROUND = (
    "transformers sums the parts of a projection around experts; ours is whole on every rank, of parts of their sum"
)

OURS_DIFFERS = {
    ("glm", f"{LAYER}.mlp.gate_up_proj.weight"): JOINED,
    ("glm4", f"{LAYER}.mlp.gate_up_proj.weight"): JOINED,
    ("phi3", f"{LAYER}.mlp.gate_up_proj.weight"): JOINED,
    ("phi3", f"{LAYER}.self_attn.qkv_proj.weight"): JOINED,
    ("muse_spark_text", f"{LAYER}.mlp.pre_expert_proj.weight"): AROUND,
    ("muse_spark_text", f"{LAYER}.mlp.post_expert_proj.weight"): AROUND,
    ("qwen3_5_text", f"{LAYER}.linear_attn.in_proj_qkv.weight"): JOINED,
    ("qwen3_5_moe_text", f"{LAYER}.linear_attn.in_proj_qkv.weight"): JOINED,
    ("qwen3_next", f"{LAYER}.linear_attn.out_proj.weight"): STATES,
    ("qwen3_5_text", f"{LAYER}.linear_attn.out_proj.weight"): STATES,
    ("qwen3_5_moe_text", f"{LAYER}.linear_attn.out_proj.weight"): STATES,
}
"""Rows that we cut in another way than the plan says, and why."""


def _planned(family: str) -> set[str]:
    table = table_of(family)
    return set() if table is None else {row.name for row in table.rows if row.tp is not None}


PLANNED = tuple(family for family in FAMILIES if _planned(family))


VARIED: tuple[dict[str, Any], ...] = (
    {},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"attention_bias": True, "bias": True},
    {"use_bias": True},
    {"q_lora_rank": None},
    {"tie_word_embeddings": False},
    {"interleave_moe_layer_step": 2},
)
"""Changes that build rows which few types have of themselves, or that their plans name."""


def _configurations(family: str) -> Iterator[dict[str, Any]]:
    """Tiny configurations: those of the changes whose keys the type has, and drawn ones."""
    table = table_of(family)
    assert table is not None
    known = {*tiny_config(family), *table.defaults, *table.names}
    for changes in VARIED:
        if changes.keys() <= known:
            yield tiny_config(family, **changes)
    for number in range(1, DRAWN + 1):
        yield tiny_config(family, **draw(number, (family,)).changes)


def _differs(ours: Parameter, theirs: Derived) -> bool:
    style = theirs.row.tp
    assert style is not None
    dim = cut_dim(style, theirs.row.name, len(theirs.shape))
    if (ours.split and ours.split.dim) != dim:
        return True
    if ours.split is not None:
        return style.startswith("packed") != (len(ours.split.parts) > 1)
    return style == "replicated_with_grad_allreduce" and not ours.partial


@pytest.mark.parametrize("family", PLANNED)
def test_parameters_are_cut_as_transformers_plan_says(family: str) -> None:
    table = table_of(family)
    assert table is not None
    seen: set[str] = set()
    differ: set[str] = set()
    for config in _configurations(family):
        try:
            ours = dict(parameter_table(shape_from_config(config)).expanded())
        except ModelConfigError:
            continue
        for theirs in parameters(table, config):
            if theirs.row.tp is not None:
                seen.add(theirs.row.name)
                if _differs(ours[theirs.name], theirs):
                    differ.add(theirs.row.name)
    assert differ == {name for one, name in OURS_DIFFERS if one == family}
    assert seen == _planned(family)


def test_exceptions_are_of_types_that_are_compared() -> None:
    assert {family for family, _ in OURS_DIFFERS} <= set(PLANNED)
    assert len(PLANNED) >= 94
