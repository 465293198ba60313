"""The compiler's parameter tables are those of the models that transformers builds: names, order and shapes."""

from __future__ import annotations

import pytest
import torch

from parcompile.model.hf_config import FAMILIES, shape_from_config
from parcompile.model.parameters import parameter_table
from parcompile.model.presets import Preset, presets


def first_of(family: str) -> Preset:
    return next(preset for preset in presets().values() if preset.config["model_type"] == family)


@pytest.mark.parametrize("tied", [None, True, False], ids=["as published", "tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_lists_what_the_model_registers(family: str, tied: bool | None) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = dict(first_of(family).config)
    config["n_layer" if family == "gpt2" else "num_hidden_layers"] = 3
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 1
    if tied is not None:
        config["tie_word_embeddings"] = tied
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**values))
    expected = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    table = parameter_table(shape_from_config(config))
    assert [(name, parameter.shape) for name, parameter in table.expanded()] == expected
    assert table.numel == sum(parameter.numel() for parameter in model.parameters())
