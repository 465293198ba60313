"""What a configuration says twice, leaves out, or lists for other layers is refused by its key, and is no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import parcompile
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61}
DOTS = {"num_key_value_heads": 4, "layer_types": ["indexed_attention", "sliding_attention"]}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}
NEO = {"hidden_size": 32, "num_layers": 9, "num_heads": 4, "vocab_size": 61}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
FALCON["new_decoder_architecture"] = True
EXPERTS = {**SMALL, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
LIMITED = {"n_routed_experts": 8, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
MPT = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 61}
MISTRAL4 = {**EXPERTS, "n_routed_experts": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
MAMBA2 = {**SMALL, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 6, "head_dim": 8}
SHARED = {**SMALL, "mamba_headdim": 8, "n_mamba_heads": 8, "num_key_value_heads": 4, "mamba_ngroups": 1}


@pytest.mark.parametrize(
    ("name", "config", "key", "message"),
    [
        ("gpt2", {**GPT, "num_hidden_layers": 4}, "num_hidden_layers", "n_layer and num_hidden_layers are the same"),
        ("bloom", {**BLOOM, "num_hidden_layers": 3}, "num_hidden_layers", "n_layer and num_hidden_layers are the same"),
        ("gptj", {**GPT, "num_attention_heads": None}, "num_attention_heads", "n_head and num_attention_heads are"),
        ("mixtral", {**EXPERTS, "num_local_experts": 4, "num_experts": None}, "num_experts", "are the same key"),
        ("lfm2", {**SMALL, "block_multiple_of": 0}, "block_multiple_of", "block_multiple_of is 0"),
        ("minimax_m3_vl_text", {**EXPERTS, "sparse_attention_config": 7}, "sparse_attention_config", "be a mapping"),
        ("ministral", SMALL, "head_dim", "head_dim is null, and parameters follow from it"),
        ("bamba", {**MAMBA2, "mamba_n_groups": None, "attn_layer_indices": [1]}, "mamba_n_groups", "is null, and"),
        ("ernie4_5_moe", {**EXPERTS, "moe_num_experts": 4, "moe_layer_interval": 0}, "moe_layer_interval", "is 0: it"),
        ("ernie4_5_moe", {**EXPERTS, "moe_layer_start_index": "1"}, "moe_layer_start_index", 'is "1": it has to be'),
        ("qwen3_moe", {**EXPERTS, "num_experts": 4, "mlp_only_layers": 1}, "mlp_only_layers", "it has to be a list"),
        ("axk1", {**EXPERTS, "first_k_dense_replace": "1"}, "first_k_dense_replace", "has to be a whole number"),
        ("exaone4", {**SMALL, "layer_types": []}, "layer_types", "has 0 entries for 2 layers"),
        ("gemma2", {**SMALL, "layer_types": ["full_attention"] * 3}, "layer_types", "has 3 entries for 2 layers"),
        ("deepseek_v32", {**EXPERTS, "mlp_layer_types": ["sparse"] * 61}, "mlp_layer_types", "has 61 entries for 2"),
        ("jamba", {**EXPERTS, "head_dim": 16}, "head_dim", "heads of another width"),
        ("dots3_note_text", {**EXPERTS, **DOTS, "swa_head_dim": None}, "swa_head_dim", "is null, which transformers"),
        ("gpt_neo", NEO, "attention_types", "kinds of as many layers as num_layers counts"),
        ("smollm3", {**SMALL, "no_rope_layers": [1]}, "no_rope_layers", "has 1 entries for 2 layers"),
        ("falcon", {**FALCON, "parallel_attn": False}, "parallel_attn", "misses a norm"),
        ("falcon", {**FALCON, "num_kv_heads": -1}, "num_kv_heads", "1 or more"),
        ("deepseek_v2", {**EXPERTS, **LIMITED, "topk_method": None}, "topk_method", "is null"),
        ("deepseek_v2", {**EXPERTS, **LIMITED, "n_group": None}, "n_group", "is null or missing"),
        ("deepseek_v2", {**EXPERTS, **LIMITED, "topk_group": None}, "topk_group", "is null or missing"),
        ("glm4_moe", {**EXPERTS, "n_routed_experts": 8, "n_group": 3}, "n_group", "has to divide n_routed_experts 8"),
        ("glm4_moe", {**EXPERTS, "n_routed_experts": 8, "n_group": 8}, "n_group", "by the best 2 of its experts"),
        (
            "bailing_hybrid",
            {**EXPERTS, "num_key_value_heads": 4, "num_experts": 8, "n_group": 2, "num_expert_group": 3},
            "num_expert_group",
            "has to divide num_experts 8",
        ),
        ("beam", {**EXPERTS, "num_experts": 8, "n_group": 2, "topk_group": 3}, "topk_group", "between 1 and n_group 2"),
        ("gemma3n_text", {**SMALL, "activation_sparsity_pattern": 2.5}, "activation_sparsity_pattern", "to be a list"),
        ("lfm2", {**SMALL, "block_ff_dim": None}, "block_ff_dim", "is null, which transformers refuses"),
        ("lfm2", {**SMALL, "block_ff_dim": 0}, "block_ff_dim", "has to be a whole number of 1 or more"),
        ("mistral4", {**MISTRAL4, "head_dim": "x"}, "head_dim", "is 'x': it has to be a whole number"),
        ("mistral4", {**MISTRAL4, "head_dim": 32}, "rope_parameters", "has to be qk_rope_head_dim"),
        ("falcon", {**FALCON, "n_embed": 2.5}, "n_embed", "it has to be a whole number or null"),
        ("llama", {**SMALL, "rope_scaling": "yarn"}, "rope_scaling", "it has to be a mapping or null"),
        ("gpt_neox", {**SMALL, "rotary_pct": []}, "rotary_pct", "it has to be a number"),
        ("granite_swa", {**SMALL, "layer_rope_theta": [1e4]}, "layer_rope_theta", "has 1 entries for 2 layers"),
        ("gpt_neo", {**NEO, "attention_layers": "global"}, "attention_layers", "it has to be a list, each entry of it"),
        ("gemma4_text", {**SMALL, "per_layer_config": "x"}, "per_layer_config", "from numbers of layers to mappings"),
        ("gemma4_text", {**SMALL, "per_layer_config": {"x": {}}}, "per_layer_config", "from numbers of layers to map"),
        ("dots3_note_text", {**EXPERTS, **DOTS, "per_layer_config": {"0": 7}}, "per_layer_config", "to mappings"),
        ("mpt", {**MPT, "attn_config": "x"}, "attn_config", "it has to be a mapping"),
        ("gemma4_text", {**SMALL, "use_bidirectional_attention": True}, "use_bidirectional_attention", "text or null"),
        ("gpt_neox", {**SMALL, "rotary_pct": "x"}, "rotary_pct", "it has to be a number"),
        ("gpt_neox", {**SMALL, "rotary_pct": 2.5}, "rotary_pct", "between 0 and 1: it is a share of head_dim"),
        ("gpt_neox", {**SMALL, "rotary_emb_base": {}}, "rotary_emb_base", "it has to be a number"),
        ("llama", {**SMALL, "rope_parameters": {**YARN, "factor": "x"}}, "rope_parameters", "factor is .x.: it has to"),
        (
            "llama",
            {**SMALL, "rope_parameters": {"rope_type": "linear", "factor": None}},
            "rope_parameters",
            "lacks fac",
        ),
        ("gemma3_text", {**SMALL, "rope_parameters": {"full_attention": "x"}}, "rope_parameters", "for full_attention"),
        (
            "modernbert-decoder",
            {**SMALL, "sliding_window": "x"},
            "sliding_window",
            "it has to be a whole number or null",
        ),
        ("lfm3", {**SMALL, "rms_norm_eps": "x"}, "rms_norm_eps", "it has to be a number"),
        ("iquestcoder", {**SMALL, "clip_qkv": 8.0}, "clip_qkv", "transformers refuses it"),
        ("iquestcoder", {**SMALL, "use_sliding_window": True}, "use_sliding_window", "transformers refuses it"),
        ("internlm3", {**SMALL, "bias": True}, "attention_bias", "it has to be as mlp_bias is"),
        ("zamba2", {**SHARED, "layer_types": ["mamba", "hybrid"]}, "layer_types", "from layers_block_type only"),
    ],
)
def test_the_key_is_named(name: str, config: dict[str, Any], key: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=message) as caught:
        shape_from_config({"model_type": name, **config})
    assert caught.value.key == key
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **config}), encoding="utf-8")
    assert [one.code for one in parcompile.check(_spec_of(tmp_path), estimate=False).errors] == ["S003"]


def _spec_of(folder: Path) -> dict[str, Any]:
    return {
        "version": 1,
        "model": {"hf_config": str(folder / "config.json")},
        "cluster": {"nodes": 1, "gpus_per_node": 1},
        "training": {"sequence_length": 16, "global_batch_size": 1, "micro_batch_size": 1},
    }


OCR = {**SMALL, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("unlimited_ocr", {**OCR, "first_k_dense_replace": None}, "first_k_dense_replace: it has to be a whole number"),
        ("unlimited_ocr", {**OCR, "first_k_dense_replace": "1"}, "first_k_dense_replace: it has to be a whole number"),
        ("unlimited_ocr", {**OCR, "num_hidden_layers": "2"}, 'num_hidden_layers is "2"'),
        ("unlimited_ocr", {**OCR, "mlp_layer_types": []}, "mlp_layer_types: it has to list the kind of each layer"),
        ("unlimited_ocr", {**OCR, "num_hidden_layers": 10**12}, "more than the limit of 10000"),
        ("llava", {**SMALL, "model_type": "llama", "num_hidden_layers": 10**12}, "more than the limit of 10000"),
    ],
)
def test_a_key_of_a_text_part_is_named(name: str, text: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "text_config": text}), encoding="utf-8")
    found = parcompile.check(_spec_of(tmp_path), estimate=False).errors
    assert [one.code for one in found] == ["S003"]
    assert message in found[0].message
    if "limit" in message:
        assert str(found[0].help).startswith("change num_hidden_layers in ")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_configuration_is_not_told_to_change_a_key_of_the_spec(text: str, tmp_path: Path) -> None:
    spec = _spec_of(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    (error,) = parcompile.check(spec, estimate=False).errors
    assert error.help is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "config.json: the file is empty"),
        (b'{"model_type": "\xff"}', "byte 17 is 0xFF, which is not UTF-8"),
        (
            b'{"vocab_size": 61, "vocab_size": 64}',
            '"vocab_size" is written twice, as 61 and as 64: keep one',
        ),
        (b'{"rope_scaling": {"factor": 2.0, "factor": 4.0}}', '"factor" is written twice, as 2.0 and as 4.0'),
        (b'{"model": {}, "cluster": {}}', "config.json is a spec: name the config.json of a model"),
    ],
)
def test_a_file_that_is_no_one_configuration_says_why(text: bytes, message: str, tmp_path: Path) -> None:
    spec = _spec_of(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    (error,) = parcompile.check(spec, estimate=False).errors
    assert (error.code, message in error.message) == ("S003", True), error.message


def test_a_key_may_say_the_same_twice(tmp_path: Path) -> None:
    spec, text = _spec_of(tmp_path), json.dumps({**SMALL, "model_type": "llama"})
    (tmp_path / "config.json").write_text(text[:-1] + ', "vocab_size": 61}', encoding="utf-8")
    assert not parcompile.check(spec, estimate=False).errors


def test_two_names_of_a_key_may_say_the_same() -> None:
    table = parameter_table(shape_from_config({"model_type": "gpt2", **GPT}))
    both = parameter_table(shape_from_config({"model_type": "gpt2", **GPT, "num_hidden_layers": 2, "hidden_size": 32}))
    assert list(both.expanded()) == list(table.expanded())


def test_sections_are_mappings_or_nothing_where_a_type_reads_them() -> None:
    config = {**EXPERTS, "model_type": "minimax_m3_vl_text", "num_local_experts": 4}
    for nothing in (None, False, [], {}):
        shape_from_config({**config, "sparse_attention_config": nothing})
    shape_from_config({**SMALL, "model_type": "llama", "sparse_attention_config": "none"})
    with pytest.raises(ModelConfigError, match="linear_attn_config is 7: it has to be a mapping"):
        shape_from_config({**SMALL, "model_type": "kimi_linear", "linear_attn_config": 7})


def test_of_two_names_of_the_experts_neither_is_taken_for_right() -> None:
    config = {**EXPERTS, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 4}
    with pytest.raises(ModelConfigError, match="n_routed_experts 8 and num_local_experts 2 are the same key"):
        shape_from_config({**config, "num_local_experts": 2})
