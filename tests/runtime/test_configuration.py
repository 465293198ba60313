"""What a configuration says is the plan's, or refused: weights go on with the numbers that they were made with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_apart, assert_close
from families import FAMILIES, tiny_config
from family_runs import config_plan, drawn_model, family_plan
from ranks import run_ranks
from safetensors import safe_open
from training_runs import make_plan

from parcompile.model.blocks.recurrent import Recurrent
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import shape_from_config
from parcompile.plan import Plan
from parcompile.runtime import RunError
from parcompile.runtime.checkpoint import export
from parcompile.runtime.checkpoint.adapting import import_pretrained
from parcompile.runtime.model.configuration import check_folder, difference, folder_config, planned_config, saved_config
from parcompile.runtime.model.pretrained import build_model
from parcompile.runtime.model.stored_names import stored_as
from parcompile.runtime.model.text_head import model_class

RUN = tuple(FAMILIES)
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def odd_values(family: str) -> dict[str, Any]:
    """Legal values that are no class's default, of keys that change numbers."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[family]().to_dict()
    epsilons = {
        key: 3e-3 for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps") if key in known
    }
    rope = known.get("rope_parameters")
    flat = isinstance(rope, dict) and "rope_theta" in rope
    if not flat:
        return epsilons
    kept = tiny_config(family).get("rope_parameters", {**rope, "rope_type": "default"})
    return epsilons | {"rope_parameters": {**kept, "rope_theta": 777.0}}


def stored(plan: Plan, folder: Path) -> Any:
    """The plan's model and its folder."""
    model: Any = drawn_model(plan).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(generator=torch.Generator().manual_seed(5))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", RUN)
def test_what_is_exported_is_the_configuration_and_the_model_that_came_in(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    plan = family_plan(family, 1, {}, **odd_values(family))
    model = stored(plan, tmp_path / "hf")
    import_pretrained(tmp_path / "hf", plan, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    back = model_class(config).from_pretrained(tmp_path / "out", config=config).eval()
    notes = {"architectures", "dtype", "_name_or_path", "transformers_version", "use_cache"}
    before, after = (
        {key: value for key, value in one.config.to_dict().items() if key not in notes} for one in (model, back)
    )
    assert after == before
    ids = torch.randint(0, 61, (1, 16), generator=torch.Generator().manual_seed(1))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, back.get_buffer(name)), name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, back.get_parameter(name)), name
    logits = (one(input_ids=ids, use_cache=False).logits for one in (model, back))
    assert_close(*logits)


@pytest.mark.parametrize("family", RUN)
def test_a_saved_configuration_gives_the_plan_of_the_live_model(family: str, tmp_path: Path) -> None:
    plan = family_plan(family, 1, {})
    planned_config(plan).save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    for values in (written, saved_config(plan, torch.float32)):
        assert shape_from_config(values) == plan.spec.model.shape
        assert parameter_table(shape_from_config(values)) == plan.parameters
    check_folder(tmp_path / "saved", plan)


@pytest.mark.parametrize("family", RUN)
def test_every_odd_value_is_named_with_both_values(family: str) -> None:
    plan, odd = family_plan(family, 1, {}), odd_values(family)
    assert odd or family in ("olmo", "nanochat", "opt", "xglm")
    found = planned_config(family_plan(family, 1, {}, **odd))
    sentence = difference(found, plan, "the model")
    for key, value in odd.items():
        assert sentence is not None
        expected = f"rope_parameters.rope_theta is {777.0!r}" if key == "rope_parameters" else f"{key} is {value!r}"
        assert f"{expected} in the model and " in sentence


def test_a_saved_width_of_states_goes_before_the_head_dim_that_its_class_overwrites() -> None:
    plan = family_plan("bailing_hybrid", 1, {})
    written = saved_config(plan, torch.float32)
    assert (written["head_dim"], written["linear_head_dim"]) == (4, 6)
    states = shape_from_config({**written, "linear_head_dim": 10, "linear_num_heads": 2}).part(Recurrent)
    assert states is not None
    assert (states.key_dim, states.heads, states.groups_key) == (10, 2, "linear_num_heads")


