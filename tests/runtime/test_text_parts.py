"""The text part of a multimodal model is found in its configuration and files, trained alone and written back."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from closeness import assert_close, assert_within, nudge
from families import tiny_config
from family_runs import batch_of, config_plan, of_plan
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from training_runs import plain_optimizer

from parcompile.model.catalogue import TEXT_ALIKE, TEXT_PARTS, model_types
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.model.presets import left_out, text_part
from parcompile.plan import Plan, identified
from parcompile.runtime import RunError
from parcompile.runtime.model.configuration import folder_config
from parcompile.runtime.model.pretrained import PretrainedFolder, text_name
from parcompile.runtime.model.text_head import causal_model

PUBLISHED_FLAT = "qwen2_5_vl"
TRAINED = ("gemma3", "mistral3", PUBLISHED_FLAT, "cosmos3_edge", "granite_docling", "hunyuan_vl", "paddleocr_vl")
TRAINED = (*TRAINED, "qwen3_omni_moe_thinker", "muse_glimmer", "muse_spark", "glm5_next", "deepseek_ocr2")
SAMPLE = (*TRAINED, "llava", "qwen3_vl", "lfm2_vl", "cosmos3_omni", "glm46v", "granite4_vision", "unlimited_ocr")
"""With `--family all` all of them are compared."""
ALIKE = tuple(sorted(name for name in TEXT_PARTS if model_types()[name].text_kind in TEXT_ALIKE))
"""Types whose text part is trained as one of another type."""
_TOWER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
    "embed_dim": 16,
    "out_hidden_size": 32,
    "projection_dim": 16,
    "window_size": 28,
    "mlp_dim": 16,
    "output_channels": 8,
    "global_attn_indexes": [0],
    "model_args": {"embed_dim": 16},
    "video_temporal_patch_size": 2,
}

_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_SEGMENTS = {
    **_SMALL,
    "image_size": 64,
    "patch_size": 16,
    "window_size": 2,
    "output_channels": 8,
    "global_attn_indexes": [0],
    "mlp_dim": 16,
    "downsample_channels": [8, 16],
}
_EARS = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "downsample_hidden_size": 8,
    "output_dim": 32,
}

_MUSE = {"out_hidden_size": 64, "projector_hidden_size": 16}

_PARTS: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "vision_config": {
            "num_hidden_layers": 1,
            "mlp_layer_types": ["dense"],
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "adapter_in_dim": 16,
            "adapter_out_dim": 32,
        },
        "audio_config": {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "adapter_input_size": 16,
            "adapter_out_dim": 32,
            "feature_size": 8,
            "downsample_hidden_size": 8,
        },
    },
    "deepseek_ocr2": {"vision_config": {"sam_config": _SEGMENTS, "encoder_config": _SMALL}},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "downsample_rate": "1/2",
        "vision_config": {**_TOWER, "hidden_size": 64, "model_type": "clip_vision_model"},
    },
    "muse_glimmer": _MUSE,
    "muse_spark": {
        **_MUSE,
        "audio_config": {
            "patch_sizes": [4, 2],
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "out_hidden_size": 32,
        },
    },
    "nemotron_h_omni": {"audio_config": None},
    "qwen2_5_omni_thinker": {"audio_config": _EARS},
    "qwen3_omni_moe_thinker": {"audio_config": _EARS},
    "unlimited_ocr": {
        "vision_config": {
            "sam_config": _SEGMENTS,
            "encoder_config": {**_SMALL, "image_size": 28, "patch_size": 14},
        }
    },
}
"""Other parts than a tower of the usual keys."""
_TEXTS: dict[str, dict[str, Any]] = {
    "cosmos3_edge": {"head_dim": 8},
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [1, 1]}},
    "paddleocr_vl": {"use_bias": True, "head_dim": 8},
    "qwen3_omni_moe_thinker": {"head_dim": 8},
    "unlimited_ocr": {"sliding_window": 5},
}
"""Keys of text parts that the type does not have as which they are trained."""


def whole_config(name: str, **changes: Any) -> Any:
    """The configuration of a multimodal model with a tiny tower and a tiny text part."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[name]
    default, given = kind(), {}
    tower = getattr(default, "vision_config", None)
    if tower is not None:
        known = tower.to_dict()
        small = {key: value for key, value in _TOWER.items() if key in known}
        given["vision_config"] = {**small, "model_type": known["model_type"]}
    tokens = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    given |= {key: 60 for key in tokens if hasattr(default, key)} | _PARTS.get(name, {})
    text = tiny_config(model_types()[name].text or "")
    if name in ALIKE:
        # Three positions, each of some of a head's pairs of features.
        rope = {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 1, 1]}
        text = {**text, "rope_parameters": rope, "use_qk_norm": False, "model_type": model_types()[name].text_kind}
        text |= _TEXTS.get(name, {})
    return kind(text_config=text, **given, **changes)


