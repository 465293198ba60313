"""Every preset has its published parameter count and compiles on a sensible layout; what usual formulas get wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import shape_from_config
from parcompile.model.presets import find_preset, near_presets, presets
from parcompile.pipeline import compile_file
from parcompile.rules import rule_targets

# nodes of 8 H100s, tp, cp, pp, ep
LAYOUTS = {
    "llama-2-7b": (1, 2, 1, 1, 1),
    "llama-2-13b": (1, 4, 1, 1, 1),
    "llama-2-70b": (4, 8, 1, 1, 1),
    "llama-3-8b": (1, 2, 2, 1, 1),
    "llama-3-70b": (4, 8, 1, 2, 1),
    "llama-3.1-405b": (28, 8, 1, 14, 1),
    "llama-3.2-1b": (1, 1, 1, 1, 1),
    "llama-3.2-3b": (1, 2, 1, 1, 1),
    "mistral-7b": (1, 2, 1, 1, 1),
    "mistral-7b-v0.3": (1, 2, 1, 1, 1),
    "mistral-large-2407": (8, 8, 1, 4, 1),
    "qwen2.5-0.5b": (1, 2, 1, 1, 1),
    "qwen2.5-1.5b": (1, 2, 1, 1, 1),
    "qwen2.5-3b": (1, 2, 1, 1, 1),
    "qwen2.5-7b": (1, 4, 1, 1, 1),
    "qwen2.5-14b": (1, 8, 1, 1, 1),
    "qwen2.5-32b": (2, 8, 1, 1, 1),
    "qwen2.5-72b": (4, 8, 1, 2, 1),
    "qwen3-0.6b": (1, 1, 2, 1, 1),
    "qwen3-4b": (1, 2, 1, 1, 1),
    "qwen3-8b": (1, 2, 2, 1, 1),
    "qwen3-14b": (1, 4, 1, 1, 1),
    "qwen3-32b": (2, 8, 1, 1, 1),
    "qwen3-30b-a3b": (2, 2, 1, 1, 8),
    "qwen3-235b-a22b": (8, 4, 1, 2, 8),
    "gemma-2b": (1, 1, 1, 1, 1),
    "gemma-7b": (1, 2, 1, 1, 1),
    "gemma-2-9b": (1, 4, 1, 1, 1),
    "gemma-2-27b": (2, 8, 1, 1, 1),
    "mixtral-8x7b": (4, 4, 1, 1, 8),
    "mixtral-8x22b": (8, 8, 1, 4, 2),
    "gpt-neox-20b": (1, 8, 1, 1, 1),
    "pythia-6.9b": (1, 2, 1, 1, 1),
    "pythia-12b": (1, 4, 1, 1, 1),
    "gpt2": (1, 4, 1, 1, 1),
    "gpt2-medium": (1, 4, 1, 1, 1),
    "gpt2-large": (1, 4, 1, 1, 1),
    "gpt2-xl": (1, 1, 1, 1, 1),
    "deepseek-v3": (64, 8, 1, 1, 32),
    "llama-3.1-8b": (1, 2, 2, 1, 1),
    "llama-3.1-70b": (4, 8, 1, 2, 1),
    "llama-3.3-70b": (4, 8, 1, 2, 1),
    "mistral-nemo-12b": (1, 4, 1, 1, 1),
    "mistral-small-24b": (2, 8, 1, 1, 1),
    "qwen3-1.7b": (1, 1, 2, 1, 1),
    "gemma-3-1b": (1, 1, 1, 1, 1),
    "gemma-3-4b": (1, 2, 1, 1, 1),
    "gemma-3-12b": (1, 4, 1, 1, 1),
    "gemma-3-27b": (2, 8, 1, 1, 1),
    "phi-4": (1, 2, 1, 1, 1),
    "glm-4.5-air": (8, 8, 1, 1, 8),
    "glm-4.5": (32, 8, 1, 2, 8),
    "kimi-k2": (128, 8, 1, 1, 32),
    "gpt-oss-20b": (2, 4, 1, 1, 4),
    "gpt-oss-120b": (8, 8, 1, 1, 8),
    "qwen3-coder-480b-a35b": (32, 8, 1, 2, 8),
    "qwen3-next-80b-a3b": (8, 4, 1, 1, 8),
    "qwen3.5-27b": (2, 8, 1, 1, 1),
    "qwen3.5-35b-a3b": (4, 4, 1, 1, 8),
    "qwen3.5-122b-a10b": (8, 8, 1, 1, 8),
    "qwen3.5-397b-a17b": (32, 8, 1, 2, 8),
    "deepseek-v3.2": (64, 8, 1, 1, 32),
    "glm-5": (64, 8, 1, 2, 32),
    "glm-5.2": (64, 8, 1, 1, 32),
    "gemma-4-26b-a4b": (2, 2, 1, 1, 8),
    "nemotron-h-56b": (8, 8, 1, 2, 1),
    "nemotron-3-nano-30b-a3b": (4, 4, 1, 1, 8),
    "llama-4-scout": (16, 8, 1, 2, 1),
    "llama-4-maverick": (64, 8, 1, 16, 1),
    "mimo-v2-flash": (32, 8, 1, 2, 8),
    "minimax-m2.5": (16, 8, 1, 1, 16),
    "mamba-130m": (1, 1, 2, 1, 1),
    "mamba-370m": (1, 2, 1, 1, 1),
    "mamba-790m": (1, 2, 2, 1, 1),
    "mamba-1.4b": (1, 2, 1, 2, 1),
    "mamba-2.8b": (1, 8, 1, 1, 1),
}


def spec_of(name: str, nodes: int, tp: int, cp: int, pp: int, ep: int, **training: Any) -> dict[str, Any]:
    shape = shape_from_config(presets()[name].config)
    length = min(shape.max_position_embeddings or 4096, 4096)
    dp = nodes * 8 // (tp * cp * pp)
    return {
        "version": 1,
        "model": {"preset": name},
        "cluster": {"nodes": nodes, "gpus_per_node": 8, "accelerator": "h100-sxm"},
        "parallelism": {"tp": tp, "cp": cp, "pp": pp, "ep": ep},
        "training": {
            "sequence_length": length,
            "global_batch_size": dp * pp * 4,
            "micro_batch_size": 1,
            **({"gradient_accumulation_dtype": "fp32"} if pp > 1 else {}),
            **training,
        },
    }


def compiled(tree: dict[str, Any], folder: Any) -> Any:
    file = folder / "spec.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    return compile_file(file, rule_targets((), estimate=False))


def test_every_preset_has_a_layout() -> None:
    assert set(LAYOUTS) == set(presets())
    assert len(LAYOUTS) == 76


@pytest.mark.parametrize("name", LAYOUTS)
def test_preset_has_exactly_its_parameters(name: str) -> None:
    preset = presets()[name]
    assert parameter_table(shape_from_config(preset.config)).numel == preset.parameters


PLAIN_ATTENTION = {
    *("gemma-2-9b", "gemma-2-27b"),  # scores with a soft-cap
    "gemma-4-26b-a4b",  # heads of 512 features
    *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),  # attention dropout
    *("deepseek-v3.2", "glm-5", "glm-5.2"),  # keys that are chosen for each query
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_preset_compiles(name: str, tmp_path) -> None:
    plan, checked = compiled(spec_of(name, *LAYOUTS[name]), tmp_path)
    assert plan is not None, [one.message for one in checked.diagnostics if one.is_error]
    # What the runtime does not execute may be warned of, and experts that are exchanged between nodes (W013).
    warned = {one.code for one in checked.diagnostics if one.severity.value == "warning"}
    assert warned <= {"X002", "X004", "W013", "T013"}
    assert ("T013" in warned) == (name in PLAIN_ATTENTION)


def test_hugging_face_names_are_presets_too() -> None:
    for preset in presets().values():
        assert find_preset(preset.hf_name) == preset
        assert find_preset(preset.hf_name.upper()) == preset


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gemma3", ("gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b")),
        ("meta-llama/Llama-3.1-8B-Instruct", ("llama-3.1-8b",)),
        ("unsloth/Meta-Something", ()),
        ("gpt-oss", ("gpt-oss-20b", "gpt-oss-120b")),
        ("Phi4", ("phi-4",)),
        ("DeepSeek-V3.1", ("deepseek-v3",)),
        ("NousResearch/Hermes-3-Llama-3.1-8B", ("llama-3.1-8b",)),
    ],
)
def test_a_name_that_is_nearly_a_preset_means_it(written: str, meant: tuple[str, ...], tmp_path) -> None:
    assert near_presets(written) == meant
    tree = spec_of("llama-3-8b", 1, 2, 1, 1, 1)
    tree["model"] = {"preset": written}
    _, checked = compiled(tree, tmp_path)
    found = next(one for one in checked.diagnostics if one.code == "S003")
    assert all(name in found.help for name in meant)
    assert ("hf_config" in found.help) is ("/" in written or len(meant) != 1)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "qwen3-32b", "gemma-7b", "gemma-2-27b"])
def test_head_dim_is_not_hidden_size_over_heads(name: str) -> None:
    shape = shape_from_config(presets()[name].config)
    assert shape.head_dim != shape.hidden_size // shape.num_attention_heads
    table = {parameter.name: parameter.shape for parameter in parameter_table(shape)}
    width = shape.num_attention_heads * shape.head_dim
    assert table["model.layers.{layer}.self_attn.q_proj.weight"] == (width, shape.hidden_size)
    assert table["model.layers.{layer}.self_attn.o_proj.weight"] == (shape.hidden_size, width)


@pytest.mark.parametrize(("kv_heads", "replicas"), [(1, 8), (2, 4), (4, 2)])
def test_few_kv_heads_are_replicated_on_tp_8(kv_heads: int, replicas: int, tmp_path) -> None:
    tree = spec_of("llama-3-8b", 1, 8, 1, 1, 1)
    tree["model"] = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 2816,
        "vocab_size": 32768,
        "max_position_embeddings": 8192,
    }
    plan, checked = compiled(tree, tmp_path)
    assert plan is not None
    assert plan.kv_replicas == replicas
    remark = next(one for one in checked.diagnostics if one.code == "T003")
    assert remark.message == f"num_key_value_heads {kv_heads} < tp 8: each kv head is held by {replicas} ranks"


def test_vocabulary_of_gpt2_is_padded_for_each_tp(tmp_path) -> None:
    sizes = {}
    for tp in (1, 2, 4, 8):
        tree = spec_of("gpt2-medium", 1, tp, 1, 1, 1)
        plan, checked = compiled(tree, tmp_path)
        assert plan is not None
        embedding = plan.tensors()[plan.parameters.before[0]][1]
        sizes[tp] = embedding.full_shape[0]
        assert any(f"padded to {sizes[tp]}" in one.message for one in checked.diagnostics)
    assert sizes == {1: 50304, 2: 50432, 4: 50688, 8: 51200}


def test_126_layers_do_not_divide_over_16_stages(tmp_path) -> None:
    plan, checked = compiled(spec_of("llama-3.1-405b", 32, 8, 1, 16, 1), tmp_path)
    assert plan is None
    (error,) = [one for one in checked.diagnostics if one.is_error]
    assert error.code == "L001"
    assert "126 / 16 is not whole; nearest: 14, 18" in error.message
    assert "(126 + 2) / 16 = 8" in (error.help or "")
    assert error.fixes[0].title == (
        "set account_for_embedding_in_pipeline_split to true and account_for_loss_in_pipeline_split to true"
    )


def test_25_heads_take_tp_5_only(tmp_path) -> None:
    plan, checked = compiled(spec_of("gpt2-xl", 1, 8, 1, 1, 1), tmp_path)
    assert plan is None
    (error,) = [one for one in checked.diagnostics if one.is_error]
    assert (error.code, error.path) == ("T001", ("parallelism", "tp"))
    assert "25 / 8 is not whole; nearest tp: 1, 5" in error.message
