"""Which values of a configuration the classes of transformers refuse: the compiler refuses them too, by key."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from families import tiny_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parcompile.model import key_types
from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.key_types import misspelt, mistyped
from parcompile.model.presets import presets, text_part
from parcompile.rules import DEFAULT_TARGETS, check, example_spec
from parcompile.runtime.model.text_head import causal_model
from parcompile.spec.resolve import Resolution

ROOT = Path(__file__).parents[2]
NO_WORDS = {
    "_name_or_path",
    "init_device",
    "norm_type",
    "summary_type",
    "time_step_init_scheme",
    "mamba_ssm_cache_dtype",
}
"""Text that a class keeps and does not read when it builds a model that is trained."""


def generator():
    found = importlib.util.spec_from_file_location("key_types", ROOT / ".ci" / "generate" / "key_types.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_file_says_what_the_classes_declare() -> None:
    made = generator()
    stored = made.FILE.read_text(encoding="utf-8")
    assert stored == made.text(), "python .ci/generate/key_types.py"
    assert set(json.loads(stored)["types"]) >= set(RUNTIME_FAMILIES)


@pytest.mark.parametrize("name", key_types.classified())
def test_a_classifier_has_the_parameters_that_the_compiler_counts(name: str) -> None:
    config = tiny_config(name)
    with torch.device("meta"):
        model = causal_model(
            CONFIG_MAPPING[name](**{key: one for key, one in config.items() if key != "model_type"}), 3
        )
    found = {own: tuple(one.shape) for own, one in model.named_parameters()}
    table = parameter_table(shape_from_config({**config, "num_labels": 3}))
    assert found == {own: one.shape for own, one in table.expanded()}


VALUES = {"null": None, "switch": True, "whole": 1, "fraction": 0.5, "text": "silu", "list": [3], "mapping": {"a": 3}}


@pytest.mark.parametrize("name", sorted(RUNTIME_FAMILIES))
def test_what_a_class_does_not_take_is_refused_by_it_and_here(name: str) -> None:
    every = json.loads((ROOT / "compiler" / "model" / "key_types.json").read_text(encoding="utf-8"))
    stored, words = every["types"][name], every["words"].get(name, {})
    listed = {key: found[0] for key, found in words.items() if isinstance(found, list)}
    fields = {one.name for one in dataclasses.fields(CONFIG_MAPPING[name])}
    for kinds, keys in stored.items():
        for kind, value in VALUES.items():
            taken = kind in kinds.split()
            said = {key: listed.get(key, value) if kind == "text" else value for key in keys}
            if kind == "list":
                said |= {key: [VALUES[entries[0]]] for key, entries in key_types._LISTED.items() if key in keys}
            # Of lists that classes read they take nothing else, whatever they declare.
            fits = [taken and (kind in ("list", "null") or key not in key_types._LISTED) for key in keys]
            assert [mistyped(name, {key: said[key]}) is None for key in keys] == fits, (kinds, kind)
            others = [key for key in keys if key not in fields]
            for key in [] if taken else [*keys[:1], *others]:  # the classes check all fields alike
                with pytest.raises(Exception, match=f"Validation error for field '{key}'" if key in fields else ""):
                    CONFIG_MAPPING[name](**{key: value})
            for key in others if taken and kind == "null" else []:
                CONFIG_MAPPING[name](**{key: None})


def test_stretched_positions_without_a_key_are_refused_by_their_class_and_here() -> None:
    """Of every type whose class has them, each kind without each of its keys; with all of them it is taken."""
    values = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    types = [name for name in RUNTIME_FAMILIES if "rope_parameters" in key_types.fields_of(name)]
    assert len(types) > 60
    for name in types:
        for kind, keys in key_types._STRETCHES.items():
            whole = {"rope_type": kind, "rope_theta": 1e4} | {key: values.get(key, 2.0) for key in keys}
            assert mistyped(name, {"rope_parameters": whole}) is None
            for key in keys:
                rope = {name: value for name, value in whole.items() if name != key}
                refused = mistyped(name, {"rope_parameters": rope}) is not None
                try:
                    CONFIG_MAPPING[name](rope_parameters=dict(rope))
                except Exception as error:
                    assert refused, (name, kind, key, error)
                else:
                    assert not refused, (name, kind, key)


def test_a_factor_of_null_is_taken_where_transformers_computes_it() -> None:
    for kind in ("linear", "dynamic", "yarn"):
        config = {**tiny_config("llama"), "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": None}}
        try:
            AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**config))
        except TypeError:
            assert mistyped("llama", config) is not None, kind
        else:
            assert mistyped("llama", config) is None, kind


def test_kinds_of_positions_are_those_that_transformers_computes() -> None:
    """Others are a KeyError when a model is built; nested ones of classes with positions for each kind of layer too."""
    assert {*key_types._STRETCHES} == {*ROPE_INIT_FUNCTIONS, "default"}
    renamed = {"rope_type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    renamed |= {"original_max_position_embeddings": 32}
    types = [name for name in RUNTIME_FAMILIES if "rope_parameters" in key_types.fields_of(name)]
    for name in types:
        for rope in ({"rope_type": "asdf"}, {"type": "axial"}, renamed, {"full_attention": {"rope_type": "asdf"}}):
            config = {**tiny_config(name), "rope_scaling": rope}
            wrong = mistyped(name, config)
            if wrong is None:
                assert (name, rope["rope_type"]) in {("phi3", "su")}
                read: Any = CONFIG_MAPPING[name](**{**config, "rope_scaling": dict(rope)})
                assert read.rope_parameters["rope_type"] == "longrope"
            else:
                assert "transformers does not know" in wrong[1]
    assert not takes({**tiny_config("llama"), "rope_scaling": {"rope_type": "asdf"}})


NO_NUMBERS = [
    ("llama", "rope_theta", -1.0, "more than 0: positions turn"),
    ("llama", "rope_theta", 0, "more than 0: positions turn"),
    ("llama", "rope_theta", "1e4", "has to be a number"),
    ("gpt_neox", "rotary_emb_base", -1.0, "more than 0: positions turn"),
    ("gemma3_text", "rope_local_base_freq", -1.0, "more than 0: positions turn"),
    ("granite", "attention_multiplier", -1.0, "more than 0: attention scores"),
    ("granite", "logits_scaling", 0.0, "more than 0: logits are divided"),
    ("gemma2", "final_logit_softcapping", 0.0, "more than 0: logits are divided"),
    ("llama", "rms_norm_eps", -1.0, "0 or more: norms divide"),
    ("gpt_neox", "layer_norm_eps", -1.0, "0 or more: norms divide"),
    ("llama", "initializer_range", -0.02, "0 or more: it is a standard deviation"),
    ("llama", "attention_dropout", 1.5, "between 0 and 1"),
    ("gpt2", "resid_pdrop", -0.1, "between 0 and 1"),
]


@pytest.mark.parametrize(("name", "key", "value", "words"), NO_NUMBERS)
def test_numbers_that_no_class_computes_with_are_refused_by_key(name: str, key: str, value: Any, words: str) -> None:
    """Their model is not built, or its loss is not finite, with transformers alone."""
    wrong = {**tiny_config(name), key: value}
    wrong.pop("rope_parameters", None)
    assert not computes(wrong)
    with pytest.raises(ModelConfigError, match=f"{key} is .*{words}") as caught:
        shape_from_config(wrong)
    assert caught.value.key == key
    shape_from_config({**wrong, key: 0.5})


def computes(config: dict[str, Any]) -> bool:
    """Whether the class builds a model whose loss and gradients are finite."""
    torch.manual_seed(0)
    try:
        model, tokens = causal_model(CONFIG_MAPPING[config["model_type"]](**config)), torch.arange(8)[None]
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        return all(bool(torch.isfinite(one).all()) for one in (loss, *grads))
    except Exception:
        return False


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", "{}"),
        ("rms_norm_eps", "{}"),
        ("rope_scaling", '{{"rope_type": "linear", "factor": {}}}'),
        ("router_aux_loss_coef", "{}"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_in_a_file(tmp_path: Path, key: str, value: str, text: str) -> None:
    known = json.dumps({**tiny_config("mixtral"), "time_step_limit": [0.0, float("inf")]})
    (tmp_path / "config.json").write_text(known[:-1] + f', "{key}": {value.format(text)}}}', encoding="utf-8")
    spec = {**example_spec({}), "model": {"hf_config": "config.json"}}
    (error,) = (one for one in check(Resolution(spec, folder=tmp_path)) if one.code == "S003")
    assert "it has to be a finite number" in error.message
    assert f"change {key} in config.json" == error.help
    (tmp_path / "config.json").write_text(known, encoding="utf-8")
    assert not [one for one in check(Resolution(spec, folder=tmp_path)) if one.code == "S003"]


@pytest.mark.parametrize("whole", [False, True])
def test_how_weights_were_quantized_is_told(tmp_path: Path, whole: bool) -> None:
    config = tiny_config("llama")
    if whole:
        config = {"model_type": "llava", "text_config": config}
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = {**example_spec({}), "model": {"hf_config": "config.json"}}
    (found,) = (one for one in check(Resolution(spec, folder=tmp_path)) if one.code == "S005")
    assert found.message.startswith("quantization_config has no effect")
    assert "dequantize=True" in str(found.help)


@pytest.mark.parametrize("name", sorted(RUNTIME_FAMILIES))
def test_a_word_that_a_class_does_not_know_is_refused_by_it_and_here(name: str) -> None:
    config = tiny_config(name)
    assert takes(config)
    texts = [key for key, value in CONFIG_MAPPING[name](**config).to_dict().items() if isinstance(value, str)]
    for key in set(texts) - NO_WORDS:
        wrong = {**config, key: "sillu"}
        if takes(wrong):
            shape_from_config(wrong)
            continue
        with pytest.raises(ModelConfigError, match=f"{key}.*sillu") as found:
            shape_from_config(wrong)
        assert found.value.key == key


SIZES = [
    ("arcee", {"head_dim": 9}, "S009"),
    ("deepseek_v3", {"qk_rope_head_dim": 5}, "S009"),
    ("gemma2", {"hidden_size": 33, "head_dim": 8}, "S003"),
    ("mixtral", {"sliding_window": 0}, "S003"),
    ("gptj", {"rotary_dim": -1}, "S003"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "S003"),
    ("nemotron_h", {"topk_group": 3}, "S003"),
]


@pytest.mark.parametrize(("name", "wrong", "code"), SIZES)
def test_sizes_that_a_class_fails_with_are_refused_by_key(
    tmp_path: Path, name: str, wrong: dict[str, int], code: str
) -> None:
    config = {**tiny_config(name), **wrong}
    assert not takes(config)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = {**example_spec({}), "model": {"hf_config": "config.json"}}
    found = [one for one in check(Resolution(spec, folder=tmp_path)) if one.code == code]
    assert found and any(key in found[0].message for key in wrong)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("phi", {"partial_rotary_factor": 0.5, "hidden_size": 36}),
        ("qwen2", {"sliding_window": 0}),
        ("llama", {"sliding_window": 0}),
    ],
)
def test_sizes_that_a_class_takes_are_taken(name: str, right: dict[str, Any]) -> None:
    config = {**tiny_config(name), **right}
    assert takes(config)
    shape_from_config(config)


def takes(config: dict[str, Any]) -> bool:
    """Whether the class builds a model and computes with it."""
    torch.manual_seed(0)
    try:
        causal_model(CONFIG_MAPPING[config["model_type"]](**config))(input_ids=torch.arange(8)[None])
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", sorted(RUNTIME_FAMILIES))
def test_the_defaults_of_every_class_are_taken(name: str) -> None:
    config = CONFIG_MAPPING[name]().to_dict()
    assert mistyped(name, config) is None
    assert not list(misspelt(name, config))


def test_published_configurations_are_taken() -> None:
    for preset in presets().values():
        config = text_part(preset.config)
        assert mistyped(str(config["model_type"]), config) is None, preset.name
        assert not list(misspelt(str(config["model_type"]), config)), preset.name


@pytest.mark.parametrize(
    ("model_type", "key", "value", "message"),
    [
        (
            "gpt_oss",
            "num_local_experts",
            None,
            r"num_local_experts is null, which transformers refuses: write a whole number, or leave the key out",
        ),
        ("glm_moe_dsa", "index_head_dim", None, r"index_head_dim is null"),
        ("llama", "hidden_size", "4096", r'hidden_size is "4096": it has to be a whole number'),
        ("llama", "attention_bias", [], r"attention_bias is \[\]: it has to be true or false"),
        ("mistral", "sliding_window", "4096", r'sliding_window is "4096": it has to be a whole number or null'),
        ("llama", "tie_word_embeddings", 1, r"tie_word_embeddings is 1: it has to be true or false"),
        ("llama", "rms_norm_eps", 1, r"rms_norm_eps is 1: it has to be a number with a point, as 1\.0"),
        ("llama", "attention_dropout", True, r"attention_dropout is true: it has to be a number or null$"),
        (
            "llama",
            "rope_scaling",
            {"rope_type": "yarnn"},
            r'rope_scaling has the rope_type "yarnn", which transformers does not know: did you mean yarn\?',
        ),
        ("qwen2", "rope_scaling", {"type": "linear"}, r"rope_scaling has the rope_type linear and lacks factor, which"),
        ("llama", "num_hidden_layers", 2.5, r"num_hidden_layers is 2\.5: it has to be a whole number"),
    ],
)
def test_the_message_names_the_key(model_type: str, key: str, value: object, message: str) -> None:
    config = {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, key: value}
    with pytest.raises(ModelConfigError, match=message) as caught:
        shape_from_config(config)
    assert caught.value.key == key


def test_a_misspelt_key_of_a_file_is_told_and_one_of_its_own_code_is_not(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["qwen3_moe"]().to_dict()
    config["experts_per_tokn"] = config.pop("num_experts_per_tok")
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    config["scoring_function_of_its_own"] = "sigmoid"
    assert list(misspelt("qwen3_moe", config)) == [("experts_per_tokn", "num_experts_per_tok")]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = {**example_spec({}), "model": {"hf_config": "config.json"}}
    found = {one.code: one for one in check(Resolution(spec, (), tmp_path), DEFAULT_TARGETS)}["S005"]
    assert found.message == "experts_per_tokn has no effect: transformers' qwen3_moe does not read it"
    assert found.help == "did you mean num_experts_per_tok?"


def test_keys_that_files_carry_along_and_those_that_a_source_puts_together_are_no_mistakes() -> None:
    carried = {"is_decoder": False, "_num_labels": 2, "top_k": 50, "num_beams": 1}
    for name in RUNTIME_FAMILIES:
        assert not list(misspelt(name, carried)), name
    assert not list(misspelt("dots3_note_text", {"swa_qk_nope_head_dim": 192}))


WRONG = ("x", 2.5, -1, [], {}, True, None)


@pytest.mark.parametrize("name", sorted(RUNTIME_FAMILIES))
def test_a_value_of_a_wrong_type_never_ends_in_a_traceback(name: str) -> None:
    """Each key of a small configuration, of its sections too, and each further one that the class has."""
    config = tiny_config(name)
    inner = [(key, one) for key, section in config.items() if isinstance(section, dict) for one in section]
    further = key_types.keys_of(name) - config.keys()
    for value in WRONG:
        changed = [
            {**config, key: value} for key in [*config, *(further if value == "x" else ())] if key != "model_type"
        ]
        changed += [{**config, key: {**config[key], one: value}} for key, one in inner]
        for one in changed:
            with contextlib.suppress(ModelConfigError):
                parameter_table(shape_from_config(one))