def whole_model(name: str, **changes: Any) -> nn.Module:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(3)
    config = whole_config(name, **changes)
    # Those that hear are in the other list.
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    with towers_of_timm_left_out(name):
        model: nn.Module = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)
    for key, parameter in model.named_parameters():
        if key.endswith(".bias"):
            nn.init.normal_(parameter, std=0.1)  # zeros hide mistakes
    return model.eval()


@contextlib.contextmanager
def towers_of_timm_left_out(name: str) -> Iterator[None]:
    """Vision towers of timm, which is not installed: text does not pass through them."""
    if name not in ("gemma3n", "fast_vlm", "perception_lm"):
        yield
        return
    from transformers import AutoModel

    file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")

    def build(config: Any, **options: Any) -> nn.Module:
        of_text = config.model_type == model_types()[name].text
        return AutoModel.from_config(config, **options) if of_text else nn.Identity()

    with mock.patch.object(file, "AutoModel", mock.Mock(from_config=build)):
        yield


def difference(name: str) -> float:
    """Of the logits of a multimodal model given text alone, to those of its text part with the same weights."""
    whole: Any = whole_model(name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(whole.config.to_json_string(use_diff=False))
        config = folder_config(folder)
    text: Any = causal_model(config).eval()
    state = {
        text_name(stored, name): tensor for stored, tensor in whole.state_dict().items() if text_name(stored, name)
    }
    lacking = text.load_state_dict(state, strict=False)
    assert not lacking.unexpected_keys
    assert set(lacking.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    ids = torch.randint(0, 59, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one, other = whole(input_ids=ids, use_cache=False).logits, text(input_ids=ids, use_cache=False).logits
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", sorted(TEXT_PARTS) if os.environ.get("TEST_FAMILIES") == "all" else SAMPLE)
def test_a_text_part_computes_what_the_whole_does_with_text_alone(name: str) -> None:
    assert name in TEXT_PARTS
    assert_within(difference(name), 1e-5, name)


def train_text_parts(rank: int, plans: list[Plan], folder: str) -> list[str]:
    """One step of each plan's text part from FOLDER/given, written back into FOLDER/trained; what went wrong."""
    from parcompile.runtime import initialize, join, load_pretrained
    from parcompile.runtime.checkpoint import export, save
    from parcompile.runtime.engine import initialization
    from parcompile.runtime.groups import create_groups
    from parcompile.runtime.inject import injection

    joined, said = join(plans[0]), []
    for plan in plans:
        mesh = of_plan(create_groups(plan, rank, joined.device), plan)
        injection.join = initialization.join = lambda _, mesh=mesh: mesh  # one world for all plans
        name = plan.spec.name
        try:
            model = load_pretrained(Path(folder) / "given" / name, plan)
            samples = [{key: value[row] for key, value in batch_of(plan).items()} for row in range(2)]
            engine, _, loader, _ = initialize(
                plan=plan, model=model, training_data=samples, self_check=False, measurements=False
            )
            engine.train_batch(iter(loader))
            save(engine, Path(folder) / "run" / name, 1)
            if rank == 0:
                given = Path(folder) / "given" / name
                export(Path(folder) / "run" / name, Path(folder) / "trained" / name, into=given)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def as_published(folder: Path) -> None:
    """A folder of Qwen2.5-VL as it is published: keys and tensors of the text part beside those of the whole."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (folder / "config.json").write_text(json.dumps(flat))
    names = (("model.language_model.", "model."), ("model.visual.", "visual."))
    tensors = load_file(folder / "model.safetensors")
    for new, old in names:
        tensors = {old + one.removeprefix(new) if one.startswith(new) else one: value for one, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def whole_trained(given: Path, plan: Plan, seed: int | None = None) -> dict[str, Any]:
    """The text part of the whole model, trained one step by transformers and torch alone."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(given)
    nudge(model, seed)
    optimizer = plain_optimizer(model, plan)
    model.eval()(**batch_of(plan)).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), plan.spec.training.gradient_clipping)
    optimizer.step()
    return {key: one for key, one in model.state_dict().items() if text_name(key, plan.spec.name) is not None}


@pytest.mark.ranks
def test_a_trained_text_part_is_written_back_beside_what_was_left_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    plans = []
    for name in TRAINED:
        folder = tmp_path / "given" / name
        whole_model(name).save_pretrained(folder)
        if name == PUBLISHED_FLAT:
            as_published(folder)
        config = json.loads((folder / "config.json").read_text())
        plan = config_plan(name, config, 2, {"tp": 2})
        # A gradient that is zero but for rounding must not become a step: hence the large epsilon.
        training = replace(plan.spec.training, optimizer=replace(plan.spec.training.optimizer, eps=1e-3))
        plans.append(identified(replace(plan, spec=replace(plan.spec, training=training))))
    for said in run_ranks(2, train_text_parts, plans, str(tmp_path), timeout=120):
        assert said == [""] * len(plans)
    for plan in plans:
        name = plan.spec.name
        given = tmp_path / "given" / name
        before = AutoModelForImageTextToText.from_pretrained(given).state_dict()
        back = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained" / name).state_dict()
        assert back.keys() == before.keys()
        for key in [key for key in back if text_name(key, name) is None]:
            assert torch.equal(back.pop(key), before[key]), key
        assert_close(
            back,
            whole_trained(given, plan),
            rerun=lambda seed, given=given, plan=plan: whole_trained(given, plan, seed),
            least=plan.spec.training.optimizer.lr,  # some are zeros
            about=name,
        )
        moved = sum(not torch.equal(tensor, before[key]) for key, tensor in back.items())
        assert moved > 10


@pytest.mark.parametrize(
    ("kind", "stored", "name"),
    [
        ("cosmos3_omni", "layers.3.self_attn.to_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("cosmos3_omni", "layers.3.self_attn.norm_k.weight", "model.layers.3.self_attn.k_norm.weight"),
        ("cosmos3_omni", "layers.3.self_attn.add_q_proj.weight", None),
        ("cosmos3_omni", "layers.3.mlp_moe_gen.up_proj.weight", None),
        ("cosmos3_omni", "blocks.0.norm1.weight", None),
        ("cosmos3_edge", "embed_tokens.weight", "model.embed_tokens.weight"),
        ("qwen2_5_omni_thinker", "thinker.model.norm.weight", "model.norm.weight"),
        ("qwen2_5_omni_thinker", "thinker.audio_tower.ln_post.bias", None),
        ("llava", "layers.0.mlp.fc1.weight", None),
    ],
)
def test_names_in_published_files(kind: str, stored: str, name: str | None) -> None:
    assert text_name(stored, kind) == name


def test_a_plan_says_of_which_model_it_is_a_part() -> None:
    config = json.loads(whole_config("mistral3").to_json_string(use_diff=False))
    plan = config_plan("mistral3", config, 1, {})
    assert plan.spec.model.shape.model_type == "mistral"
    assert plan.spec.model.source.startswith("config.json (the text part of mistral3; left as they are: ")
    assert "vision_config" in plan.spec.model.source


def test_who_says_whether_the_head_is_tied() -> None:
    text = {"model_type": "mistral"}
    assert text_part({"model_type": "mistral3", "text_config": text})["tie_word_embeddings"] is True
    whole = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": False}
    assert text_part(whole)["tie_word_embeddings"] is False
    both = {**whole, "text_config": {**text, "tie_word_embeddings": True}}
    assert text_part(both)["tie_word_embeddings"] is False


QWEN25_VL_7B = {
    "model_type": "qwen2_5_vl",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "vision_start_token_id": 151652,
    "vocab_size": 152064,
}


def test_a_published_file_of_qwen_2_5_vl_is_planned_as_the_text_part_that_it_has() -> None:
    part = text_part(QWEN25_VL_7B)
    assert parameter_table(shape_from_config(part)).numel == 7_615_616_512
    assert part["model_type"] == "qwen2"
    assert part["rope_scaling"] == {"type": "default"}
    assert left_out(QWEN25_VL_7B) == ("image_token_id", "vision_config", "vision_start_token_id")


@pytest.mark.parametrize("name", ALIKE)
def test_what_a_text_part_leaves_out_has_the_default_of_its_own_class(name: str) -> None:
    from transformers import CONFIG_MAPPING

    part = dict(text_part({"model_type": name, "text_config": {}}))
    read: Any = CONFIG_MAPPING[part.pop("model_type")](**part)
    own: Any = CONFIG_MAPPING[name]().text_config
    keys = set(own.to_dict()) & set(read.to_dict()) - {"model_type", "dtype", "bos_token_id", "eos_token_id"}
    keys -= {"tie_word_embeddings"}  # the whole decides that: the next test
    assert {key: _said(read, key) for key in keys} == {key: _said(own, key) for key in keys}


def _said(config: Any, key: str) -> Any:
    found = getattr(config, key)
    if key != "rope_parameters":
        return found
    return {"partial_rotary_factor": 1.0, **{one: value for one, value in found.items() if one != "mrope_section"}}


_UNEVEN = {"deepseek_ocr2", "glm4v_moe", "hunyuan_vl", "qwen3_omni_moe_thinker", "qwen4_exp"}
"""Types that no class builds as it is: 96 or 28 heads do not divide the hidden size, or a key that it needs is null."""


@pytest.mark.parametrize("name", sorted(TEXT_PARTS - _UNEVEN))
def test_sizes_that_a_text_part_leaves_out_are_those_of_its_class(name: str) -> None:
    from transformers import CONFIG_MAPPING

    built = CONFIG_MAPPING[name](text_config={"model_type": model_types()[name].text_kind}).get_text_config()
    built.allow_global_per_layer_attribute_access = True
    shape = shape_from_config(text_part({"model_type": name, "text_config": {}}))
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"):
        assert getattr(shape, key) == getattr(built, key), key


def test_heads_share_out_the_hidden_size_that_a_text_part_states() -> None:
    for name, stated in (("glm46v", 2048 // 32), ("glm_ocr", 2048 // 16)):
        part = text_part({"model_type": name, "text_config": {"hidden_size": 2048}})
        assert shape_from_config(part).head_dim == stated
    assert text_part({"model_type": "glm4v", "text_config": {"head_dim": 96}})["head_dim"] == 96


def test_a_wrapper_trains_the_text_part_that_its_class_builds() -> None:
    from transformers import CONFIG_MAPPING

    for name in ALIKE:
        kind = model_types()[name].text_kind
        other = "qwen3_vl_text" if kind != "qwen3_vl_text" else "glm4v_text"
        whole = {"model_type": name, "text_config": {"model_type": other, "num_key_value_heads": 2}}
        built = type(CONFIG_MAPPING[name](text_config=dict(whole["text_config"])).text_config).model_type
        assert text_part(whole)["model_type"] == TEXT_ALIKE[built]


@pytest.mark.parametrize("name", ["hunyuan_vl", "paddleocr_vl"])
def test_keys_of_the_text_part_may_stand_beside_those_of_the_whole(name: str) -> None:
    whole = json.loads(whole_config(name).to_json_string(use_diff=False))
    flat = {**whole.pop("text_config"), **whole}
    assert shape_from_config(text_part(flat)) == shape_from_config(text_part({**whole, "text_config": flat}))


def test_a_published_text_part_without_sizes_is_read() -> None:
    inner = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    whole = {"model_type": "llava", "image_token_index": 32000, "text_config": inner, "vocab_size": 32064}
    assert parameter_table(shape_from_config(text_part(whole))).numel == 6_738_939_904  # llava-1.5-7b-hf
    with pytest.raises(ModelConfigError, match="hidden_size is missing"):
        shape_from_config(inner)


@pytest.mark.parametrize("name", sorted(TEXT_PARTS))
def test_a_head_is_tied_where_the_class_of_the_whole_ties_it(name: str) -> None:
    from transformers import CONFIG_MAPPING

    kind = getattr(getattr(CONFIG_MAPPING[name](), "text_config", None), "model_type", model_types()[name].text)
    for whole, text in itertools.product((None, False, True), repeat=2):
        inner = {"model_type": kind} if text is None else {"model_type": kind, "tie_word_embeddings": text}
        given = {"text_config": inner} | ({} if whole is None else {"tie_word_embeddings": whole})
        found = text_part({"model_type": name, **given})["tie_word_embeddings"]
        assert found == getattr(CONFIG_MAPPING[name](**copy.deepcopy(given)), "tie_word_embeddings", False), given


def test_a_stored_head_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    plan = config_plan("qwen3", tiny_config("qwen3", tie_word_embeddings=True), 1, {})
    from parcompile.runtime import build_model

    build_model(plan).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    PretrainedFolder(tmp_path).check(plan)
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=r"lm_head\.weight that is not the embedding.*tie_word_embeddings false"):
        PretrainedFolder(tmp_path).check(plan)
