"""Models none of whose layers attends are read as they are published, and nothing of them speaks of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parcompile.backends.registry import losses
from parcompile.cost.collectives import hidden_bytes
from parcompile.cost.flops import attention_flops_per_token, matmul_parameters, model_flops_per_token
from parcompile.layout.shards import tensor_layout
from parcompile.model.blocks.recurrent import Recurrent
from parcompile.model.derived_rows import parameter_table
from parcompile.model.hf_config import ModelConfigError, shape_from_config
from parcompile.plan import Plan, compile_plan
from parcompile.plan.sections import summary
from parcompile.rules import check
from parcompile.spec.resolve import Resolution
from parcompile.spec.values import workload_of

MAMBA_130M: dict[str, Any] = {
    "model_type": "mamba",
    "conv_kernel": 4,
    "expand": 2,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 16,
    "time_step_rank": 48,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 50280,
}
"""state-spaces/mamba-130m-hf."""
MAMBA_2_8B = {
    **MAMBA_130M,
    "hidden_size": 2560,
    "intermediate_size": 5120,
    "num_hidden_layers": 64,
    "time_step_rank": 160,
}
"""state-spaces/mamba-2.8b-hf."""
FALCON_MAMBA_7B = {
    **MAMBA_130M,
    "model_type": "falcon_mamba",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 64,
    "time_step_rank": 256,
    "vocab_size": 65024,
    "tie_word_embeddings": False,
}
"""tiiuae/falcon-mamba-7b."""
CODESTRAL: dict[str, Any] = {
    "model_type": "mamba2",
    "chunk_size": 256,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_size": 4096,
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "rms_norm": True,
    "state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 32768,
}
"""mistralai/Mamba-Codestral-7B-v0.1."""
MAMBA2_2_7B = {
    **CODESTRAL,
    "hidden_size": 2560,
    "n_groups": 1,
    "num_heads": 80,
    "tie_word_embeddings": True,
    "vocab_size": 50288,
}
"""The sizes of state-spaces/mamba2-2.7b."""


def resolution(config: dict[str, Any], folder: Path, parallelism: dict[str, Any], **more: Any) -> Resolution:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tree = {
        "version": 1,
        "name": "states",
        "model": {"hf_config": "config.json"},
        "cluster": {"nodes": 2, "gpus_per_node": 8, "accelerator": "h100-sxm"},
        "parallelism": parallelism,
        "training": {
            "sequence_length": 4096,
            "micro_batch_size": 1,
            "activation_checkpointing": "full",
            "gradient_accumulation_dtype": "fp32",
            **more,
        },
    }
    return Resolution(tree, folder=folder)


def planned(config: dict[str, Any], folder: Path, parallelism: dict[str, Any], **more: Any) -> Plan:
    found = resolution(config, folder, parallelism, **more)
    diagnostics = check(found)
    assert not [one for one in diagnostics if one.is_error], diagnostics
    return compile_plan(found.spec(), found.tree, diagnostics)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (MAMBA_130M, 129_135_360),
        (MAMBA_2_8B, 2_768_345_600),
        (FALCON_MAMBA_7B, 7_272_665_088),
        (CODESTRAL, 7_285_403_648),
        (MAMBA2_2_7B, 2_702_599_680),
    ],
    ids=["mamba-130m", "mamba-2.8b", "falcon-mamba-7b", "mamba-codestral-7b", "mamba2-2.7b"],
)
def test_a_published_model_has_the_published_number_of_parameters(config: dict[str, Any], parameters: int) -> None:
    shape = shape_from_config(config)
    assert not shape.attends
    assert parameter_table(shape).numel == parameters


def test_channels_are_counted_by_intermediate_size_before_expand() -> None:
    """As transformers' classes do: falcon-mamba-7b states both."""
    shape = shape_from_config({**FALCON_MAMBA_7B, "expand": 16})
    assert shape == shape_from_config(FALCON_MAMBA_7B)
    without = {key: value for key, value in FALCON_MAMBA_7B.items() if key != "intermediate_size"}
    assert shape_from_config(without) == shape
    wide = shape_from_config({**without, "expand": 4})
    carried = wide.part(Recurrent)
    assert carried is not None
    assert carried.values == 16384


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (MAMBA_130M, {"layer_types": ["linear_attention"] * 24}, "layer_types: transformers computes it"),
        (MAMBA_130M, {"ssm_state_size": 16}, "ssm_state_size: transformers reads state_size"),
        (MAMBA_130M, {"intermediate_size": None}, "intermediate_size: transformers builds no layer with null"),
        (MAMBA_130M, {"time_step_rank": "none"}, "time_step_rank is 'none': it has to be a whole number"),
        (MAMBA_130M, {"expand": 1.5}, "expand is 1.5: it has to be a whole number"),
        (MAMBA_130M, {"use_mambapy": True}, "use_mambapy: the scan of mamba.py has not been compared"),
        (MAMBA_130M, {"use_bias": None}, "use_bias is null, which transformers refuses"),
        (MAMBA_130M, {"use_conv_bias": None}, "use_conv_bias is null, which transformers refuses"),
        (MAMBA_130M, {"residual_in_fp32": None}, "residual_in_fp32 is null, which transformers refuses"),
        (MAMBA_130M, {"vocab_size": None}, "vocab_size is null"),
        (FALCON_MAMBA_7B, {"use_mambapy": True}, "use_mambapy: transformers reads use_falcon_mambapy"),
        (FALCON_MAMBA_7B, {"use_falcon_mambapy": True}, "use_falcon_mambapy: the scan of mamba.py"),
        (CODESTRAL, {"rms_norm": False}, "rms_norm: transformers builds the gated norm whatever it says"),
        (CODESTRAL, {"head_dim": 32}, "num_heads 128 x head_dim 32 = 4096 is not expand 2 x hidden_size 4096 = 8192"),
        (CODESTRAL, {"num_heads": 96}, "expand 2 x hidden_size 4096 = 8192 / num_heads 96 is not whole"),
        (CODESTRAL, {"n_groups": 3}, "num_heads 128 / n_groups 3 is not whole"),
    ],
)
def test_what_such_a_model_cannot_be_is_refused_by_key(
    config: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shape_from_config({**config, **changes})
    assert str(caught.value).startswith(reason)
    assert caught.value.key in changes


def test_heads_of_states_that_are_left_out_are_those_of_the_class() -> None:
    """Its head_dim is 64, whatever the hidden size is: a configuration that does not fit it is refused."""
    without = {key: value for key, value in CODESTRAL.items() if key != "head_dim"}
    assert shape_from_config(without) == shape_from_config(CODESTRAL)
    with pytest.raises(ModelConfigError, match="num_heads 64 x head_dim 64 = 4096 is not expand 2 x hidden_size 4096"):
        shape_from_config({**without, "num_heads": 64})


def test_ranks_have_channels_or_heads_of_their_own() -> None:
    rows = {one.name.partition("mixer.")[2]: one for one in parameter_table(shape_from_config(FALCON_MAMBA_7B)).layer}
    assert tensor_layout(rows["in_proj.weight"], 4).ranges[1] == ((2048, 4096), (10240, 12288))  # type: ignore[index]
    assert tensor_layout(rows["x_proj.weight"], 4).local_shape == (256 + 32, 2048)
    assert not any("norm" in name for name in rows if name)
    rows = {one.name.partition("mixer.")[2]: one for one in parameter_table(shape_from_config(MAMBA2_2_7B)).layer}
    assert tensor_layout(rows["in_proj.weight"], 4).replicas == 4
    assert tensor_layout(rows["norm.weight"], 4).local_shape == (1280,)


@pytest.mark.parametrize("config", [FALCON_MAMBA_7B, CODESTRAL], ids=["mamba-1", "mamba-2"])
def test_operations_are_those_of_products_and_of_the_recurrence(config: dict[str, Any]) -> None:
    shape = shape_from_config(config)
    assert attention_flops_per_token(shape, 4096) == 0
    scan = 3 * 64 * sum(one.flops_per_token(carried=False) for one in shape.parts)
    assert model_flops_per_token(shape, 4096) == 6 * matmul_parameters(shape) + scan
    assert model_flops_per_token(shape, 4096) == model_flops_per_token(shape, 65536)


@pytest.mark.parametrize("config", [FALCON_MAMBA_7B, CODESTRAL, MAMBA2_2_7B], ids=["falcon", "8 groups", "1 group"])
def test_a_plan_over_every_axis_sends_states_and_no_keys(config: dict[str, Any], tmp_path: Path) -> None:
    axes = {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True}
    plan = planned(config, tmp_path, axes)
    assert not plan.refusals
    assert plan.kv_replicas == 1
    text = summary(plan)
    assert "zigzag, states from piece to piece; no layer attends" in " ".join(text.split())


@pytest.mark.parametrize(("wide", "width"), [(True, 4), (False, 2)])
def test_stages_hand_on_hidden_states_in_fp32_where_the_model_keeps_them_so(
    wide: bool, width: int, tmp_path: Path
) -> None:
    plan = planned({**FALCON_MAMBA_7B, "residual_in_fp32": wide}, tmp_path, {"tp": 4, "pp": 2})
    assert hidden_bytes(workload_of(plan.spec)) == 4096 * 4096 * width


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_a_target_without_such_layers_refuses_the_type_by_name(target: str, tmp_path: Path) -> None:
    plan = planned(CODESTRAL, tmp_path, {"tp": 2})
    fatal = [one.what for one in losses(plan, [target])[target] if one.fatal]
    assert fatal[0] == "model_type mamba2"


def found_codes(config: dict[str, Any], folder: Path, axes: dict[str, Any], **more: Any) -> dict[str, str]:
    return {one.code: one.message for one in check(resolution(config, folder, axes, **more))}


def test_rules_speak_of_what_such_a_model_has(tmp_path: Path) -> None:
    found = found_codes({**FALCON_MAMBA_7B, "intermediate_size": 8196}, tmp_path, {"tp": 8})
    assert found["T012"] == "intermediate_size 8196 on tp 8: 8196 / 8 is not whole; nearest tp: 4, 6"
    found = found_codes(CODESTRAL, tmp_path, {"tp": 16})
    assert found["T012"] == "n_groups 8 on tp 16: 8 / 16 is not whole; nearest tp: 4, 8"
    assert not found.keys() & {"T001", "T002", "T004"}
    found = found_codes(CODESTRAL, tmp_path, {"cp": 2, "cp_layout": "striped"})
    assert found["C010"] == "cp_layout striped with 64 linear-attention/SSM layers (Mamba-2 layer)"
    found = found_codes(CODESTRAL, tmp_path, {"cp": 2, "cp_implementation": "ulysses"})
    assert found["C008"] == "cp_implementation ulysses has no effect: no layer attends"
    # No position ends, and each token of a state costs the same wherever it stands.
    found = found_codes(CODESTRAL, tmp_path, {"cp": 2, "cp_layout": "contiguous"}, sequence_length=1048576)
    assert not found.keys() & {"S001", "S004", "C004", "C005"}
