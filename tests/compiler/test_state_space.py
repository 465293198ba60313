"""Published configurations of models with state-space layers are read as they are, and what does not fit is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from layout_cases import spec_tree

from parcompile.cost.flops import matmul_parameters
from parcompile.layout.shards import repeated_ranges, tensor_layout
from parcompile.model.blocks.recurrent import Recurrent
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import presets
from parcompile.pipeline import check_read
from parcompile.plan import compile_plan
from parcompile.rules import check
from parcompile.spec.resolve import Resolution, model
from parcompile.text import parse

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
    carried = shape.part(Recurrent)
    assert carried is not None
    assert len(carried.layers) == states
    assert carried.value_dim == 64
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


NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
NEMOTRON_NANO_30B = {
    **NEMOTRON_H_8B,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}


@pytest.mark.parametrize(
    ("config", "kinds", "billions"),
    [(NEMOTRON_H_8B, (24, 4, 24, 0), 8.10), (NEMOTRON_NANO_30B, (23, 6, 0, 23), 31.58)],
    ids=["nemotron-h-8b", "nemotron-3-nano-30b-a3b"],
)
def test_a_layer_may_be_one_block(config: dict[str, Any], kinds: tuple[int, ...], billions: float) -> None:
    shape, every = shape_from_config(config), range(52)
    carried = shape.part(Recurrent)
    assert carried is not None
    counts = len(carried.layers), shape.attending(every), shape.dense(every), shape.routed(every)
    assert counts == kinds
    assert shape.blocks_per_layer == 1
    table = parameter_table(shape)
    assert table.numel / 1e9 == pytest.approx(billions, abs=0.02)
    assert len([name for name, _ in table.expanded() if name.endswith(".norm.weight") and "mixer" not in name]) == 52
    # Biases, convolutions and norms multiply no token; of the experts those that a token visits do.
    visited = sum(one.numel * one.count for one in table if ".experts." in one.name) * (1 - 6 / 128) if kinds[3] else 0
    embedding = 131072 * config["hidden_size"]
    assert matmul_parameters(shape) == pytest.approx(table.numel - visited - embedding, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 50}, "num_hidden_layers is 50, but hybrid_override_pattern lists 52 layers"),
        ({"hybrid_override_pattern": "M-X", "num_hidden_layers": 3}, "hybrid_override_pattern has X: the kinds are"),
        ({"layers_block_type": ["mamba", "conv"], "num_hidden_layers": 2}, "layers_block_type has conv: the kinds"),
        ({"moe_latent_size": 512, "hybrid_override_pattern": "ME*-" * 13}, "moe_latent_size: experts of a projection"),
        ({"sliding_window": 512}, "sliding_window: transformers' layers have no window"),
    ],
)
def test_lists_of_blocks_that_do_not_fit_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_config({**NEMOTRON_H_8B, **changes})
    assert str(caught.value).startswith(reason)
    assert caught.value.key in changes


def test_numbers_without_a_name_in_json_stand_in_a_plan_as_transformers_writes_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON_H_8B), encoding="utf-8")
    tree = {
        "version": 1,
        "model": {"hf_config": "config.json"},
        "cluster": {"gpus_per_node": 8, "accelerator": "h100-sxm"},
        "parallelism": {"tp": 8},
        "training": {"sequence_length": 4096, "global_batch_size": 8},
    }
    resolution = Resolution(tree, folder=tmp_path)
    plan = compile_plan(resolution.spec(), tree, check(resolution))
    written = json.dumps(plan.spec.model.hf_config, allow_nan=False)
    assert '"time_step_limit": [0.0, {"__float__": "Infinity"}]' in written


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
    carried = shape.part(Recurrent)
    assert carried is not None
    assert (len(carried.layers), shape.attending(range(4)), shape.blocks_per_layer) == (4, 4, 3)
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


def test_what_a_check_does_grows_less_than_the_layers(tmp_path: Path) -> None:
    """A hybrid of 10,000 layers took 17 seconds: its layers were counted again for every layout that was tried."""

    def calls(layers: int) -> int:
        config = dict(presets()["nemotron-h-56b"].config)
        pattern = config["hybrid_override_pattern"]
        config |= {"num_hidden_layers": layers, "hybrid_override_pattern": (pattern * 20)[:layers]}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        tree = spec_tree(1, 8, model={"hf_config": "config.json"}, parallelism={})
        tree["cluster"]["accelerator"] = "h100-sxm"
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            checked = check_read(parse(json.dumps(tree), "spec.json", "json"), tmp_path)
        finally:
            sys.setprofile(None)
        assert {one.code for one in checked.diagnostics} & {"H001", "H004"}
        return counted

    calls(100)  # what is read once
    few = calls(150)
    assert calls(600) < 3.5 * few


def test_a_model_of_too_many_modules_is_refused_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of every layer in every other: 10,000 layers took minutes, and each rule read the model again."""
    kinds = ["hybrid" if layer % 6 == 0 else "linear_attention" for layer in range(10_000)]
    config = {"model_type": "zamba2", "num_hidden_layers": 10_000, "layers_block_type": kinds, "use_mem_rope": True}
    config |= {"max_position_embeddings": 4096, "use_shared_attention_adapter": True}
    config |= {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tree = spec_tree(model={"hf_config": "config.json"}, parallelism={})
    asked: list[str] = []
    read = model.shape_from_config
    monkeypatch.setattr(model, "shape_from_config", lambda config: asked.append(config["model_type"]) or read(config))
    checked = check_read(parse(json.dumps(tree), "spec.json", "json"), tmp_path)
    (refused,) = (one for one in checked.diagnostics if one.is_error)
    assert "times in each of 10,000 layers: at most 200,000 in all are counted" in refused.message
    assert "num_hidden_layers" in str(refused.help)
    assert asked == ["zamba2"]
