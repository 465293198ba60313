"""The compiler's parameter tables are those of the models that transformers builds: names, order and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, tiny_config

from parcompile.model.hf_config import shape_from_config
from parcompile.model.parameters import parameter_table
from parcompile.model.presets import Preset, presets

LATENT = tuple(name for name, family in FAMILIES.items() if family.latent)
SWITCHES = ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "attention_out_bias", "qk_layernorm", "use_qk_norm")
REQUIRED = ("model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")


def registered(config: dict[str, Any]) -> tuple[list[tuple[str, tuple[int, ...]]], Any]:
    """Names and shapes of the model's parameters, and its configuration."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**values))
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()], model.config


def check(config: dict[str, Any]) -> None:
    expected, _ = registered(config)
    table = parameter_table(shape_from_config(config))
    assert [(name, parameter.shape) for name, parameter in table.expanded()] == expected
    assert table.numel == sum(torch.Size(shape).numel() for _, shape in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_lists_what_the_model_registers(family: str) -> None:
    for tied in (None, True, False):
        check(tiny_config(family, **({} if tied is None else {"tie_word_embeddings": tied})))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt2", *LATENT)])
def test_a_table_follows_the_switches_of_the_configuration(family: str) -> None:
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[family]().to_dict()
    for switch in SWITCHES:
        if switch in known:
            # InternLM3 has one bias switch, which its configuration calls by two names.
            names = ("attention_bias", "mlp_bias") if family == "internlm3" else (switch,)
            check(tiny_config(family, **dict.fromkeys(names, True)))
            check(tiny_config(family, **dict.fromkeys(names, False)))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt2", *LATENT)])
def test_what_a_configuration_leaves_out_has_the_default_of_its_class(family: str) -> None:
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[family]()
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
    config.update({"head_dim": width} if family in ("ministral", "hunyuan_v1_dense") else {})
    config.update({"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2} if family == "dots1" else {})
    config.update({"num_key_value_heads": 8} if family == "nemotron" else {})
    check({**config, "pad_token_id": None})
    built = registered({**config, "pad_token_id": None})[1]
    window = getattr(built, "sliding_window", None) if getattr(built, "use_sliding_window", True) else None
    assert shape_from_config(config).sliding_window == window


def published() -> list[Preset]:
    """The first preset of each family that has one."""
    found: dict[str, Preset] = {}
    for preset in presets().values():
        found.setdefault(preset.config["model_type"], preset)
    return list(found.values())


@pytest.mark.parametrize("preset", published(), ids=lambda preset: preset.name)
def test_a_table_lists_what_a_published_model_registers(preset: Preset) -> None:
    config = dict(preset.config)
    config["n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"] = 3
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    check(config)
