"""Contract: blocks that several layers use are described once, and counted as often as they are used."""

from __future__ import annotations

from typing import Any

import pytest

from parcompile.cost.flops import matmul_parameters
from parcompile.model.blocks.recurrent import Recurrent
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config


def layers(count: int, hybrid: list[int]) -> list[str]:
    return ["hybrid" if layer in hybrid else "mamba" for layer in range(count)]


_COMMON: dict[str, Any] = {
    "model_type": "zamba2",
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "adapter_rank": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "chunk_size": 256,
    "attention_dropout": 0.0,
}
ZAMBA2_1B: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 2048,
    "num_hidden_layers": 38,
    "layers_block_type": layers(38, [5, 11, 17, 23, 29, 35]),
    "hybrid_layer_ids": [5, 11, 17, 23, 29, 35],
    "intermediate_size": 8192,
    "attention_hidden_size": 4096,
    "attention_head_dim": 128,
    "n_mamba_heads": 64,
    "mamba_headdim": 64,
    "mamba_ngroups": 1,
    "mamba_d_state": 128,
    "num_mem_blocks": 1,
    "use_shared_attention_adapter": True,
    "use_mem_rope": True,
}
ZAMBA2_3B: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 2560,
    "num_hidden_layers": 54,
    "layers_block_type": layers(54, [6, 12, 18, 24, 30, 36, 42, 47, 51]),
    "intermediate_size": 10240,
    "n_mamba_heads": 80,
    "mamba_ngroups": 1,
    "mamba_d_state": 64,
    "num_mem_blocks": 2,
}
ZAMBA2_7B: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 3584,
    "num_hidden_layers": 81,
    "layers_block_type": layers(81, [6, *range(11, 78, 6)]),
    "intermediate_size": 14336,
    "n_mamba_heads": 112,
    "mamba_ngroups": 2,
    "mamba_d_state": 64,
    "num_mem_blocks": 2,
    "use_mem_rope": True,
}


@pytest.mark.parametrize(
    ("config", "parameters", "uses"),
    [(ZAMBA2_1B, 1.215e9, 6), (ZAMBA2_3B, 2.662e9, 9), (ZAMBA2_7B, 7.357e9, 13)],
    ids=["zamba2-1.2b", "zamba2-2.7b", "zamba2-7b"],
)
def test_published_models_are_described(config: dict[str, Any], parameters: float, uses: int) -> None:
    shape, every = shape_from_config(config), range(config["num_hidden_layers"])
    table = parameter_table(shape)
    assert table.numel == pytest.approx(parameters, rel=1e-3)
    assert (shape.attending(every), shape.dense(every)) == (uses, uses)
    assert shape.head_dim == 2 * config["hidden_size"] // 32
    carried = shape.part(Recurrent)
    assert carried is not None
    assert carried.layers == tuple(every)
    names = [name for name, _ in table.expanded()]
    assert len([name for name in names if name.endswith("self_attn.q_proj.weight")]) == config["num_mem_blocks"]
    assert len([name for name in names if ".gate_up_proj_adapter_list." in name]) == 2 * uses
    # Every token passes a block as often as layers use it, and each adapter once; the head is the embedding.
    block = sum(
        one.numel * one.count for one in table if ".shared_transformer." in one.name and len(one.shape) == 2
    ) - sum(one.numel * one.count for one in table if "_adapter_list." in one.name)
    matrices = sum(one.numel * one.count for one in table if len(one.shape) == 2)
    expected = matrices + block * (uses / config["num_mem_blocks"] - 1)
    assert matmul_parameters(shape) == pytest.approx(expected, rel=1e-3)


def test_adapters_of_later_uses_stand_under_the_first_layer_of_their_block() -> None:
    table = parameter_table(shape_from_config(ZAMBA2_3B))
    name = "model.layers.{}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.0.weight"
    names = {found for found, _ in table.expanded()}
    assert {name.format(6, use) for use in (0, 2, 4, 6, 8)} | {name.format(12, use) for use in (1, 3, 5, 7)} <= names
    assert name.format(18, 2) not in names


def test_a_configuration_without_a_list_has_the_layers_of_its_class() -> None:
    config = {key: value for key, value in ZAMBA2_3B.items() if key != "layers_block_type"}
    found = shape_from_config(config).stack.shared_blocks
    assert found is not None
    assert found.layers == (6, 12, 18, 24, 30, 36, 42, 47, 51)


def test_a_long_context_is_as_long_as_the_class_makes_it() -> None:
    assert shape_from_config({**ZAMBA2_7B, "use_long_context": True}).max_position_embeddings == 16384


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 37}, "num_hidden_layers is 37, but layers_block_type lists 38 layers"),
        ({"layers_block_type": ["mamba", "conv"]}, "layers_block_type has conv: the kinds are mamba, linear_attention"),
        ({"layers_block_type": ["mamba"] * 38}, "layers_block_type has no hybrid layer: no layer would attend"),
        ({"layers_block_type": []}, "layers_block_type is []: write the kind of each layer"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not num_attention_heads 32: with use_shared_attention"),
        ({"num_attention_heads": 31}, "2 x hidden_size 2048 / num_attention_heads 31 is not whole"),
        ({"attention_head_dim": 64}, "attention_head_dim is 64, but 128 follows from the other keys"),
        ({"hybrid_layer_ids": [5]}, "hybrid_layer_ids is [5], but [5, 11, 17, 23, 29, 35] follows"),
        ({"mamba_headdim": 32}, "n_mamba_heads 64 x mamba_headdim 32 = 2048 is not mamba_expand 2 x hidden_size"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: transformers then ties no shared block either"),
        ({"attention_dropout": 0.1}, "attention_dropout: masks are drawn by the number of the layer"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_config({**ZAMBA2_1B, **changes})
    assert str(caught.value).startswith(reason)