SAVED_NAMES = {
    "hrm_text": {
        "model.L_module.layers.0.self_attn.v_proj.weight": ["model.L_module.layers.0.attn.gqkv_proj.weight"],
        "model.L_module.layers.0.self_attn.o_proj.weight": ["model.L_module.layers.0.attn.o_proj.weight"],
        "model.L_module.layers.0.mlp.up_proj.weight": ["model.L_module.layers.0.mlp.gate_up_proj.weight"],
    },
    "olmo_hybrid": {
        "model.layers.0.linear_attn.conv1d.weight": [
            f"model.layers.0.linear_attn.{one}_conv1d.weight" for one in ("q", "k", "v")
        ],
    },
    "bailing_hybrid": {
        "model.embed_tokens.weight": ["model.word_embeddings.weight"],
        "model.layers.0.self_attn.forget_gate.f_proj.weight": ["model.layers.0.attention.f_proj.weight"],
        "model.layers.0.self_attn.o_proj.weight": ["model.layers.0.attention.dense.weight"],
        "model.layers.0.self_attn.conv1d.weight": [
            f"model.layers.0.attention.{one}_conv1d.weight" for one in ("q", "k", "v")
        ],
    },
}


@pytest.mark.parametrize("family", SAVED_NAMES)
def test_slices_of_tensors_that_files_join_or_part_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    plan = family_plan(family, 1, {})
    model = stored(plan, tmp_path)
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        for name, places in SAVED_NAMES[family].items():
            whole, found = model.get_parameter(name), stored_as(name, set(file.keys()), file.get_slice)
            assert found is not None
            assert found[1] == set(places)
            assert torch.equal(found[0][...], whole)
            for dim, size in enumerate(whole.shape):
                # Ranges of ranks begin and end inside of the parts.
                for first, last in ((size // 5, size // 2 + 1), (size - size // 3 - 1, size)):
                    place = (slice(None),) * dim + (slice(first, last),)
                    assert torch.equal(found[0][place], whole[place]), (name, place)


def test_what_changes_no_number_is_no_difference() -> None:
    plan = make_plan(1, {})
    config = planned_config(plan)
    config.use_cache, config.bos_token_id, config.initializer_range, config.dtype = True, 3, 0.5, torch.bfloat16
    assert difference(config, plan, "the model") is None


def test_a_key_that_only_the_model_code_reads_counts(tmp_path: Path) -> None:
    """Qwen3's mixture of experts reads head_dim, which its configuration class does not declare."""
    plan = family_plan("qwen3_moe", 1, {})
    config = planned_config(plan)
    assert "head_dim" not in type(config).__dataclass_fields__
    config.head_dim = 16
    assert "head_dim is 16 in the model and 8 in the plan" in str(difference(config, plan, "the model"))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"config\.json cannot be read: No such file"):
        folder_config(tmp_path)
    for text, reason in (
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"model_type": "x"}', "'x'"),
    ):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(RunError, match=reason):
            folder_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}', encoding="utf-8")
    with pytest.raises(RunError, match=r"transformers does not take the configuration of .*hidden_size"):
        folder_config(tmp_path)


def test_another_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("mistral")), encoding="utf-8")
    with pytest.raises(RunError, match=r"model_type is 'mistral' in .* and 'llama' in the plan"):
        check_folder(tmp_path, make_plan(1, {}))


def load_and_initialize(rank: int, plan: Plan, folder: str, changed_on: tuple[int, ...]) -> list[str]:
    """What loading a folder says, and initializing with a model whose epsilon differs on some ranks."""
    from transformers import AutoModelForCausalLM

    from parcompile.runtime import initialize, load_pretrained

    said = []
    try:
        load_pretrained(folder, plan)
    except RunError as error:
        said.append(f"{error.everywhere} {error}")
    model = AutoModelForCausalLM.from_config(planned_config(plan))
    if rank in changed_on:
        model.config.rms_norm_eps = 1e-4
    try:
        initialize(plan=plan, model=model, measurements=False)
    except RunError as error:
        said.append(f"{error.everywhere} {error}")
    return said


