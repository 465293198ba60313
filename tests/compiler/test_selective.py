"""Published configurations of models with Mamba-1 layers are read as they are, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parcompile.cost.flops import matmul_parameters
from parcompile.layout.shards import tensor_layout
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.rules import check
from parcompile.spec.resolve import Resolution

JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "calc_logits_for_entire_prompt": False,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mamba_kernels": True,
    "vocab_size": 65536,
}
"""ai21labs/Jamba-v0.1; AI21-Jamba-1.5-Mini has the same sizes."""
JAMBA_LARGE = {
    **JAMBA,
    "hidden_size": 8192,
    "intermediate_size": 24576,
    "mamba_dt_rank": 512,
    "num_attention_heads": 64,
    "num_hidden_layers": 72,
}
"""ai21labs/AI21-Jamba-1.5-Large."""
JAMBA_3B: dict[str, Any] = {
    **JAMBA,
    "attn_layer_offset": 7,
    "attn_layer_period": 14,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "mamba_dt_rank": 160,
    "num_attention_heads": 20,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 28,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
"""ai21labs/AI21-Jamba-Reasoning-3B."""


@pytest.mark.parametrize(
    ("config", "attending", "routed", "billions"),
    [
        (JAMBA, (4, 12, 20, 28), 16, 51.570),
        (JAMBA_LARGE, tuple(range(4, 72, 8)), 36, 398.555),
        (JAMBA_3B, (7, 21), 0, 3.03),
    ],
    ids=["jamba-v0.1", "jamba-1.5-large", "jamba-reasoning-3b"],
)
def test_a_published_jamba_has_the_published_number_of_parameters(
    config: dict[str, Any], attending: tuple[int, ...], routed: int, billions: float
) -> None:
    shape = shape_from_config(config)
    assert shape.attention_layers == attending
    assert shape.routed(range(shape.num_hidden_layers)) == routed
    table = parameter_table(shape)
    assert table.numel / 1e9 == pytest.approx(billions, abs=0.01)
    # Norms, convolutions, decays and biases multiply no token; of the experts those that a token visits do.
    visited = sum(one.numel * one.count for one in table if ".experts." in one.name) * (1 - 2 / 16) if routed else 0
    tables = 0 if config["tie_word_embeddings"] else 65536 * shape.hidden_size
    assert matmul_parameters(shape) == pytest.approx(table.numel - visited - tables, rel=3e-3)


def test_experts_alternate_with_dense_layers_on_every_stage() -> None:
    shape = shape_from_config(JAMBA)
    assert [shape.routed(range(start, start + 8)) for start in range(0, 32, 8)] == [4] * 4
    assert (shape.routed(range(1, 2)), shape.dense(range(1, 2)), shape.dense(range(2, 3))) == (1, 0, 1)
    names = {name for name, _ in parameter_table(shape).expanded() if "feed_forward" in name and "layers.3." in name}
    assert {name.partition("feed_forward.")[2] for name in names} == {
        "router.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    }


def test_ranks_have_channels_of_their_own_and_the_norms_of_what_all_share() -> None:
    rows = {one.name.partition("mamba.")[2]: one for one in parameter_table(shape_from_config(JAMBA)).layer}
    assert tensor_layout(rows["in_proj.weight"], 4).local_shape == (4096, 4096)
    assert tensor_layout(rows["in_proj.weight"], 4).ranges[1] == ((2048, 4096), (10240, 12288))  # type: ignore[index]
    assert tensor_layout(rows["x_proj.weight"], 4).local_shape == (256 + 32, 2048)
    assert tensor_layout(rows["dt_proj.weight"], 4).local_shape == (2048, 256)
    assert tensor_layout(rows["A_log"], 4).local_shape == (2048, 16)
    assert [rows[f"{one}_layernorm.weight"].partial for one in ("dt", "b", "c")] == [True] * 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_layer_offset": 8}, "attn_layer_offset 8 has to be smaller than attn_layer_period 8"),
        ({"expert_layer_period": 0}, "expert_layer_period is 0: it has to be a whole number of 1 or more"),
        ({"expert_layer_offset": 2}, "expert_layer_offset 2 has to be smaller than expert_layer_period 2"),
        ({"mamba_dt_rank": "none"}, "mamba_dt_rank is 'none': it has to be a whole number of 1 or more"),
        ({"num_local_experts": 8}, "num_experts 16 and num_local_experts 8 are the same key, and differ"),
        ({"layer_types": ["full_attention"] * 32}, "layer_types: transformers computes it from attn_layer_period"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms: transformers builds the norms"),
        ({"use_mambapy": True}, "use_mambapy: the scan of mamba.py has not been compared"),
        ({"sliding_window": 512}, "sliding_window: transformers' layers have no window"),
    ],
)
def test_what_a_jamba_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_config({**JAMBA, **changes})
    assert str(caught.value).startswith(reason)
    assert caught.value.key in {*changes, "num_local_experts"}


def test_channels_have_to_divide_over_tp(tmp_path: Path) -> None:
    config = {**JAMBA, "hidden_size": 1032, "num_attention_heads": 24}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tree = {
        "version": 1,
        "model": {"hf_config": "config.json"},
        "cluster": {"nodes": 2, "gpus_per_node": 16, "accelerator": "h100-sxm"},
        "parallelism": {"tp": 32},
        "training": {"sequence_length": 4096},
    }
    found = next(one for one in check(Resolution(tree, folder=tmp_path)) if one.code == "T012")
    assert found.message == "hidden_size x mamba_expand = 2064 on tp 32: 2064 / 32 is not whole; nearest tp: 4, 8"
