"""The compiler's parameter tables are those of the models that transformers builds: names, order and shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES, OWN_KEYS, TWO_ROPES, VARIANTS, tiny_config
from huggingface_hub.errors import StrictDataclassFieldValidationError

from parcompile.cost.memory import registered_bytes
from parcompile.cost.workload import Workload
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import Preset, presets
from parcompile.model.tables import alias_of
from parcompile.runtime.model.text_head import causal_model

LATENT = tuple(name for name, family in FAMILIES.items() if family.latent)
SWITCHES = ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "attention_out_bias", "qk_layernorm", "use_qk_norm")
NEVER_TIED = ("kimi_linear", "bailing_hybrid", "muse_spark_text")
ALWAYS_TIED = ("zamba2", "zamba2, 2 groups")
"""Refused otherwise: their shared blocks are tied with the head or not at all."""
REFUSED = (("stablelm", "qk_layernorm"),)
NO_LISTS_OF_LAYERS = ("time_step_limit", "mlp_multipliers", "attn_layer_indices", "attention_types")
REQUIRED = ("model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")


def built(config: dict[str, Any]) -> Any:
    """The model, on meta."""
    from transformers import CONFIG_MAPPING

    values = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
    with torch.device("meta"):
        return causal_model(CONFIG_MAPPING[config["model_type"]](**values))


def registered(config: dict[str, Any]) -> tuple[list[tuple[str, tuple[int, ...]]], Any]:
    """Names and shapes of the model's parameters, and its configuration."""
    model = built(config)
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()], model.config


def check(config: dict[str, Any]) -> None:
    expected, _ = registered(config)
    table = parameter_table(shape_from_config(config))
    assert [(name, parameter.shape) for name, parameter in table.expanded()] == expected
    assert table.numel == sum(torch.Size(shape).numel() for _, shape in expected)


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_a_table_lists_what_the_model_registers(family: str) -> None:
    for tied in (
        (None, False) if family in NEVER_TIED else (None, True) if family in ALWAYS_TIED else (None, True, False)
    ):
        check(tiny_config(family, **({} if tied is None else {"tie_word_embeddings": tied})))


ROTARY_TABLES = ("gptj", "codegen")
"""They register tables of rotary positions, of a few features: too small to be counted."""


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ROTARY_TABLES])
def test_masks_and_tables_of_positions_are_counted_that_a_class_registers(family: str) -> None:
    def bytes_of(positions: int) -> tuple[int, float]:
        key = FAMILIES[family].keys.get("max_position_embeddings") or "max_position_embeddings"
        config = tiny_config(family, **{key: positions})
        model = built(config)
        tables = (one for one in model.buffers() if one.dtype != torch.int64)
        work = Workload(shape_from_config(config), 1, 1, "h200", 64, 1, 1, element_bytes=4)
        return sum(one.nbytes for one in tables), registered_bytes(work, work.stages[0])

    (few, counted_few), (many, counted_many) = bytes_of(512), bytes_of(2048)
    assert many - few == counted_many - counted_few


def deep(family: str, layers: int) -> dict[str, Any]:
    """A configuration of so many layers: what it lists for each begins again."""
    config = tiny_config(family)
    key = FAMILIES[family].keys.get("num_hidden_layers") or "num_hidden_layers"
    before = config.get(key)
    for name, value in config.items():
        if isinstance(value, list) and len(value) == before and name not in NO_LISTS_OF_LAYERS:
            config[name] = (value * layers)[:layers]
    return {**config, key: layers, **({"attention_types": [[["global"], layers]]} if family == "gpt_neo" else {})}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_lists_the_parameters_of_many_layers(family: str) -> None:
    check(deep(family, 9))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*OWN_KEYS, *LATENT)])
def test_a_table_follows_the_switches_of_the_configuration(family: str) -> None:
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[family]().to_dict()
    for switch in SWITCHES:
        if switch in known and (family, switch) not in REFUSED:
            # InternLM3 has one bias switch, which its configuration calls by two names.
            names = ("attention_bias", "mlp_bias") if family == "internlm3" else (switch,)
            check(tiny_config(family, **dict.fromkeys(names, True)))
            check(tiny_config(family, **dict.fromkeys(names, False)))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*OWN_KEYS, *LATENT)])