@pytest.mark.ranks
def test_ranks_refuse_other_numbers_with_one_message(tmp_path: Path) -> None:
    plan = make_plan(2, {"tp": 2})
    published = replace_config(plan, rms_norm_eps=1e-5, rope_parameters=SCALED)
    stored(published, tmp_path / "hf")
    first, second = run_ranks(2, load_and_initialize, plan, str(tmp_path / "hf"), (1,))
    assert first == second
    loading, initializing = first
    file = tmp_path / "hf" / "config.json"
    assert loading.startswith("True the model would compute other numbers than the plan's: ")
    assert f"rms_norm_eps is 1e-05 in {file} and 1e-06 in the plan (transformers' default)" in loading
    assert f"rope_parameters.rope_type is 'llama3' in {file} and 'default' in the plan" in loading
    assert f'write "hf_config": "{file}" under model in the spec' in loading
    assert initializing.startswith("True on rank 1: the model would compute other numbers than the plan's: ")
    assert "rms_norm_eps is 0.0001 in the model and 1e-06 in the plan" in initializing


def loss_of_folder(rank: int, plan: Plan, folder: str) -> float:
    from parcompile.runtime import initialize, load_pretrained, reduce_loss, split_batch

    engine, *_ = initialize(plan=plan, model=load_pretrained(folder, plan), measurements=False)
    return reduce_loss(engine(**split_batch(batch_of_ids(), engine.mesh)).loss, engine.mesh)


def batch_of_ids() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.ranks
def test_a_plan_of_the_published_configuration_gives_its_loss(tmp_path: Path) -> None:
    sizes = {"rms_norm_eps": 1e-5, "rope_scaling": SCALED, "rope_theta": 500000.0}
    plan = replace_config(make_plan(2, {"tp": 2}), **sizes)
    model = stored(plan, tmp_path / "hf")
    expected = model(**batch_of_ids()).loss.item()
    for found in run_ranks(2, loss_of_folder, plan, str(tmp_path / "hf")):
        assert_close(found, expected)
    plain = drawn_model(make_plan(2, {"tp": 2})).eval()
    plain.load_state_dict(model.state_dict())
    assert_apart(plain(**batch_of_ids()).loss.item(), expected, 3e-4)


def test_importing_other_numbers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    plan = make_plan(1, {})
    stored(replace_config(plan, rms_norm_eps=1e-5), tmp_path / "hf")
    with pytest.raises(RunError, match="rms_norm_eps is 1e-05 in"):
        import_pretrained(tmp_path / "hf", plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def replace_config(plan: Plan, **changes: Any) -> Plan:
    """The plan with further keys in its model's configuration."""
    model = replace(plan.spec.model, hf_config={**plan.spec.model.hf_config, **changes})
    return replace(plan, spec=replace(plan.spec, model=model))


def test_keys_that_the_plan_changes_on_purpose_do_not_count() -> None:
    plan = make_plan(1, {})
    config = planned_config(plan)
    config.rms_norm_eps, config.max_position_embeddings = 1e-3, 9
    sentence = difference(config, plan, "the model", ["max_position_embeddings"])
    assert sentence is not None
    assert "rms_norm_eps is 0.001" in sentence
    assert "max_position_embeddings" not in sentence
    assert difference(config, plan, "the model", ["max_position_embeddings", "rms_norm_eps"]) is None


def test_how_published_weights_were_quantized_is_left_out_and_said() -> None:
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    plan = config_plan("gpt_oss", tiny_config("gpt_oss", **quantized), 1, {})
    assert (
        plan.spec.model.source == "config.json (quantization_config is left out: weights are not quantized in training)"
    )
    assert "quantization_config" not in saved_config(plan, torch.bfloat16)


def test_a_model_that_transformers_does_not_build_is_an_error_for_people() -> None:
    plan = family_plan("llama", 1, {}, pad_token_id=61)
    with pytest.raises(RunError, match=r"transformers builds no llama of .*: Padding_idx must be"):
        build_model(plan)
