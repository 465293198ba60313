"""What several residual streams cost: operations, messages between stages, and memory beside those of one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parcompile.cost.flops import matmul_parameters
from parcompile.cost.kept import mean_bytes
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import shape_from_config
from parcompile.model.shape import ModelShape

_SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 768,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}


def shape_of(name: str, **changes: int) -> ModelShape:
    sizes = {**_SIZES, "num_key_value_heads": 1} if name == "deepseek_v4" else _SIZES
    if name == "deepseek_v4":
        del sizes["intermediate_size"]
    return shape_from_config({"model_type": name, **sizes, **changes})


@pytest.mark.parametrize(
    "name", ["deepseek_v4", "glm5_next_text", "hy_v4", "axk2", "glm_moe_dsa", "deepseek_v3", "afmoe", "beam"]
)
def test_operations_count_every_matrix_that_a_token_passes(name: str) -> None:
    """Those of an indexer are not trained, and do not count; the embedding is looked up."""
    shape = shape_of(name)
    assert shape.moe is not None
    table, found = parameter_table(shape), 0
    for one in (*table.layer, *table.after):
        if len(one.shape) < 2 or not one.trained or "indexer" in one.name or ".mlp.fc" in one.name:
            continue
        if one.name.endswith((".position_bias", ".conv1d.weight")):
            continue  # added, and a few tokens of a channel
        size = math.prod(one.shape) * (len(one.layers) if one.layers is not None else 1)
        experts, chosen = shape.moe.num_experts, shape.moe.num_experts_per_token
        found += size // experts * chosen if one.expert_dim is not None else size
    assert matmul_parameters(shape) == found


def test_a_layer_keeps_its_streams_for_both_of_its_mixtures() -> None:
    shape = shape_of("hy_v4", hc_mult=4)
    two = shape_of("hy_v4", hc_mult=2)
    wide, narrow = (mean_bytes(found, range(found.num_hidden_layers), False, 2, True, 2) for found in (shape, two))
    more = (4 - 2) * shape.hidden_size * (2 + 4) + (4 - 2) * 8 * 4  # in the type of the weights, and in fp32
    assert wide.stream - narrow.stream == pytest.approx(2 * more / 2)
    assert replace(wide, stream=0.0, layer=0.0) == replace(narrow, stream=0.0, layer=0.0)


def test_hidden_states_of_all_streams_are_handed_on() -> None:
    assert shape_of("hy_v4").residual_streams == 4
    assert shape_of("gemma3n_text", altup_num_inputs=3, num_kv_shared_layers=0).residual_streams == 3
    assert shape_of("deepseek_v3").residual_streams == 1
