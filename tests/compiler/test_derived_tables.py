"""The derived tables of parameters, read without torch."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest

from parcompile.model.presets import Preset, presets
from parcompile.model.tables import complete, counts_of, covered, in_layers, left_out, parameters, table_of
from parcompile.model.tables.expression import TableError, compiled, evaluate

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("preset", presets().values(), ids=lambda preset: preset.name)
def test_the_table_of_a_published_model_has_its_number_of_parameters(preset: Preset) -> None:
    table = table_of(preset.config["model_type"])
    if table is None:
        pytest.skip(f"{preset.config['model_type']} has no table")
    assert sum(one.numel for one in parameters(table, preset.config)) == preset.parameters


def test_every_type_is_in_the_file_once_and_what_is_left_out_has_its_reason() -> None:
    assert not set(covered()) & set(left_out())
    assert all(reason for reason in left_out().values())
    assert len(covered()) >= 173


def test_the_file_is_small_and_holds_a_row_on_each_line() -> None:
    (file,) = (one for one in resources.files("parcompile.model.tables").iterdir() if one.name.endswith(".json"))
    text = file.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    rows = sum(len(entry["rows"]) for entry in json.loads(text)["types"].values())
    assert sum(line.startswith('    {"name":') for line in text.splitlines()) == rows


def test_every_expression_is_in_the_language() -> None:
    for name in covered():
        table = table_of(name)
        assert table is not None
        texts = [*table.derived.values(), *table.stacks.values(), *(row.when for row in table.rows)]
        for text in [*texts, *(size for row in table.rows for size in row.shape)]:
            compiled(text)


def test_a_configuration_is_completed_as_its_class_does() -> None:
    table = table_of("qwen3_moe")
    assert table is not None
    found = complete(table, {"num_experts": 7, "num_hidden_layers": 3})
    assert (found["num_local_experts"], found["vocab_size"], found["mlp_only_layers"]) == (7, 151936, [])


@pytest.mark.parametrize(
    ("given", "heads"), [({}, 4), ({"num_key_value_heads": None}, 4), ({"num_key_value_heads": 2}, 2)]
)
def test_key_value_heads_that_are_left_out_are_as_many_as_queries(given: dict[str, Any], heads: int) -> None:
    table = table_of("llama")
    assert table is not None
    shapes = {one.name: one.shape for one in parameters(table, {**LLAMA, **given})}
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (heads * 8, 32)


def test_a_table_refuses_what_it_was_not_derived_for() -> None:
    table = table_of("llama")
    assert table is not None
    with pytest.raises(TableError, match="per_layer_config"):
        parameters(table, {**LLAMA, "per_layer_config": {"0": {"intermediate_size": 3}}})
    with pytest.raises(TableError, match="does not follow"):
        parameters(table, {**LLAMA, "num_attention_heads": 0})


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a if b", "open('x')", "(lambda: 1)()", "a @ b", "a < b < c", "[x for y.z in a]"]
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(TableError):
        evaluate(text, {})


def test_a_comparison_that_cannot_be_made_is_false() -> None:
    assert evaluate("layers[layer] == 'dense'", {"layers": ["dense"], "layer": 3}) is False
    assert evaluate("window > 0", {}) is False
    assert evaluate("not window > 0", {"window": None}) is True


@pytest.mark.parametrize("listed", [[5, 1, 9, 3], [1, None, "2", 4], []])
def test_numbers_below_another_are_counted_and_looked_up_in_the_list_that_is_given(listed: list[Any]) -> None:
    below, among = "len([one for one in listed if one < layer])", "layer in listed"
    for layer in (0, 3, 4, 20):
        scope = {"listed": list(listed), "layer": layer}
        assert evaluate(below, scope) == sum(isinstance(one, int) and one < layer for one in listed)
        assert evaluate(among, scope) is (layer in listed)
    assert evaluate(among, {"listed": [[3], 3], "layer": 3}) is True


def test_values_that_layers_share_are_held_once() -> None:
    shared, other = {"layer_types": ["a"] * 4}, {"layer_types": ["b"] * 4}
    ((_, held),) = in_layers({0: shared, 1: other, 2: shared, 3: shared})
    assert [layers for _, layers in held] == [(0, 2, 3), (1,)]


@pytest.mark.parametrize(
    ("given", "layers"),
    [({"num_hidden_layers": 3}, 3), ({"num_hidden_layers": 16, "num_layers_per_stack": 2}, 2)],
)
def test_what_follows_reads_what_was_given_where_the_class_rewrites_it(given: dict[str, Any], layers: int) -> None:
    """HRM's class writes the runs of all layers over `num_hidden_layers`, and reads it before."""
    table = table_of("hrm_text")
    assert table is not None
    names = {one.name for one in parameters(table, given)}
    assert sum(name.startswith("model.H_module.layers") and name.endswith("o_proj.weight") for name in names) == layers


