"""Layers of different shapes: what a model has of each, and what its cost counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parcompile.cost.flops import attention_flops_per_token, layer_matmul_parameters, matmul_parameters
from parcompile.cost.kept import sort_bytes, sorts
from parcompile.cost.parameters import rank_parameters
from parcompile.layout.pipeline import Stage
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import shape_from_config
from parcompile.model.layers import LayerAttention, LayerShape, kinds_of_layers
from parcompile.model.presets import find_preset
from parcompile.model.shape import ModelShape

BY_HAND = ModelShape("mimo_v2_flash", 64, 4, 8, 4, 8, 96, 128, 64)
OWN = LayerShape(4, 8, 96)


def gemma4(**stated: object) -> ModelShape:
    """Wide heads in every other layer; the last layer takes keys and values of another, and its MLP is wider."""
    config: dict[str, object] = {
        "model_type": "gemma4_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "tie_word_embeddings": False,
    }
    return shape_from_config(config | stated)


VARIED = gemma4(attention_k_eq_v=True)


def of_layer(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    start = f"model.layers.{layer}."
    return {
        name.removeprefix(start).removesuffix(".weight"): one.shape
        for name, one in parameter_table(shape).expanded()
        if name.startswith(start) and "norm" not in name
    }


def test_each_layer_has_the_projections_of_its_kind() -> None:
    assert of_layer(VARIED, 0)["self_attn.k_proj"] == of_layer(VARIED, 2)["self_attn.k_proj"] == (32, 64)
    assert of_layer(VARIED, 1)["self_attn.q_proj"] == (128, 64)
    assert of_layer(VARIED, 1)["self_attn.k_proj"] == (32, 64)
    assert "self_attn.k_proj" not in of_layer(VARIED, 3)
    assert of_layer(VARIED, 3)["mlp.gate_proj"] == (192, 64)


def test_keys_that_are_values_have_one_projection() -> None:
    assert "self_attn.v_proj" not in of_layer(VARIED, 1)
    assert of_layer(gemma4(), 1)["self_attn.k_proj"] == of_layer(gemma4(), 1)["self_attn.v_proj"] == (64, 64)


def test_operations_are_counted_layer_by_layer() -> None:
    weights = [one for name, one in parameter_table(VARIED).expanded() if len(one.shape) == 2 and "embed" not in name]
    assert matmul_parameters(VARIED) == pytest.approx(sum(one.numel for one in weights))
    every = [layer_matmul_parameters(VARIED.of_layer(layer)) for layer in range(4)]
    assert layer_matmul_parameters(VARIED) == pytest.approx(sum(every) / 4)


def test_windows_count_for_the_layers_that_have_them() -> None:
    windowed = replace(
        BY_HAND, kinds=kinds_of_layers([replace(OWN, attention=LayerAttention(sliding_window=8))] * 3 + [OWN])
    )
    one, all_keys = (
        attention_flops_per_token(replace(BY_HAND, attention=LayerAttention(sliding_window=size)), 64)
        for size in (8, None)
    )
    assert attention_flops_per_token(windowed, 64) == pytest.approx((3 * one + all_keys) / 4)


def test_a_layer_keeps_no_keys_of_another() -> None:
    shape = gemma4(num_global_key_value_heads=None, global_head_dim=8, use_double_wide_mlp=False)
    own, shared = (
        sort_bytes(one, 2, False, 2) for (_, one) in (sorts(shape, range(layer, layer + 1))[0] for layer in (1, 3))
    )
    # Keys and values of two heads of 8 are not kept, nor are their norms in fp32, and the layer has no norm of either.
    assert own.attention - shared.attention >= 2 * 2 * 2 * 8
    assert own.mlp == shared.mlp


def test_a_rank_holds_what_the_layers_of_its_stage_have() -> None:
    first, last = (Stage(range(start, start + 2), start == 0, start == 2) for start in (0, 2))
    table = dict(parameter_table(VARIED).expanded())
    for stage in (first, last):
        ends = ("model.embed", "model.per_layer_") if stage.has_embedding else ("model.norm", "lm_head")
        held = (*ends, *(f"model.layers.{layer}." for layer in stage.layers))
        numel = sum(one.numel for name, one in table.items() if name.startswith(held))
        assert rank_parameters(VARIED, stage, 1) == numel


def test_kv_heads_are_replicated_as_often_as_the_fewest_need() -> None:
    assert VARIED.kv_head_counts == (4, 2)
    assert [VARIED.kv_replicas(tp) for tp in (1, 2, 4, 8)] == [1, 1, 2, 4]


def test_a_model_with_fewer_layers_than_are_dense_has_all_its_parameters() -> None:
    config = {**find_preset("deepseek-v3").config, "num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    assert config["first_k_dense_replace"] == 3
    shape = shape_from_config(config)
    assert rank_parameters(shape, Stage(range(2), True, True), 1) == parameter_table(shape).numel
