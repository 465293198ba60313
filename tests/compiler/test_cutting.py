"""How parameters that a derived table names are cut."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parcompile.model import Parameter, Part, Split, families
from parcompile.model.cutting import leading_key
from parcompile.model.derived_rows import parameter_table
from parcompile.model.families import BUILT_IN
from parcompile.model.family import Experts, Family, Latent, Norm, by_type, family_from
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.tables import table_of

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def rows_of(model_type: str, **changes: Any) -> dict[str, Parameter]:
    """The rows of a layer, by their names in it."""
    table = parameter_table(shape_from_config({"model_type": model_type, **SMALL, **changes}))
    return {one.name.partition("{layer}.")[2]: one for one in table.layer}


def test_every_type_has_a_table_and_stands_in_the_module_that_its_entry_names() -> None:
    assert not [name for name in BUILT_IN if table_of(name) is None]
    folder = Path(families.__file__).parent
    modules = [file.stem for file in folder.glob("*.py") if file.stem not in ("__init__", "added", "traits")]
    held = {
        name: module
        for module in modules
        for name, value in vars(importlib.import_module(f"{families.__name__}.{module}")).items()
        if isinstance(value, Family) and not name.startswith("_")
    }
    named = by_type("module")
    assert held == {name.replace("-", "_").upper(): module for name, module in named.items()}
    assert not named.keys() & by_type("family").keys()


def test_a_family_is_read_from_its_entry() -> None:
    stored = {
        "norm": "nothing",
        "qkv_parts": "kvq",
        "experts": {"count": ["num_experts", 8]},
        "latent": {"v_head_dim": 4},
    }
    family = family_from(stored)
    assert family.norm is Norm.NOTHING
    assert family.experts == Experts(count=("num_experts", 8))
    assert family.latent == Latent(v_head_dim=4)
    assert family == Family(norm=Norm.NOTHING, qkv_parts="kvq", experts=family.experts, latent=family.latent)


def test_a_family_refuses_what_its_entry_says() -> None:
    when = {"key": "old", "when": "not old in [None, new]", "defaults": {"new": 4}, "reason": "it is another number"}
    (refusal,) = family_from({"refusals": [when]}).refusals
    assert (refusal.key, refusal.reason) == ("old", "it is another number")
    taken = ({}, {"old": None}, {"old": 4}, {"old": 2, "new": 2}, {"old": 2}, {"old": 4, "new": 2})
    assert [refusal.applies(config) for config in taken] == [False, False, False, False, True, True]


def test_queries_are_cut_by_heads_and_keys_by_kv_heads() -> None:
    rows = rows_of("qwen2")
    assert rows["self_attn.q_proj.weight"].split == Split(0, (Part(32, 4),))
    assert rows["self_attn.k_proj.bias"].split == Split(0, (Part(16, 2),))
    assert rows["self_attn.o_proj.weight"].split == Split(1, (Part(32, 4),))
    assert "self_attn.o_proj.bias" not in rows


def test_fused_projections_are_cut_part_by_part() -> None:
    rows = rows_of("phi3", pad_token_id=None)
    assert next(iter(rows)) == "self_attn.o_proj.weight"
    assert rows["self_attn.qkv_proj.weight"].split == Split(0, (Part(32, 4), Part(16, 2), Part(16, 2)))
    assert rows["mlp.gate_up_proj.weight"].split == Split(0, (Part(48, 48), Part(48, 48)))


def test_norms_over_all_heads_are_cut_and_those_of_a_head_are_not() -> None:
    whole, head = rows_of("olmo2"), rows_of("qwen3", head_dim=8)
    assert whole["self_attn.k_norm.weight"].split == Split(0, (Part(16, 2),))
    assert head["self_attn.k_norm.weight"].split is None
    assert head["self_attn.k_norm.weight"].partial
    sub = rows_of("bitnet")
    assert sub["self_attn.attn_sub_norm.weight"].split == Split(0, (Part(32, 4),))
    assert sub["mlp.ffn_sub_norm.weight"].split == Split(0, (Part(48, 48),))
    assert sub["input_layernorm.weight"].sequence_parallel


def test_the_bias_behind_the_sum_of_experts_is_added_once() -> None:
    rows = rows_of("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    assert rows["mlp.experts.gate_up_proj"].split == Split(2, (Part(96, 48),))
    assert rows["mlp.experts.gate_up_proj_bias"].split == Split(1, (Part(96, 48),))
    down = rows["mlp.experts.down_proj_bias"]
    assert (down.split, down.expert_dim, down.partial) == (None, 0, True)
    assert rows["mlp.router.bias"].partial
    assert rows["self_attn.sinks"].split == Split(0, (Part(4, 4),))


def test_weights_that_are_stored_transposed_are_cut_along_the_other_dim() -> None:
    table = parameter_table(
        shape_from_config(
            {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 61}
        )
    )
    rows = {one.name.partition("{layer}.")[2]: one for one in table.layer}
    assert rows["attn.c_attn.weight"].split == Split(1, (Part(32, 4),) * 3)
    assert rows["attn.c_attn.bias"].split == Split(0, (Part(32, 4),) * 3)
    assert rows["mlp.c_proj.weight"].split == Split(0, (Part(128, 128),))


def test_dense_layers_and_those_with_experts_have_rows_of_their_own() -> None:
    rows = rows_of("qwen3_moe", num_experts=4, moe_intermediate_size=24, mlp_only_layers=[0], head_dim=8)
    assert list(rows["mlp.gate_proj.weight"].layers or ()) == [0]
    assert list(rows["mlp.experts.gate_up_proj"].layers or ()) == [1]
    names = list(rows)
    assert names.index("mlp.gate_proj.weight") < names.index("mlp.experts.gate_up_proj")


def test_a_shape_that_is_not_that_of_its_configuration_has_no_table() -> None:
    shape = shape_from_config({"model_type": "llama", **SMALL})
    with pytest.raises(ValueError, match="the configuration says vocab_size 61, and the shape 128"):
        parameter_table(replace(shape, vocab_size=128))


@pytest.mark.parametrize(
    ("name", "key"), [("granitemoe", "num_local_experts"), ("glm", "head_dim"), ("deepseek_v3", "v_head_dim")]
)
def test_a_null_that_parameters_follow_from_is_refused_by_its_key(name: str, key: str) -> None:
    with pytest.raises(ModelConfigError, match=f"^{key} is null, and parameters follow from it") as caught:
        shape_from_config({"model_type": name, **SMALL, key: None})
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("num_attention_heads * head_dim", "num_attention_heads"),
        ("2 * intermediate_size", "intermediate_size"),
        ("heads * (hidden_size // heads) if head_dim is None else heads * head_dim", "heads"),
        ("hidden_size // heads if head_dim is None else head_dim", None),
        ("kv_lora_rank + qk_rope_head_dim", "kv_lora_rank"),
    ],
)
def test_the_key_that_a_dim_counts_is_read_off_its_expression(text: str, key: str | None) -> None:
    assert leading_key(text) == key