def test_a_pattern_of_letters_gives_the_kinds_of_the_layers() -> None:
    table = table_of("nemotron_h")
    assert table is not None
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
    by_letters = parameters(table, {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5})
    assert by_letters == parameters(table, {"layers_block_type": kinds})
    assert {one.name.split(".")[2] for one in by_letters if ".layers." in one.name} == set("01234")


def test_the_last_layers_have_no_keys_where_they_share_those_of_earlier_ones() -> None:
    table = table_of("gemma3n_text")
    assert table is not None
    found = parameters(table, {"num_hidden_layers": 7, "num_kv_shared_layers": 2, "intermediate_size": [8] * 6 + [24]})
    shapes = {one.name: one.shape for one in found}
    layers = [
        number for number in range(7) if f"model.language_model.layers.{number}.self_attn.k_proj.weight" in shapes
    ]
    assert layers in ([0, 1, 2, 3, 4], [])


def test_blocks_that_layers_share_stand_under_the_first_layers_that_use_them() -> None:
    """With the adapters of all uses, those that the block serves; older words for the kinds of layers say the same."""
    table = table_of("zamba2")
    assert table is not None
    given = {"num_hidden_layers": 6, "num_mem_blocks": 2, "hidden_size": 64, "num_attention_heads": 4}
    found = parameters(table, given | {"layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"]})
    today = ["hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"]
    assert found == parameters(table, given | {"layers_block_type": today})
    shared = [one.name.split(".") for one in found if ".shared_transformer." in one.name]
    assert {name[2] for name in shared} == {"0", "2"}
    adapters = {(name[2], name[6]) for name in shared if name[5] == "gate_up_proj_adapter_list"}
    assert adapters == {("0", "0"), ("0", "2"), ("2", "1"), ("2", "3")}


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({}, ["full_attention"] * 3),
        ({"full_attn_idxs": [1]}, ["conv", "full_attention", "conv"]),
        ({"layer_types": ["conv", "attention", "conv"]}, ["conv", "full_attention", "conv"]),
    ],
)
def test_layers_that_attend_are_listed_by_number_or_by_kind(given: dict[str, Any], kinds: list[str]) -> None:
    table = table_of("lfm2")
    assert table is not None
    assert complete(table, {"num_hidden_layers": 3, **given})["layer_types"] == kinds


def test_other_names_of_keys_of_lfm2_win() -> None:
    table = table_of("lfm2")
    assert table is not None
    given = {"tie_embedding": False, "tie_word_embeddings": True, "block_ff_dim": 96, "intermediate_size": 64}
    shapes = {one.name: one.shape for one in parameters(table, given | {"block_multiple_of": 32})}
    assert shapes["model.layers.0.feed_forward.w1.weight"] == (64, 2560)  # two thirds of 96, which 32 divides
    assert "lm_head.weight" in shapes


def test_a_number_of_layers_that_no_model_has_is_not_counted_up_to() -> None:
    config = {
        "model_type": "qwen3",
        **dict.fromkeys(("hidden_size", "num_attention_heads"), 64),
        "num_hidden_layers": 10**30,
    }
    assert counts_of(config) is None
