"""What the classes of transformers save is read, with the sizes that they have themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from families import tiny_config
from transformers import CONFIG_MAPPING

from parcompile.model.catalogue import RUNTIME_FAMILIES, TEXT_PARTS, model_types
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import text_part
from parcompile.model.shape import ModelShape
from parcompile.pipeline import compile_file
from parcompile.rules import example_spec


def same_sizes(shape: ModelShape, config: Any) -> None:
    assert (shape.hidden_size, shape.vocab_size) == (config.hidden_size, config.vocab_size)
    if shape.num_attention_heads and config.model_type != "dots3_note_text":  # whose layers have others each
        assert shape.num_attention_heads == config.num_attention_heads


def saved(config: Any, *, everything: bool) -> dict[str, Any]:
    """As `save_pretrained` writes it, or with every value of its class."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=not everything))
    return found


def read(config: dict[str, Any]) -> ModelShape:
    return shape_from_config(text_part(config))


@pytest.mark.parametrize("name", sorted(RUNTIME_FAMILIES))
def test_a_saved_configuration_is_the_one_that_it_was_made_of(name: str) -> None:
    config = tiny_config(name)
    made = CONFIG_MAPPING[name](**config)
    for everything in (False, True):
        assert read(saved(made, everything=everything)) == read(config)


UNFINISHED = {
    "deepseek_ocr2_text": "mlp_layer_types",
    "deepseek_v2": "num_experts_per_tok",
    "dots1": "n_shared_experts",
    "glm4_moe": "head_dim is not given",
    "hunyuan_v1_dense": "head_dim",
    "hunyuan_v1_moe": "head_dim",
    "lfm2_moe": "layer_types",
    "ministral": "head_dim",
    "nemotron": "num_key_value_heads",
    "qwen4_exp_text": "indexer_n_heads",
}
"""Classes of whose own values transformers makes no model that computes, and the key that is named."""


@pytest.mark.parametrize("name", sorted(RUNTIME_FAMILIES))
def test_what_a_class_has_of_itself_is_read(name: str) -> None:
    made = CONFIG_MAPPING[name]()
    if name in UNFINISHED:
        with pytest.raises(ModelConfigError, match=UNFINISHED[name]):
            read(saved(made, everything=False))
        return
    same_sizes(read(saved(made, everything=False)), made)


UNFINISHED_TEXT = {
    "deepseek_ocr2": "mlp_layer_types",
    "hunyuan_vl": "head_dim is null",
    "qwen3_omni_moe_thinker": "hidden_size 2048 / num_attention_heads 28 is not whole",
    "qwen4_exp": "indexer_n_heads",
}
"""The same of text parts."""
WITH_TEXT = sorted(name for name in TEXT_PARTS if name in CONFIG_MAPPING and model_types()[name].text_works)


@pytest.mark.parametrize("name", WITH_TEXT)
def test_the_text_part_of_a_saved_configuration_has_the_sizes_of_its_class(name: str) -> None:
    made = CONFIG_MAPPING[name]()
    text = made.get_text_config()
    experts = next(
        (key for key in ("num_local_experts", "num_experts", "n_routed_experts") if hasattr(text, key)), None
    )
    if experts is not None and getattr(text, experts):
        setattr(text, experts, 2 * getattr(text, experts))
    if name in UNFINISHED_TEXT:
        with pytest.raises(ModelConfigError, match=UNFINISHED_TEXT[name]):
            read(saved(made, everything=False))
        return
    shape = read(saved(made, everything=False))
    same_sizes(shape, text)
    if experts is not None and shape.moe is not None:
        assert shape.moe.num_experts == getattr(text, experts)


def test_the_old_name_of_blooms_width_is_read_as_its_class_does() -> None:
    config = {**tiny_config("bloom"), "n_embed": 64}
    assert read(config).hidden_size == CONFIG_MAPPING["bloom"](**config).hidden_size == 64
    del config["hidden_size"]
    assert read(config).hidden_size == 64


def test_a_list_of_one_number_is_that_number() -> None:
    config = tiny_config("hunyuan_v1_moe")
    layers = config["num_hidden_layers"]
    listed = {**config, "moe_topk": [config["moe_topk"]] * layers}
    assert read(listed) == read(config)
    assert read(saved(CONFIG_MAPPING["hunyuan_v1_moe"](**listed), everything=False)) == read(config)
    with pytest.raises(ModelConfigError, match="layers differ"):
        read({**config, "moe_topk": [1, *[2] * (layers - 1)]})
    with pytest.raises(ModelConfigError, match="lists 1 numbers"):
        read({**config, "moe_topk": [2]})


def test_what_is_missing_or_said_twice_names_both_names_and_what_to_write(tmp_path: Path) -> None:
    config = tiny_config("mixtral")
    for changed, message, help_ in (
        (
            {"num_experts": 3},
            "num_local_experts 4 and num_experts 3 are the same key, and differ",
            "keep num_local_experts or num_experts",
        ),
        ({"hidden_size": None}, "hidden_size is missing", "add hidden_size to config.json"),
        ({"moe_topk": 0, "vocab_size": 0}, "vocab_size is 0", "change vocab_size in config.json"),
    ):
        values = {key: value for key, value in {**config, **changed}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
        tree = example_spec({})
        tree["model"] = {"hf_config": "config.json"}
        (tmp_path / "spec.json").write_text(json.dumps(tree), encoding="utf-8")
        (found,) = (one for one in compile_file(tmp_path / "spec.json")[1].diagnostics if one.code == "S003")
        assert message in found.message
        assert found.help == help_
