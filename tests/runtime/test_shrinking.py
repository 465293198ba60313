"""The small model that stands for a large one in the self-check has what that has, and crosses what that crosses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, tiny_config
from family_runs import family_plan
from ranks import run_ranks

from parcompile.model.blocks.delta import GatedDelta
from parcompile.model.blocks.mamba2 import Mamba2Traits
from parcompile.model.blocks.recurrent import RecurrentTraits
from parcompile.model.catalogue import RUNTIME_FAMILIES
from parcompile.model.presets import presets
from parcompile.plan import Plan, compile_plan
from parcompile.rules import check
from parcompile.runtime.model.configuration import planned_config
from parcompile.runtime.model.pretrained import instantiate
from parcompile.runtime.model.shrinking import LENGTH, SWITCH, WINDOW, borders, shrunk
from parcompile.spec.resolve import Resolution

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "cp": 2, "sequence_parallel": True},
    {"tp": 8, "pp": 2},
    {"cp": 4, "cp_implementation": "ulysses"},
)


def built(plan: Plan) -> torch.nn.Module:
    with torch.device("meta"):
        return instantiate(plan, torch.float32)


def published(preset: str, parallelism: dict[str, Any]) -> Plan | None:
    """A plan of the preset for 131,072 tokens; None where a rule refuses the layout."""
    tree = {
        "version": 1,
        "name": preset,
        "model": {"preset": preset},
        "cluster": {"nodes": 4, "gpus_per_node": 8, "accelerator": "h100-sxm"},
        "parallelism": parallelism,
        "training": {"sequence_length": 131072, "global_batch_size": 32, "micro_batch_size": 1},
    }
    resolution = Resolution(tree)
    found = check(resolution)
    # Whether it fits into memory is not the question.
    wrong = [one for one in found if one.is_error and not one.code.startswith("H")]
    return None if wrong else compile_plan(resolution.spec(), tree, found)


KINDS = {one.config["model_type"]: name for name, one in presets().items() if one.config["model_type"] != "gpt2"}
"""A preset of each model type; gpt2 has fewer positions than these sequences."""


@pytest.mark.parametrize("preset", ["llama-3.1-405b", *KINDS.values()])
def test_a_published_model_becomes_one_of_the_same_kind_that_is_checked_in_a_second(preset: str) -> None:
    tried = 0
    for parallelism in LAYOUTS:
        plan = published(preset, parallelism)
        if plan is None:
            continue
        tried += 1
        small = shrunk(plan)
        model = built(small)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert shapes == {name: parameter.shape for name, parameter in small.parameters.expanded()}
        assert small.parameters.numel < 120e6
        assert small.kv_replicas == plan.kv_replicas
        kinds, before = (set(getattr(planned_config(one), "layer_types", None) or ()) for one in (small, plan))
        assert kinds == before
        config, length = planned_config(small), small.spec.training.sequence_length
        crossed = len(borders(plan, planned_config(plan)))
        assert len(borders(small, config)) == crossed
        assert LENGTH <= length <= 128
    assert tried


@pytest.mark.parametrize("family", RUNTIME_FAMILIES)
def test_every_family_shrinks_for_many_ranks(family: str) -> None:
    wide = {"num_attention_heads": 16, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
    sizes = {"num_key_value_heads": 16 if FAMILIES[family].latent or family == "persimmon" else 4}
    windows = {"swa_num_attention_heads": 16, "swa_num_key_value_heads": 16, "use_dsa": False}
    special: dict[str, Any] = {
        "olmoe": {"head_dim": None},
        "helium": {"head_dim": 32},
        # Two stages of four layers would part layers from those whose keys they use.
        "gemma4_text": {"num_kv_shared_layers": 0},
        "gemma3n_text": {"num_kv_shared_layers": 0},
        "dots3_note_text": windows,
        # A stage begins with a layer that has an indexer.
        "glm5_next_text": {"indexer_types": ["full"] * 8},
        "hy_v4": {"indexer_types": (["full"] + ["shared"] * 3) * 2},
        "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 8, "compress_rates": None},
    }.get(family, {})
    lists = {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "sliding_window": 300}
    known = planned_config(family_plan(family, 1, {})).to_dict()
    mixed = lists if known.get("layer_types") and "sliding_attention" in known["layer_types"] else {}
    more = {"no_rope_layers": [1, 1, 1, 0] * 2} if family in ("smollm3", "llama4_text") else {}
    if family == "gpt_neo":
        more = {"attention_types": [[["global", "local"], 4]]}
    if family == "falcon":
        more = {"num_kv_heads": 4}
    if family == "opt":
        more = {"word_embed_proj_dim": None}
    if (states := FAMILIES[family].part(RecurrentTraits)) is not None:
        last = ["sliding_attention", "full_attention"] if mixed else [states.word, "full_attention"]
        more = {"layer_types": ([states.word] * 2 + last) * 2}
        if states.layers_key == "":
            more = {states.attending_key: [3, 7]} if states.attending_key else {}
        if FAMILIES[family].shared_blocks:
            more = {"layers_block_type": [states.word, states.word, "hybrid", "hybrid"] * 2, "num_key_value_heads": 16}
        elif FAMILIES[family].layer_blocks is not None:
            more = {"layers_block_type": [states.word, "mlp", "full_attention", "moe"] * 2}
        if isinstance(states, Mamba2Traits):
            more |= {states.keys.heads[0]: 32, states.keys.head_dim[0]: "auto"}
            if FAMILIES[family].shared_blocks:
                del more[states.keys.head_dim[0]]
            if states.keys.expand is None:
                more |= {states.keys.head_dim[0]: 8, states.keys.groups[0]: 4}
            elif not FAMILIES[family].attends:
                more |= {states.keys.head_dim[0]: 32, states.keys.groups[0]: 4}
        more |= {key: 4 for key in ("linear_num_key_heads", "linear_num_heads") if key in tiny_config(family)}
    if "mlp_layer_types" in tiny_config(family):
        more |= {"mlp_layer_types": ["dense"] + ["sparse"] * 7}
    if thetas := tiny_config(family).get("layer_rope_theta"):
        more |= {"layer_rope_theta": thetas * 4}
    if family == "deepseek_v4":
        kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
        more = {"layer_types": [*kinds, *kinds, *kinds[1:]], "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 5}
    if family == "gemma3n_text":
        more = {"activation_sparsity_pattern": [0.5, 0.0] * 4}
    others = {"cp": 2} if "pp" in FAMILIES[family].refused_axes else {"pp": 2}
    plan = family_plan(family, 8, {"tp": 4, **others}, **(wide | sizes | special | mixed | more))
    plan = replace(plan, spec=replace(plan.spec, training=replace(plan.spec.training, sequence_length=1024)))
    small = shrunk(plan)
    shapes = {name: tuple(parameter.shape) for name, parameter in built(small).named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in small.parameters.expanded()}
    assert small.parameters.numel < plan.parameters.numel
    if (recurrent := small.spec.model.shape.part(GatedDelta)) is not None and "linear_num_key_heads" in tiny_config(
        family
    ):
        assert (recurrent.groups, recurrent.key_dim, recurrent.value_dim) == (4, 8, 10)
    shape = small.spec.model.shape
    layers = shape.stack.runs.layers if shape.stack.runs else shape.num_hidden_layers
    assert layers == 2 or more or mixed or shape.moe
    if mixed:
        assert planned_config(small).sliding_window == WINDOW
        assert set(planned_config(small).layer_types) == set(more.get("layer_types", lists["layer_types"]))


def test_layers_that_share_keys_stay_with_layers_that_have_them() -> None:
    plan = family_plan("gemma4_text", 4, {"tp": 4}, num_hidden_layers=12, layer_types=None, num_kv_shared_layers=6)
    small = shrunk(plan)
    shapes = {name: tuple(parameter.shape) for name, parameter in built(small).named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in small.parameters.expanded()}
    assert small.kv_replicas == plan.kv_replicas == 2
    config = planned_config(small)
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert config.kv_sharing_modes == ["store", "store", "reuse", "reuse"]


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0}),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 300,
                "short_factor": [1.0] * 4,
                "long_factor": [1.5] * 4,
            },
        ),
        (
            "ministral3",
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 300,
                "llama_4_scaling_beta": 0.1,
            },
        ),
    ],
)
def test_switches_of_rotary_embeddings_are_crossed_where_they_would_be(family: str, rope: dict[str, Any]) -> None:
    most = 300 if family == "llama" else 600
    top = {"original_max_position_embeddings": 300} if family == "phi3" else {}
    changes = {
        **top,
        "sliding_window": None,
        "max_position_embeddings": most,
        "rope_parameters": {"rope_theta": 10000.0, **rope},
    }
    plan = family_plan(family, 1, {}, **changes)
    for length, expected in ((1024, [SWITCH]), (200, [])):
        training = replace(plan.spec.training, sequence_length=length)
        small = shrunk(replace(plan, spec=replace(plan.spec, training=training)))
        config = planned_config(small)
        assert borders(small, config) == expected
        built(small)
        if family == "phi3" and expected:
            assert config.max_position_embeddings / config.original_max_position_embeddings == 2.0


def broken(rank: int, plans: list[Plan]) -> list[str]:
    """What preparing each plan's model says when windows, and the last position, are forgotten."""
    from parcompile.runtime import RunError, join
    from parcompile.runtime.engine.initialization import prepare
    from parcompile.runtime.inject import attention, injection, positions

    mesh, said = join(plans[0]), []
    attend = attention.RingPlace.attend
    attention.RingPlace.attend = lambda place, *args, window=None, **masks: attend(place, *args, **masks)
    positions._ByDocument.__call__ = lambda one, *args, **named: one._right(*args, **named)
    injection.join = lambda plan: replace(mesh, plan=plan)
    for plan in plans:
        for build in (lambda plan: None, injection.random_model):
            here = replace(mesh, plan=plan)
            model = build(plan)
            try:
                prepare(plan, here if model is None else model.parcompile_mesh, model)
                said.append("")
            except RunError as error:
                said.append(str(error))
    return said


@pytest.mark.ranks
def test_a_forgotten_long_window_and_a_forgotten_switch_are_found_whether_or_not_there_is_an_original() -> None:
    dynamic = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
    plans = [
        family_plan("mistral", 2, {"cp": 2}, sliding_window=300),
        family_plan("llama", 2, {"cp": 2}, max_position_embeddings=300, rope_parameters=dynamic),
        family_plan("llama", 2, {"cp": 2}),
    ]
    plans = [
        replace(one, spec=replace(one.spec, training=replace(one.spec.training, sequence_length=1024))) for one in plans
    ]
    first, second = run_ranks(2, broken, plans)
    assert first == second
    *found, whole, loaded = first
    assert [one for one in found if "(found in a small model of the same configuration: 2 layers" not in one] == []
    assert ["self_attn.o_proj differs" in one for one in found[:2]] == [True, True]
    assert (whole, loaded) == ("", "")
