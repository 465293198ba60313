"""Published configurations of models with state-space layers are read as they are, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest

from parcompile.cost.flops import matmul_parameters
from parcompile.layout.tensor import repeated_ranges, tensor_layout
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.parameters import parameter_table

GRANITE_TINY: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "position_embedding_type": "nope",
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "logits_scaling": 6,
    "residual_multiplier": 0.22,
}
GRANITE_SMALL = {
    **GRANITE_TINY,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "shared_intermediate_size": 1536,
    "mamba_n_heads": 128,
}
BAMBA_9B: dict[str, Any] = {
    "model_type": "bamba",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "vocab_size": 128256,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "states", "billions"),
    [(GRANITE_TINY, 36, 6.94), (GRANITE_SMALL, 36, 32.2), (BAMBA_9B, 29, 9.78)],
    ids=["granite-4.0-h-tiny", "granite-4.0-h-small", "bamba-9b"],
)
def test_a_published_configuration_has_the_published_number_of_parameters(
    config: dict[str, Any], states: int, billions: float
) -> None:
    shape = shape_from_config(config)
    assert shape.recurrent is not None
    assert len(shape.recurrent.layers) == states
    assert shape.recurrent.value_dim == 64
    assert parameter_table(shape).numel / 1e9 == pytest.approx(billions, abs=0.02)


def test_ranks_have_heads_of_their_own_and_what_one_group_shares() -> None:
    table = parameter_table(shape_from_config(GRANITE_TINY))
    fused = next(one for one in table.layer if one.name.endswith("mamba.in_proj.weight"))
    assert fused.shape == (3072 + 3072 + 128 + 128 + 48, 1536)
    layout = tensor_layout(fused, 4)
    assert layout.ranges is not None
    assert layout.ranges[1] == ((768, 1536), (3840, 4608), (6144, 6272), (6272, 6400), (6412, 6424))
    assert layout.replicas == 4
    assert repeated_ranges(fused, layout) == ((1536, 1792),)


FALCON: dict[str, Any] = {
    "model_type": "falcon_h1",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_state": 128,
    "vocab_size": 32784,
    "max_position_embeddings": 16384,
}


def test_a_layer_may_attend_and_carry_a_state() -> None:
    shape = shape_from_config(FALCON)
    assert shape.recurrent is not None
    assert (len(shape.recurrent.layers), shape.attending(range(4)), shape.blocks_per_layer) == (4, 4, 3)
    names = {one.name.split(".")[3] for one in parameter_table(shape).layer}
    assert names == {"feed_forward", "mamba", "self_attn", "input_layernorm", "pre_ff_layernorm"}
    # Each matrix of a layer once, and the head.
    attention, mamba = 1024 * 64 * (2 * 8 + 2 * 2), 1024 * (3 * 1536 + 2 * 128 + 24)
    assert matmul_parameters(shape) == 4 * (attention + mamba + 3 * 1024 * 2048) + 32784 * 1024


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mamba_d_head": 32}, "mamba_n_heads 48 x mamba_d_head 32 = 1536 is not mamba_expand 2 x hidden_size 1536 ="),
        ({"mamba_n_groups": 5}, "mamba_n_heads 48 / mamba_n_groups 5 is not whole"),
        ({"mamba_n_heads": 7, "mamba_d_head": "auto"}, "mamba_expand 2 x hidden_size 1536 = 3072 / mamba_n_heads 7"),
        ({"layer_types": ["mamba"]}, "layer_types has 1 entries for 40 layers"),
        ({"layer_types": ["mamba"] * 39 + ["conv"]}, "layer_types has conv: the kinds of layers here are"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_equation(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_config({**GRANITE_TINY, **changes})
    assert str(caught.value).startswith(reason)
    assert caught.value.key in changes


def test_a_loss_of_the_logits_themselves_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="z_loss_coefficient: it adds a loss of the logits"):
        shape_from_config({**BAMBA_9B, "z_loss_coefficient": 1e-4})
