"""`parcompile models` and the messages that refuse a model: each says why, and what would run instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parcompile.backends.registry import target
from parcompile.cli.reference import models_command as command
from parcompile.cost.flops import model_flops_per_token
from parcompile.model.catalogue import REASONS, RUNTIME_FAMILIES, model_type, model_types
from parcompile.model.derived_rows import parameter_table
from parcompile.model.families import FAMILIES
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import find_preset, presets
from parcompile.pipeline import check_read
from parcompile.plan import compile_plan
from parcompile.rules import check, example_spec
from parcompile.searching.first import LONGEST, sequence_length_of
from parcompile.spec.resolve import Resolution
from parcompile.text import parse


def output(*args: str) -> str:
    found = CliRunner().invoke(command, list(args))
    assert found.exit_code == 0, found.output
    return found.output


def test_the_list_has_every_type_with_its_state() -> None:
    rows = {line.split()[0]: line for line in output().splitlines() if line.strip()}
    for name, one in model_types().items():
        assert ("works" in rows[name]) is one.works, name
    assert rows["gpt_oss"].split(maxsplit=2)[2] == "mixture of experts, attention sinks, windows"
    assert "gated delta nets in the place of most attention" in rows["qwen3_next"]
    assert "gated delta nets" in rows["olmo_hybrid"]
    assert set(RUNTIME_FAMILIES) <= rows.keys()


def test_the_list_can_be_narrowed_and_read_by_programs() -> None:
    trees = json.loads(output("--format", "json", "--only", "works"))
    assert [tree["model_type"] for tree in trees] == sorted((*RUNTIME_FAMILIES, "gpt-sw3"))
    axes = {tree["model_type"]: tree["axes"] for tree in trees}
    assert axes["llama"] == ["tp", "cp", "pp", "dp", "sequence_parallel"]
    assert axes["qwen3_moe"] == [*axes["llama"], "ep"]
    assert "pp" not in axes["zamba2"]
    assert "ep" in axes["llama4_text"]
    assert all(tree["why"] for tree in json.loads(output("--format", "json", "--only", "refused")))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt_oss", "gpt_oss works: tp, cp, pp, dp, sequence parallelism"),
        ("gpt_oss", "presets: gpt-oss-20b, gpt-oss-120b"),
        ("deepseek_v32", "keys chosen by an indexer"),
        ("deepseek_v4", "compressed KV, some chosen by an indexer"),
        ("deepseek_v4", "deepseek_v4 works: tp, cp, pp, dp, sequence parallelism, ep"),
        ("dbrx", "nearest type that works: mixtral"),
        ("hy_v4", "several residual streams"),
        ("qwen4_exp_text", "blocks of keys chosen by an indexer"),
        ("longcat_flash", "  two layers in a module\n  zero experts\n"),
        ("cpmant", "lets every token see all others, later ones too"),
        ("mllama", "nothing trains their parameters"),
        ("zamba", "weights are tied over layers"),
        ("zamba2", "zamba2 works: tp, cp, dp, sequence parallelism"),
        ("kimi_k2", "kimi_k2 works: its layers are those of deepseek_v3, as which it is planned and trained"),
        ("bart", "encoder-decoder"),
        ("gemma3", "gemma3 is multimodal. Its text part gemma3_text works: tp, cp, pp, dp, sequence parallelism"),
        ("qwen3_5", "  gated delta nets in the place of most attention\n"),
        ("qwen3_5", "the text part is trained alone; the towers of other media are left as they are"),
        ("gemma3n", "Its text part gemma3n_text works: tp, cp, pp, dp, sequence parallelism\n"),
        (
            "aya_vision",
            "aya_vision is refused: its head gives logits as they are, where that of its text part multiplies",
        ),
        ("aya_vision", "text part: cohere2\nwhat runs: its text_config as the configuration of a model of its own"),
        ("diffusion_gemma", "text part: diffusion_gemma_text, which is refused"),
        ("qwen3_omni_moe_thinker", "Its text part qwen3_moe works: tp, cp, pp, dp, sequence parallelism, ep"),
        ("mistral_large4", "take latent keys of earlier layers"),
        ("step3p7", "num_sliding_attention_heads"),
        ("Qwen3.5-MoE", "qwen3_5_moe is multimodal"),
        ("gpt-oss", "gpt_oss works"),
        ("openai/gpt-oss-20b", "gpt_oss works"),
        ("gemma4_text", "layers of different shapes"),
        ("paligemma", "nearest type that works: gemma"),
    ],
)
def test_one_type_is_told_in_detail(name: str, words: str) -> None:
    assert words in output(name)


def test_a_name_that_nothing_resembles_is_an_error() -> None:
    found = CliRunner().invoke(command, ["zzz"])
    assert found.exit_code == 2
    assert "there is no model type 'zzz'; `parcompile models` lists all" in found.output


@pytest.mark.parametrize(
    ("name", "meant"), [("longcat_flsh", "longcat_flash"), ("quen3", "qwen3"), ("mamab2", "mamba2")]
)
def test_a_misspelt_type_is_guessed(name: str, meant: str) -> None:
    found = CliRunner().invoke(command, [name])
    assert found.exit_code == 2
    assert f"there is no model type '{name}'; did you mean {meant}? The type of a model" in found.output


@pytest.mark.parametrize(
    ("name", "near"),
    [("zai-org/GLM-6", "glm_moe_dsa"), ("granite-4.0-h-tiny", "granitemoehybrid"), ("Qwen3.5-9B", "qwen3_5_moe")],
)
def test_the_name_of_a_model_leads_to_the_types_that_begin_so(name: str, near: str) -> None:
    found = CliRunner().invoke(command, [name])
    assert found.exit_code == 2
    types = found.output.partition(f"there is no model type '{name}'; types whose names begin so: ")[2]
    assert near in types.partition(". ")[0].split(", ")


def test_every_reason_is_given_to_a_type_and_every_nearest_type_works() -> None:
    used = {one.reason for one in model_types().values()} | {model_type("zzz").reason}
    # The generator gives it to a type of a next release that nobody has looked at.
    assert {key for key, reason in REASONS.items() if reason not in used} <= {"no_table"}
    assert {one.nearest for one in model_types().values()} <= {None, *RUNTIME_FAMILIES}


@pytest.mark.parametrize(
    ("config", "sentence", "instead"),
    [
        (
            {"model_type": "recurrent_gemma", "layers_block_type": ["recurrent"] * 2 + ["attention"]},
            "each channel decays by a gate of its own, .* \\(layers_block_type: 2 recurrent, 1 attention\\)",
            "the nearest type that works is gemma2; `parcompile models recurrent_gemma` says more",
        ),
        (
            {"model_type": "zamba", "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
            "use the same transformer blocks in turn .* \\(layers_block_type: 2 mamba, 2 hybrid\\)",
            "the nearest type that works is zamba2; `parcompile models zamba` says more",
        ),
        ({"model_type": "lama"}, "transformers does not know it", "the nearest type that works is llama"),
        ({"model_type": None}, "model_type is None: it has to be the name of a model type", "`parcompile models`"),
        (
            {"model_type": "diffusion_gemma", "text_config": {"model_type": "diffusion_gemma_text"}},
            "its text part is 'diffusion_gemma_text', which is refused too: transformers does not know it",
            "`parcompile models diffusion_gemma`",
        ),
        (
            {"model_type": "paligemma", "text_config": {"model_type": "gemma"}},
            "tokens of a prompt \\(token_type_ids 0\\) see one another",
            "what runs: its text_config as the configuration of a causal model of its own; the nearest type",
        ),
        (
            {"model_type": "step3p5"},
            "it is the text part of step3p7, .*; each layer of its text part clamps its MLP",
            "`parcompile models step3p7` says more",
        ),
        (
            {"model_type": "qwen3_vl_text"},
            "it is the text part of qwen3_vl, and no causal language model of transformers has its layers alone",
            "give the config.json of the whole model, whose model_type is qwen3_vl",
        ),
        ({"model_type": "gemma3"}, "its text part is 'gemma3_text', which works, but .* no text_config", "gemma3_text"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(config: dict[str, Any], sentence: str, instead: str) -> None:
    with pytest.raises(ModelConfigError, match=sentence) as caught:
        shape_from_config(config)
    assert instead in caught.value.instead
    assert caught.value.key == "model_type"


def test_check_prints_the_reason_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "zamba"}))
    tree = {"version": 1, "model": {"hf_config": "config.json"}}
    checked = check_read(parse(json.dumps(tree), "spec.json", "json"), tmp_path)
    found = next(one for one in checked.diagnostics if one.code == "S003")
    assert found.message.startswith("model_type 'zamba' is refused: its hybrid layers use the same transformer blocks")
    assert found.help == "the nearest type that works is zamba2; `parcompile models zamba` says more"


def test_no_type_is_in_both_lists() -> None:
    refused = {name for name, one in model_types().items() if not one.works}
    assert not refused & FAMILIES.keys()


def test_a_published_file_of_kimi_k2_is_planned_as_deepseek_v3(tmp_path: Path) -> None:
    config = {**find_preset("kimi-k2").config, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration.K2"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    resolution = Resolution({"version": 1, "model": {"hf_config": "config.json"}}, folder=tmp_path)
    model = resolution.model()
    assert model.shape == shape_from_config(find_preset("kimi-k2").config)
    assert model.source == "config.json (kimi_k2, whose layers are those of deepseek_v3)"
    assert "auto_map" not in model.hf_config


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}


def test_a_first_spec_takes_the_positions_of_the_text_part() -> None:
    text = {key: value for key, value in find_preset("gemma-3-4b").config.items() if key != "max_position_embeddings"}
    assert sequence_length_of({"model_type": "gemma3", "text_config": text}) == LONGEST
    assert sequence_length_of(find_preset("gpt2").config) == 1024
    assert sequence_length_of({"model_type": "opt", **SIZES, "ffn_dim": 64}) == 2048
    assert sequence_length_of({"model_type": "nothing"}) == 1024


def test_the_parameters_of_a_configuration_are_counted_exactly(tmp_path: Path) -> None:
    preset = find_preset("qwen3-30b-a3b")
    assert preset is not None
    (tmp_path / "config.json").write_text(json.dumps(preset.config))
    assert f"parameters in this configuration: {preset.parameters:,}" in output(
        "--config", str(tmp_path / "config.json")
    )
    tree = json.loads(output("qwen3_moe", "--config", str(tmp_path / "config.json"), "--format", "json"))
    assert tree["parameters"] == preset.parameters
    assert "parameters with the defaults of LlamaForCausalLM: 6,738,415,616" in output("llama")
    for one in presets().values():  # not those of a class that it shares with larger and smaller models
        assert f"parameters of {one.name}: {one.parameters:,} (" in output(one.name)
        assert json.loads(output(one.hf_name, "--format", "json"))["parameters"] == one.parameters
    assert output("--config", str(tmp_path)) == output("--config", str(tmp_path / "config.json"))


def test_the_parameters_of_a_type_that_is_refused_are_counted_too(tmp_path: Path) -> None:
    known = next(one for one in model_types().values() if one.planned and not one.works)
    with pytest.raises(ModelConfigError, match=r"this configuration has [\d,]+ parameters"):
        shape_from_config({"model_type": known.name})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"model_type": "llama"}', "is a configuration of llama, not of qwen3"),
    ],
)
def test_a_file_that_is_no_configuration_of_the_type_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    found = CliRunner().invoke(command, ["qwen3", "--config", str(tmp_path / "config.json")])
    assert found.exit_code == 1
    assert said in found.output


LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


def test_a_classifier_counts_a_head_of_labels_and_no_logits() -> None:
    config = find_preset("llama-3-8b").config
    words, labels = (shape_from_config({**config, **more}) for more in ({}, {"num_labels": 3}))
    tables = [parameter_table(one) for one in (words, labels)]
    assert tables[0].numel - tables[1].numel == (words.vocab_size - 3) * words.hidden_size
    assert [one.name for one in tables[1].after] == ["model.norm.weight", "score.weight"]
    saved = {**config, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
    assert shape_from_config(saved) == labels
    assert shape_from_config({**saved, "id2label": None}).head.labels == 2, "transformers' default"
    tied = shape_from_config({**find_preset("gemma-2b").config, "num_labels": 1})
    assert not tied.tie_word_embeddings
    # 6 for each parameter that multiplies: the head looks at one token of a sequence.
    flops = [model_flops_per_token(one, 4096) for one in (words, labels)]
    assert flops[0] - flops[1] == 6 * words.vocab_size * words.hidden_size


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_labels": 0}, "num_labels is 0: it has to be a whole number of 1 or more"),
        ({"num_labels": True}, "num_labels is True"),
        ({"model_type": "granite", "num_labels": 1}, "num_labels 1: transformers' granite has no classifier"),
    ],
)
def test_labels_that_no_classifier_has_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelConfigError, match=words) as error:
        shape_from_config({**find_preset("llama-3-8b").config, **changes})
    assert error.value.key == "num_labels"


@pytest.mark.parametrize(
    ("section", "values", "code", "words"),
    [
        ("parallelism", {"pp": 2}, "X005", "pp 2 with a classifier (num_labels 1)"),
        ("training", {"linear_cross_entropy": True}, "X011", "linear_cross_entropy with a classifier (num_labels 1)"),
    ],
)
def test_what_a_classifier_cannot_have_is_refused(section: str, values: dict[str, Any], code: str, words: str) -> None:
    tree = example_spec({"model": {**LLAMA, "num_labels": 1}, section: values})
    assert [one.message for one in check(Resolution(tree)) if one.code == code and words in one.message]


def test_other_tools_refuse_a_classifier() -> None:
    tree = example_spec({"model": {**LLAMA, "num_labels": 1}})
    plan = compile_plan(Resolution(tree).spec(), tree, ())
    for name in ("megatron", "torchtitan"):
        fatal = [loss for loss in target(name).losses(plan) if loss.fatal]
        assert any("num_labels 1" in loss.what for loss in fatal), name


@pytest.mark.parametrize(
    ("config", "said", "is_counted"),
    [
        (
            {"model_type": "kimi_linear", "linear_attn_config": 7},
            "linear_attn_config is 7: it has to be a mapping",
            False,
        ),
        (
            {"model_type": "llama", "hidden_act": "sulu"},
            'is "sulu", which transformers does not know',
            False,
        ),
        ({"model_type": "llama", "num_labels": 0}, "num_labels is 0: it has to be", True),
        ({"model_type": "bert", "hidden_size": 24.5}, "bert is refused: ", False),
    ],
)
def test_a_configuration_that_check_refuses_says_so(
    config: dict[str, Any], said: str, is_counted: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 61}
    given = {**sizes, "intermediate_size": 48, "max_position_embeddings": 64, **config}
    (tmp_path / "config.json").write_text(json.dumps(given), encoding="utf-8")
    details, tree = output("--config", str(tmp_path)), json.loads(output("--config", str(tmp_path), "--format", "json"))
    assert said in details
    assert ("in this configuration: " in details, tree["parameters"] is not None) == (is_counted, is_counted)
    if (name := config["model_type"]) in FAMILIES:
        with pytest.raises(ModelConfigError) as caught:
            shape_from_config(given)
        assert tree["why"] == str(caught.value)
        assert f"this configuration of {name} is refused: {caught.value}\n" in details