def test_what_a_configuration_leaves_out_has_the_default_of_its_class(family: str) -> None:
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[family]()
    default.allow_global_per_layer_attribute_access = True
    width = getattr(default, "head_dim", None) or default.hidden_size // default.num_attention_heads
    config = {
        "model_type": family,
        "hidden_size": default.num_attention_heads * width,
        "num_attention_heads": default.num_attention_heads,
        "num_hidden_layers": 1,
        "intermediate_size": 48,
        "vocab_size": 61,
        "max_position_embeddings": 64,
    }
    # These classes' own default, None, does not build.
    config.update({"head_dim": width} if family in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe") else {})
    config.update({"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2} if family == "dots1" else {})
    config.update({"mlp_layer_types": ["sparse"], "num_experts_per_tok": 2} if family == "deepseek_ocr2_text" else {})
    config.update({"num_key_value_heads": 8} if family == "nemotron" else {})
    config.update({"rope_parameters": TWO_ROPES} if family == "cohere_compass_text" else {})
    config.update({"layer_types": ["conv"]} if family == "lfm2_moe" else {})
    config.update({"num_kv_shared_layers": 0} if family == "gemma3n_text" else {})  # of one layer none can share
    config.update({"num_hidden_layers": 2} if family == "olmo_hybrid" else {})
    config.update({"num_hidden_layers": {"nemotron_h": 4, "zamba2": 54}.get(family, config["num_hidden_layers"])})
    check({**config, "pad_token_id": None})
    built = registered({**config, "pad_token_id": None})[1]
    window = getattr(built, "sliding_window", None) if getattr(built, "use_sliding_window", True) else None
    if family in ("gemma4_text", "gemma4_unified_text", "mimo_v2_flash"):
        window = None  # their only layer is a full one
    assert shape_from_config(config).attention.sliding_window == window


_EVERY_EIGHTH = [*(["linear_attention"] * 7), "full_attention"]
PUBLISHED_HYBRIDS: dict[str, dict[str, Any]] = {
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": {
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 163840,
        "model_max_length": 1048576,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 72,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [one for one in range(1, 27) if one % 4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "inclusionAI/Ling-3.0-Flash": {
        "model_type": "bailing_hybrid",
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "vocab_size": 157184,
        "max_position_embeddings": 262144,
    },
    "MiniMaxAI/MiniMax-Text-01-hf": {
        "model_type": "minimax",
        "hidden_size": 6144,
        "intermediate_size": 9216,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 200064,
        "max_position_embeddings": 10240000,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "block_size": 256,
        "layer_types": _EVERY_EIGHTH * 10,
        "linear_attn_alpha_factor": 3.5565588200778455,
        "pad_token_id": None,
    },
    "allenai/Olmo-Hybrid-7B": {
        "model_type": "olmo_hybrid",
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "vocab_size": 100352,
        "max_position_embeddings": 65536,
    },
}


@pytest.mark.parametrize("name", PUBLISHED_HYBRIDS)
def test_a_table_lists_what_published_hybrids_register(name: str) -> None:
    check(PUBLISHED_HYBRIDS[name])


_SIZES_OF_OLMO = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def published() -> list[Preset]:
    """The first preset of each family that has one."""
    found: dict[str, Preset] = {}
    for preset in presets().values():
        found.setdefault(preset.config["model_type"], preset)
    return list(found.values())


@pytest.mark.parametrize("preset", published(), ids=lambda preset: preset.name)
def test_a_table_lists_what_a_published_model_registers(preset: Preset) -> None:
    config = dict(preset.config)
    layers = config.get("num_hidden_layers")
    # What says each layer's kind begins with all kinds within ten layers.
    of_layers = [key for key, value in config.items() if isinstance(value, list | str) and len(value) == layers]
    fewer = 10 if of_layers else 3
    config["n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"] = fewer
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    check({**config, **{key: config[key][:fewer] for key in of_layers}})


WITHOUT_PRESETS: dict[str, dict[str, Any]] = {
    "codegen-350M": {
        "model_type": "codegen",
        "vocab_size": 51200,
        "n_positions": 2048,
        "n_ctx": 2048,
        "n_embd": 1024,
        "n_layer": 20,
        "n_head": 16,
        "rotary_dim": 32,
        "n_inner": None,
        "tie_word_embeddings": False,
    },
    "gpt-neox-japanese-2.7b": {
        "model_type": "gpt_neox_japanese",
        "vocab_size": 32000,
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_multiple_size": 4,
        "rotary_pct": 1.0,
        "rotary_emb_base": 10000,
        "max_position_embeddings": 2048,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.1,
    },
    "openai-gpt": {
        "model_type": "openai-gpt",
        "vocab_size": 40478,
        "n_positions": 512,
        "n_ctx": 512,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "afn": "gelu",
    },
    "ctrl": {
        "model_type": "ctrl",
        "vocab_size": 246534,
        "n_positions": 50000,
        "n_ctx": 512,
        "n_embd": 1280,
        "n_layer": 48,
        "n_head": 16,
        "dff": 8192,
        "from_tf": False,
    },
    "ettin-decoder-17m": {
        "model_type": "modernbert-decoder",
        "vocab_size": 50368,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "local_attention": 128,
        "norm_bias": False,
        "global_attn_every_n_layers": 3,
        "max_position_embeddings": 7999,
        "decoder_bias": True,
        "tie_word_embeddings": True,
        "classifier_bias": False,
        "mlp_bias": False,
        "pad_token_id": 50283,
    },
    # Mistral Small 4 119B, as its class has it.
    "mistral4": {
        "model_type": "mistral4",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 128,
        "qk_head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 1048576,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "partial_rotary_factor": 0.5,
            "llama_4_scaling_beta": 0.1,
        },
    },
}
"""Dimensions as they are published, of types without a preset; the layers are as many."""


_MISTRAL4_ROPE = WITHOUT_PRESETS["mistral4"]["rope_parameters"]


@pytest.mark.parametrize("name", WITHOUT_PRESETS)
def test_a_table_lists_what_a_model_registers_that_is_published_and_no_preset(name: str) -> None:
    check(WITHOUT_PRESETS[name])
    built, shape = registered(WITHOUT_PRESETS[name])[1], shape_from_config(WITHOUT_PRESETS[name])
    assert shape.attention.sliding_window == getattr(built, "sliding_window", None)
    assert shape.max_position_embeddings == built.max_position_embeddings


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("codegen", {"num_attention_heads": 2}, "n_head"),
        ("gpt_neox_japanese", {"intermediate_multiple_size": 0}, "intermediate_multiple_size"),
        ("modernbert-decoder", {"local_attention": 1}, "local_attention"),
        ("diffllama", {"num_key_value_heads": 1}, "num_key_value_heads"),
        ("diffllama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("mistral4", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        ("mistral4", {"rope_parameters": {**_MISTRAL4_ROPE, "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ("mistral4", {"rope_parameters": {**_MISTRAL4_ROPE, "rope_type": "default"}}, "rope_parameters"),
    ],
)
def test_what_a_family_cannot_be_told_from_names_its_key(family: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError, match=f"^{key}: ") as caught:
        shape_from_config(tiny_config(family, **changes))
    assert caught.value.key == key


ALTERNATING = [
    ("llama4_text", {"interleave_moe_layer_step": 2, "no_rope_layers": None}, [1, 3, 5]),
    ("llama4_text", {"moe_layers": [0, 4, 5], "no_rope_layers": None}, [0, 4, 5]),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
    ("qwen3_moe", {"decoder_sparse_step": 3}, [2, 5]),
    (
        "qwen3_next",
        {"mlp_only_layers": [1, 4], "layer_types": ["linear_attention", "full_attention"] * 3},
        [0, 2, 3, 5],
    ),
    ("flint", {"mlp_only_layers": None, "layer_types": None, "decoder_sparse_step": 2}, [3, 5]),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": 4}, [1, 3]),
    ("ernie4_5_moe", {"moe_layer_start_index": 5, "moe_layer_end_index": 3}, []),
    ("axk1", {"mlp_layer_types": None, "moe_layer_freq": 2, "first_k_dense_replace": 1}, [2, 4]),
    ("axk2", {"mlp_layer_types": None, "moe_layer_freq": 2, "first_k_dense_replace": 1}, [2, 4]),
    ("exaone_moe", {"layer_types": None, "mlp_layer_types": ["sparse", "dense", "sparse"] * 2}, [0, 2, 3, 5]),
]


@pytest.mark.parametrize(("family", "changes", "routed"), ALTERNATING)
def test_dense_layers_may_stand_between_those_with_experts(
    family: str, changes: dict[str, Any], routed: list[int]
) -> None:
    config = tiny_config(family, **{"num_hidden_layers": 6, **changes})
    check(config)
    shape = shape_from_config(config)
    assert [layer for layer in range(6) if shape.routed(range(layer, layer + 1))] == routed


NULLS = {
    "cohere": ("use_qk_norm",),
    "ernie4_5": ("use_bias",),
    "ernie4_5_moe": ("use_bias",),
    "falcon": ("alibi", "bias"),
    "bamba": ("mamba_conv_bias", "mamba_proj_bias"),
    "falcon_h1": ("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "projectors_bias"),
    "granitemoehybrid": ("mamba_conv_bias", "mamba_proj_bias"),
}


@pytest.mark.parametrize(("family", "key"), [(name, key) for name, keys in NULLS.items() for key in keys])
def test_a_switch_whose_null_transformers_takes_is_off(family: str, key: str) -> None:
    check({**tiny_config(family), key: None})


@pytest.mark.parametrize(
    ("family", "key"), [("llama", "attention_bias"), ("qwen3_next", "tie_word_embeddings"), ("nemotron_h", "use_bias")]
)
def test_a_null_that_transformers_refuses_is_refused_by_its_key(family: str, key: str) -> None:
    config = {**tiny_config(family), key: None}
    with pytest.raises(StrictDataclassFieldValidationError, match=key):
        registered(config)
    with pytest.raises(ModelConfigError, match=f"^{key} is null, which transformers refuses") as caught:
        shape_from_config(config)
    assert caught.value.key == key


LEFT_OUT = {
    "llama": ("head_dim", "mlp_bias", "pretraining_tp"),
    "mistral": ("head_dim",),
    "qwen2": ("layer_types",),
    "qwen3": ("layer_types",),
    # Qwen3 Coder leaves two out, which have the values of the class.
    "qwen3_moe": ("attention_bias", "bos_token_id"),
    "gemma": ("use_bidirectional_attention",),
    "gemma2": ("layer_types", "use_bidirectional_attention"),
    "mixtral": ("head_dim", "router_jitter_noise"),
    # The published names of the two dropouts are not read; both are 0, as the class has them.
    "gpt_neox": ("attention_bias", "attention_dropout", "hidden_dropout", "classifier_dropout", "is_decoder"),
    "gpt2": (
        *("n_inner", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
        *("add_cross_attention", "tie_word_embeddings"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ),
    "deepseek_v3": (
        *("head_dim", "qk_head_dim", "rope_interleave", "pretraining_tp", "output_router_logits"),
        "num_nextn_predict_layers",
    ),
    "gemma3_text": ("_sliding_window_pattern", "layer_types", "use_bidirectional_attention"),
    "phi3": (),
    "glm4_moe": ("num_nextn_predict_layers", "output_router_logits", "bos_token_id"),
    "gpt_oss": ("swiglu_alpha", "bos_token_id"),
    "qwen3_next": ("attention_bias", "layer_types"),
    "qwen3_5_text": ("bos_token_id",),
    "qwen3_5_moe_text": ("bos_token_id", "output_router_logits"),
    "deepseek_v32": (
        *("head_dim", "qk_head_dim", "layer_types", "mlp_layer_types", "mlp_bias", "output_router_logits"),
        "num_nextn_predict_layers",
    ),
    "glm_moe_dsa": (
        *("layer_types", "mlp_layer_types", "indexer_types", "mlp_bias", "output_router_logits", "bos_token_id"),
        "num_nextn_predict_layers",
    ),
    "gemma4_text": ("per_layer_config",),
    "mamba": ("use_mambapy", "use_associative_scan", "tie_word_embeddings"),
    "nemotron_h": (
        *("layers_block_type", "mtp_layers_block_type", "num_nextn_predict_layers", "time_step_limit"),
        *("mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep", "output_router_logits"),
        # Of experts, which Nemotron-H 56B has not; its width of a head has another name, and the value of the class.
        *("moe_latent_size", "moe_shared_expert_overlap", "moe_intermediate_size", "norm_topk_prob"),
        *("moe_shared_expert_intermediate_size", "n_group", "topk_group", "routed_scaling_factor"),
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "head_dim"),
    ),
    "llama4_text": (
        *("layer_types", "moe_layers", "no_rope_layers", "no_rope_layer_interval", "router_jitter_noise"),
        *("attn_scale", "attn_temperature_tuning", "floor_scale", "initializer_range"),
        *("bos_token_id", "eos_token_id"),
    ),
    "mimo_v2_flash": (
        *("layer_types", "mlp_layer_types", "rms_norm_eps", "initializer_range", "output_router_logits"),
        *("bos_token_id", "eos_token_id"),
    ),
    "minimax_m2": (
        *("attention_dropout", "initializer_range", "output_router_logits", "router_aux_loss_coef"),
        *("router_jitter_noise", "bos_token_id", "eos_token_id"),
    ),
}
"""What published configurations leave to the class: derived keys, later keys whose default is the published behaviour,
and keys that no causal model reads."""


@pytest.mark.parametrize("name", presets())
def test_a_preset_states_every_key_that_its_class_reads(name: str) -> None:
    from transformers import CONFIG_MAPPING, PretrainedConfig

    preset = presets()[name]
    stated = copy.deepcopy(dict(preset.config))
    config = CONFIG_MAPPING[stated.pop("model_type")](**stated)
    read = config.to_dict().keys() - PretrainedConfig().to_dict().keys() - {"use_cache", "pad_token_id"}
    names = {config.attribute_map.get(key, key) for key in stated}
    if {"rope_theta", "rotary_emb_base"} & stated.keys():
        names.add("rope_parameters")
    assert read - names <= set(LEFT_OUT[preset.config["model_type"]])
    assert preset.source.startswith(f"https://huggingface.co/{preset.hf_name}/")


NOT_ROTARY = {"gpt2", "nemotron_h", "mamba"}


@pytest.mark.parametrize("family", sorted({preset.config["model_type"] for preset in presets().values()} - NOT_ROTARY))
def test_presets_of_rotary_models_state_the_base_and_the_scaling(family: str) -> None:
    """Without scaling the published file says null, or its release is older than the key."""
    of_family = [preset.config for preset in presets().values() if preset.config["model_type"] == family]
    bases = ("rope_theta", "rotary_emb_base", "rope_parameters")
    assert all(any(config.get(key) for key in bases) for config in of_family)
    kinds = {preset.name: (preset.config.get("rope_scaling") or {}) for preset in presets().values()}
    assert {name for name, scaling in kinds.items() if scaling} == {
        *("llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"),
        *("llama-3.1-8b", "llama-3.1-70b", "llama-3.3-70b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "kimi-k2"),
        *("deepseek-v3.2", "llama-4-scout"),
    }


GEMMA4_SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "26B, 4B active": (
        25_233_141_760,
        {
            "hidden_size": 2816,
            "num_hidden_layers": 30,
            "intermediate_size": 2112,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
    "31B": (
        30_697_345_280,
        {
            "hidden_size": 5376,
            "num_hidden_layers": 60,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "E2B": (
        4_628_569_344,
        {
            "hidden_size": 1536,
            "num_hidden_layers": 35,
            "intermediate_size": 6144,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
    ),
}
"""Configurations of the sizes in which Gemma 4 is published, and their parameters."""


@pytest.mark.parametrize("size", GEMMA4_SIZES)
def test_a_table_lists_what_a_gemma_4_of_a_published_size_registers(size: str) -> None:
    numel, config = GEMMA4_SIZES[size]
    check({"model_type": "gemma4_text", **config})
    assert parameter_table(shape_from_config({"model_type": "gemma4_text", **config})).numel == numel


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("exaone_moe", {"mlp_layer_types": ["sparse", "sparse"]}),
        ("exaone_moe", {"mlp_layer_types": ["dense", "sparse"], "first_k_dense_replace": 0}),
        ("mellum", {"mlp_layer_types": ["dense", "sparse"]}),
        ("mellum", {"mlp_layer_types": ["sparse", "sparse"]}),
    ],
)
def test_a_list_of_layers_says_which_have_experts(family: str, changes: dict[str, Any]) -> None:
    check(tiny_config(family, **changes))


def test_solar_open_needs_no_width_of_dense_layers() -> None:
    config = tiny_config("solar_open")
    del config["intermediate_size"]
    check(config)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("helium", {"head_dim": 16}, "num_attention_heads 4 x head_dim 16 = 64 is not hidden_size 32"),
        ("olmoe", {"head_dim": 16}, "num_attention_heads 4 x head_dim 16 = 64 is not hidden_size 32"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts is 0: transformers builds a shared expert of width 0"),
        ("exaone_moe", {"num_shared_experts": 0}, "num_shared_experts is 0: transformers builds a shared expert"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: it makes the model a decoder behind an encoder"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm: a LayerNorm of its own for each head is not described"),
        ("gemma3n_text", {"altup_correct_scale": False}, "altup_correct_scale: without it transformers keeps"),
        ("gemma3n_text", {"intermediate_size": [48, 40]}, "intermediate_size has 2 entries for 4 layers"),
        ("gemma3n_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers 3 of 4 layers: the 1 layers before"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads is 4, which transformers does not"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [1, 0, 1, 0]}, "hybrid_layer_pattern is [1, 0, 1, 0], which"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, 'use_bidirectional_attention: with "all" every token'),
        ("gemma4_text", {"vocab_size_per_layer_input": 60}, "vocab_size_per_layer_input: it is less than vocab_size"),
        ("gemma4_text", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}, "num_kv_shared_layers: transfo"),
        ("gemma4_text", {"num_kv_shared_layers": 7}, "num_kv_shared_layers 7 of 8 layers: the 1 layers before them"),
        ("gemma4_text", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 8 layers"),
        (
            "gemma4_text",
            {"per_layer_config": {"1": {"intermediate_size": 7}}},
            "per_layer_config gives layer 1 int",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {"1": {"head_dim": 16}}},
            "per_layer_config gives layers 1 and 3",
        ),
        ("gemma4_text", {"global_head_dim": 0}, "global_head_dim gives layer 1 head_dim 0: it has"),
        ("laguna", {"num_attention_heads_per_layer": [4, 8]}, "num_attention_heads_per_layer: layers with different"),
        (
            "muse_glimmer_text",
            {"layer_rope_theta": [10000.0]},
            "layer_rope_theta has 1 entries for 2 layers: write one",
        ),
        ("muse_glimmer_text", {"layer_rope_theta": [50.0, 0]}, "layer_rope_theta: transformers reads of an entry only"),
        ("muse_glimmer_text", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: the kinds of"),
        ("muse_glimmer_text", {"sliding_window": None}, "sliding_window: transformers builds a mask of the window"),
        ("muse_glimmer_text", {"attention_dropout": None}, "attention_dropout: transformers' attention takes no null"),
        (
            "muse_glimmer_text",
            {"final_logit_softcapping": 0.0},
            "final_logit_softcapping is 0.0: it has to be more than 0",
        ),
        ("muse_spark_text", {"layer_rope_theta": [50.0, 0]}, "layer_rope_theta: transformers reads of an entry only"),
        ("muse_spark_text", {"tie_word_embeddings": True}, "tie_word_embeddings: transformers ties no weights of this"),
        ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse"]}, "layer_types: minimax_m3_spa"),
        (
            "kimi_linear",
            {"tie_word_embeddings": True},
            "tie_word_embeddings: transformers ties no weights of this type",
        ),
        (
            "kimi_linear",
            {"n_shared_experts": 3},
            "num_shared_experts 2 and n_shared_experts 3 are the same key, and differ",
        ),
        ("bailing_hybrid", {"q_lora_rank": 12}, "q_lora_rank: transformers' class projects queries at once"),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}},
            "linear_attn_config: full_attn_layers and kda_layers have to name each of the 2 layers once",
        ),
        ("olmo_hybrid", {"layer_types": ["linear_attention"] * 2}, "layer_types: transformers builds no such model"),
        ("qwen3_moe", {"num_local_experts": 8}, "num_experts 4 and num_local_experts 8 are the same key, and differ"),
    ],
)
def test_what_no_table_describes_is_refused_with_its_reason(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_config(tiny_config(family, **changes))
    assert str(caught.value).startswith(reason)
    assert caught.value.key in changes


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.experts])
def test_the_count_of_experts_has_the_names_that_transformers_reads(family: str) -> None:
    from transformers import CONFIG_MAPPING

    experts = FAMILIES[family].experts
    assert experts is not None
    key, names = experts.count[0], CONFIG_MAPPING[family].attribute_map
    alias = alias_of(family, key)
    assert alias == next((other for pair in names.items() for one, other in (pair, pair[::-1]) if one == key), None)
    if alias:
        config = tiny_config(family)
        check({**{name: value for name, value in config.items() if name != key}, alias: config[key]})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "gemma3n_text",
            {
                "layer_types": None,
                "num_hidden_layers": 11,
                "activation_sparsity_pattern": None,
                "intermediate_size": 48,
            },
        ),
        ("gemma3n_text", {"num_kv_shared_layers": 0, "altup_num_inputs": 2, "laurel_rank": 5}),
        ("mimo_v2_flash", {"layer_types": None, "num_hidden_layers": 13, "mlp_layer_types": None}),
        ("mimo_v2_flash", {"mlp_layer_types": ["sparse"] * 4, "sliding_window_size": 7, "attention_bias": True}),
        ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        ("gemma4_text", {"num_global_key_value_heads": 1}),
        ("gemma4_text", {"use_double_wide_mlp": False, "num_kv_shared_layers": 4}),
        ("gemma4_text", {"layer_types": None, "num_hidden_layers": 13, "num_kv_shared_layers": 5}),
        ("gemma4_text", {"layer_types": ["sliding_attention"] * 8, "num_kv_shared_layers": 0}),
        (
            "gemma4_text",
            {
                "per_layer_config": {
                    layer: {"head_dim": 12, "num_key_value_heads": 1} for layer in ("1", "03", "5", "7")
                }
            },
        ),
        ("gemma4_text", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
        ("gemma4_unified_text", {"attention_k_eq_v": False, "attention_bias": True}),
        ("laguna", {"gating": "per-element"}),
        ("laguna", {"gating": "per-head"}),
        ("hyperclovax", {"use_post_norm": False}),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
        ("cohere2_moe", {"num_shared_experts": 0}),
        ("cohere2_moe", {"mlp_layer_types": None, "layer_types": None, "first_k_dense_replace": 1}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": -1}),
        ("granitemoeshared", {"shared_intermediate_size": 0}),
        ("flint", {"mlp_only_layers": []}),
        ("afmoe", {"num_dense_layers": 0}),
        ("axk1", {"mlp_layer_types": None, "first_k_dense_replace": 0}),
        ("minimax_m3_vl_text", {"mlp_layer_types": None}),
        ("glm4_moe_lite", {"mlp_layer_types": None, "q_lora_rank": None}),
        ("mistral4", {"q_lora_rank": None, "rope_parameters": None}),
        ("mistral4", {"first_k_dense_replace": 0, "attention_bias": True, "tie_word_embeddings": True}),
        ("kimi_linear", {"layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 9, "q_lora_rank": 12}),
        ("kimi_linear", {"linear_attn_config": {"num_heads": 4, "head_dim": 10, "short_conv_kernel_size": 3}}),
        (
            "bailing_hybrid",
            {"layer_types": None, "layer_group_size": 3, "num_hidden_layers": 4, "mlp_layer_types": None},
        ),
        ("bailing_hybrid", {"short_conv_kernel_size": 2, "attention_bias": True}),
        ("minimax", {"layer_types": None, "head_dim": None, "num_hidden_layers": 3}),
        ("olmo_hybrid", {"layer_types": None, "num_hidden_layers": 9, **dict.fromkeys(_SIZES_OF_OLMO)}),
        ("olmo_hybrid", {"layer_types": None, "num_hidden_layers": 3, "linear_value_head_dim": None}),
    ],
)
def test_a_table_follows_what_only_its_family_has(family: str, changes: dict[str, Any]) -> None:
    check(tiny_config(family, **changes))
