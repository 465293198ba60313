"""Keys that stand for windows of tokens: what a configuration says of them, what they cost, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from parcompile.cost.flops import attention_flops_per_token, forward_flops_per_token, model_flops_per_token
from parcompile.layout.shards import SplitError, tensor_layout
from parcompile.model.compressed_keys import CompressedKeys, KeyChoice
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.shape import ModelShape
from parcompile.rules import check
from parcompile.spec.resolve import Resolution

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
}
CHOSEN = CompressedKeys(4, 2, KeyChoice(64, 128, 512))
HEAVY = CompressedKeys(128)


def shape_of(**changes: Any) -> ModelShape:
    return shape_from_config({**CONFIG, **changes})


def kinds(shape: ModelShape) -> list[CompressedKeys | None]:
    return [shape.of_layer(layer).attention.compressed for layer in range(shape.num_hidden_layers)]


def test_the_defaults_are_those_of_the_class() -> None:
    """transformers builds 284,325,869,015 parameters of `DeepseekV4Config()`: `.ci/generate/model_tables --check`."""
    shape = shape_of()
    assert parameter_table(shape).numel == 284_325_869_015
    assert kinds(shape)[:5] == [HEAVY, HEAVY, HEAVY, CHOSEN, HEAVY]
    assert shape.moe is not None
    assert shape.moe.hashed == (0, 1, 2)
    assert shape.attention.sliding_window == 128


def test_older_words_say_the_same_as_todays() -> None:
    older = {"compress_ratios": [0, 4, 128, 0], "compress_rate_csa": 8, "num_hash_layers": 1, "num_hidden_layers": 3}
    today = {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_hidden_layers": 3,
    }
    assert shape_of(**older) == shape_of(**today)
    tables = [list(parameter_table(shape_of(**one)).expanded()) for one in (older, today)]
    assert tables[0] == tables[1]
    assert kinds(shape_of(**older)) == [None, CompressedKeys(8, 2, CHOSEN.choice), HEAVY]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"attention_bias": True}, "attention_bias"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"o_groups": 7}, "o_groups"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"intermediate_size": 1024}, "intermediate_size"),
        ({"output_router_logits": True, "num_hidden_layers": 3}, "output_router_logits"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"compress_ratios": [2] * 43}, "compress_ratios"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "compress_rates"),
        ({"compress_rate_hca": 0}, "compress_rate_hca"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types"),
        ({"num_hash_layers": -1}, "num_hash_layers"),
    ],
)
def test_what_transformers_reads_otherwise_is_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        shape_of(**changes)
    assert error.value.key == key


def test_operations_count_the_window_and_half_of_the_compressed_keys() -> None:
    heads, length = 64 * (512 + 512), 8192
    window = 128 * (1 - 128 / (2 * length))
    for compressed, further in ((None, 0), ("compressed_sparse_attention", 2048), ("heavily_compressed_attention", 64)):
        shape = shape_of(layer_types=[compressed or "sliding_attention"] * 43)
        assert attention_flops_per_token(shape, length) == pytest.approx(2 * heads * (window + further / 2))
        every = 6 * 2 * 43 * heads / 2 * (length + further)
        assert model_flops_per_token(shape, length) - every == pytest.approx(model_flops_per_token(shape, 0))


def test_an_indexer_scores_the_compressed_keys_of_its_layers() -> None:
    shape = shape_of(layer_types=["sliding_attention"] * 42 + ["compressed_sparse_attention"])
    projected = 1024 * 64 * 128 + 4096 * (4 * 128 + 64)
    assert forward_flops_per_token(shape, 4096) == pytest.approx(2 * (projected + 1024 * 64 * 129) / 43)


def test_groups_of_heads_are_cut_together() -> None:
    table = {one.name.partition("{layer}.")[2]: one for one in parameter_table(shape_of()).layer}
    queries, first, last = (table[f"self_attn.{name}.weight"] for name in ("q_b_proj", "o_a_proj", "o_b_proj"))
    assert tensor_layout(queries, 8).local_shape == (4096, 1024)
    assert tensor_layout(first, 8).local_shape == (1024, 4096)
    assert tensor_layout(last, 8).local_shape == (4096, 1024)
    with pytest.raises(SplitError):
        tensor_layout(parameter_table(shape_of(o_groups=4)).layer[6], 3)
    whole = [name for name, one in table.items() if name.startswith("self_attn") and one.split is None]
    assert all(table[name].partial or ".indexer." in name for name in whole)
    assert not any(table[name].trained for name in whole if ".indexer." in name)


@pytest.mark.parametrize(
    ("parallelism", "code", "words"),
    [
        ({"cp": 2, "cp_layout": "striped"}, "C010", "striped with compressed KV of 4, 128 tokens"),
        ({"cp": 2, "cp_implementation": "ulysses"}, "C005", "ulysses with cp 2, and compressed KV of 4"),
        ({"cp": 4, "cp_implementation": "usp"}, "C005", "usp with cp 4, and compressed KV of 4"),
        ({"tp": 16}, "T002", "projects what its heads give in 8 groups (o_groups), and 8 / 16 is not whole"),
    ],
)
def test_layouts_that_cut_windows_or_groups_are_refused(parallelism: dict[str, Any], code: str, words: str) -> None:
    tree = {
        "version": 1,
        "model": dict(CONFIG),
        "cluster": {"nodes": 8, "gpus_per_node": 8},
        "parallelism": parallelism,
        "training": {"sequence_length": 4096, "gradient_accumulation_dtype": "fp32"},
    }
    found = [one for one in check(Resolution(tree)) if one.code == code]
    assert [one for one in found if words in one.message], found
