"""Embeddings of n-grams (Qwen4-Exp): what a configuration says of them, their tables, and what is refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from parcompile.cost.collectives import collectives
from parcompile.cost.flops import forward_flops_per_token, matmul_parameters
from parcompile.cost.memory import untrained_bytes
from parcompile.cost.traffic import step_traffic
from parcompile.cost.workload import Workload
from parcompile.layout.shards import tensor_layout
from parcompile.model.blocks.indexer import Indexer
from parcompile.model.blocks.ngrams import TABLE, Ngrams
from parcompile.model.blocks.recurrent import Recurrent
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import text_part
from parcompile.model.shape import ModelShape
from parcompile.model.tables.expression import MOST, is_prime, sum_of_primes
from parcompile.rules import check
from parcompile.spec.resolve import Resolution

CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "eos_token_id": 248046,
    "ple_layer_ids": [2, 6],
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}


def shape_of(**changes: Any) -> ModelShape:
    return shape_from_config({**CONFIG, **changes})


def tables(shape: ModelShape) -> dict[int, tuple[int, ...]]:
    rows = (row for row in parameter_table(shape).layer if row.name.endswith(TABLE))
    return {layer: row.shape for row in rows for layer in row.layers or ()}


def test_the_defaults_are_those_of_the_class() -> None:
    """Each of 16 heads has the next prime from 20,000,000 on; the second layer goes on behind those of the first."""
    shape = shape_of()
    assert shape.part(Ngrams) == Ngrams(layers=(1, 5), width=2048, heads=16, longest=3, kernel=4)
    assert shape.part(Ngrams).seen == 9
    found = tables(shape)
    assert {layer: size[1] for layer, size in found.items()} == {1: 128, 5: 128}
    assert all(size[0] % 128 == 0 for size in found.values())
    assert 16 * 20_000_000 < found[1][0] < found[5][0] < 16 * 20_002_000
    assert shape.part(Indexer).layers == tuple(range(3, 40, 4))
    carried = shape.part(Recurrent)
    assert carried is not None
    assert len(carried.layers) == 30
    assert shape.residual_streams == 4


def test_a_table_is_cut_by_its_rows_over_tp() -> None:
    shape = shape_of()
    (row, *_) = [row for row in parameter_table(shape).layer if row.name.endswith(TABLE)]
    layout = tensor_layout(row, 8)
    assert layout.dim == 0
    assert layout.local_numel == row.numel // 8


def test_primes() -> None:
    few = [number for number in range(2, 2000) if all(number % divisor for divisor in range(2, number))]
    assert [number for number in range(2000) if is_prime(number)] == few
    assert sum_of_primes(50, 0, 3) == 53 + 59 + 61
    assert sum_of_primes(53, 1, 2) == 59 + 61
    assert not is_prime(2_147_483_647 * 2_147_483_629)
    with pytest.raises(ValueError, match="are not counted"):
        sum_of_primes(2, MOST, 1)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"indexer_head_dim": None}, "indexer_n_heads"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_budget": 40}, "indexer_budget"),
        ({"indexer_head_dim": 128}, "indexer_head_dim"),
        ({"hc_count": 1}, "hc_count"),
        ({"hidden_act": "gelu"}, "output_gate_type"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids"),
        ({"ple_layer_ids": [41]}, "ple_layer_ids"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"ngram_size": 1}, "ngram_size"),
        ({"heads_per_ngram": 0}, "heads_per_ngram"),
        ({"heads_per_ngram": 7}, "ple_embed_dim"),
        ({"ple_conv_kernel_size": 0}, "ple_conv_kernel_size"),
        ({"ngram_vocab_size_base": 0}, "ngram_vocab_size_base"),
        ({"make_ngram_vocab_size_divisible_by": 0}, "make_ngram_vocab_size_divisible_by"),
        ({"layer_types": ["linear_attention"] * 39 + ["sliding_attention"]}, "layer_types"),
    ],
)
def test_what_transformers_does_not_build_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_of(**changes)
    assert caught.value.key == key


def test_layers_may_be_listed_in_older_words_and_twice() -> None:
    kinds = ["full_attention", "linear_attention", "indexed_attention", "linear_attention"]
    older = [{"full_attention": "qwen_sparse_attention"}.get(kind, kind) for kind in kinds]
    one = shape_of(num_hidden_layers=4, layer_types=kinds, ple_layer_ids=[4, 2, 4])
    assert one == shape_of(num_hidden_layers=4, layer_types=older, ple_layer_ids=[2, 4])
    assert one.part(Indexer).layers == (0, 2)
    assert tables(one) == tables(shape_of(num_hidden_layers=4, layer_types=kinds, ple_layer_ids=[2, 4]))


def test_without_them_there_is_nothing_to_look_up_or_choose() -> None:
    plain = {key: None for key in CONFIG if key.startswith(("indexer_", "ple_"))}
    shape = shape_of(**plain, layer_types=["linear_attention"] * 40)
    assert (shape.part(Ngrams), shape.part(Indexer), tables(shape)) == (None, None, {})


def test_operations_of_blocks_and_projections_are_counted() -> None:
    shape = shape_of()
    ngrams = shape.part(Ngrams)
    assert ngrams is not None
    without = shape_of(ple_layer_ids=[])
    assert matmul_parameters(shape) - matmul_parameters(without) == 2 * ngrams.matmul_parameters(2048, 4)
    projected = 2048 * 17 * 256
    compared = 16 * 257 * (4096 // 16)
    assert forward_flops_per_token(shape, 4096) == pytest.approx((2 * projected + compared) * 10 / 40)


def test_the_text_part_of_the_whole_is_planned() -> None:
    inner = {key: value for key, value in CONFIG.items() if key not in ("model_type", "max_position_embeddings")}
    found = text_part({"model_type": "qwen4_exp", "text_config": inner, "image_token_id": 5})
    assert shape_from_config(found) == shape_of()


def codes(parallelism: dict[str, Any], length: int, **changes: Any) -> dict[str, str]:
    ranks = parallelism.get("tp", 1) * parallelism.get("cp", 1)
    tree = {
        "version": 1,
        "model": {"hf_config": "config.json"},
        "cluster": {"gpus_per_node": ranks, "accelerator": "cpu"},
        "parallelism": parallelism,
        "training": {"sequence_length": length, "global_batch_size": 2, "micro_batch_size": 2},
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
        return {one.code: one.message for one in check(Resolution(tree, folder=Path(folder))) if one.is_error}


def test_rows_that_tp_does_not_divide_and_pieces_shorter_than_the_convolution_are_refused() -> None:
    odd = {"ngram_size": 2, "heads_per_ngram": 1, "make_ngram_vocab_size_divisible_by": 1, "ple_layer_ids": [1]}
    assert "a table of n-grams has 20000003 rows on tp 2" in codes({"tp": 2}, 64, **odd)["T004"]
    assert "(4 − 1) · 3" in codes({"cp": 2}, 32)["C011"]
    assert codes({"cp": 2, "tp": 2}, 64) == {}


def test_the_bytes_of_a_plan_over_cp_are_those_of_all_messages_also_of_gathered_tokens() -> None:
    work = Workload(shape_of(), 1, 8, "h100-sxm", 4096, 1, 1, cp=2)
    sent = collectives(work, work.stages[0])
    assert step_traffic(work).cp == int(sum(one.wire_bytes for (group, _), one in sent.items() if group == "cp"))


def test_weights_without_a_gradient_are_those_of_their_rows() -> None:
    config = {
        "model_type": "ernie4_5_moe",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "moe_num_experts": 8,
        "vocab_size": 256,
        "max_position_embeddings": 512,
    }
    work = Workload(shape_from_config(config), 1, 1, "h100-sxm", 64, 1, 1)
    biases = [row for row in parameter_table(work.shape).layer if row.name.endswith("e_score_correction_bias")]
    count = len(biases[0].layers or ())
    assert count > 0
    assert untrained_bytes(work, work.stages[0]) == count * 8 * work.element_bytes
