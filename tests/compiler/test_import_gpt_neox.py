"""gpt-neox configurations as specs: what is exported comes back; gpt-neox's defaults and arithmetic are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from decoder_cases import FAMILIES, compiled, specs
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from parcompile.backends.architecture import architecture_of
from parcompile.backends.gpt_neox.read import IMPORTER
from parcompile.backends.gpt_neox.write import arguments, losses, tree
from parcompile.backends.importer import RefusedError
from parcompile.backends.reading import Outcome
from parcompile.importing import Imported, import_tree

MACHINES: dict[tuple[str, ...], Any] = {("cluster", "nodes"): 2, ("cluster", "gpus_per_node"): 8}
EXPRESSIBLE = [
    name for name, family in FAMILIES.items() if name in ("llama", "mistral", "starcoder2", "gpt_neox", "gpt2")
]
SMALL = {
    "pipe_parallel_size": 1,
    "model_parallel_size": 2,
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 512,
    "max_position_embeddings": 512,
    "pos_emb": "rotary",
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 6e-4}},
    "train_iters": 1000,
    "lr_decay_style": "constant",
    "warmup": 0.0,
}


def imported(given: dict[str, Any], vocab: int = 1000) -> Imported:
    return import_tree(given, IMPORTER, {**MACHINES, ("model", "vocab_size"): vocab})


def model(**options: Any) -> dict[str, Any]:
    result = imported({**SMALL, **options})
    assert result.plan is not None, (result.questions, [one.message for one in result.diagnostics])
    return dict(result.spec["model"])


@pytest.mark.parametrize("family", EXPRESSIBLE)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_exported_comes_back(family: str, data: st.DataObject) -> None:
    spec = data.draw(specs((family,)))
    spec["parallelism"] = {name: spec["parallelism"][name] for name in ("tp", "pp", "sequence_parallel")}
    spec["training"].pop("global_batch_size")
    plan = compiled(spec)
    assume(plan is not None)
    assert plan is not None
    lost = losses(plan)
    assume(not any(loss.fatal for loss in lost))
    result = imported(tree(arguments(plan)), spec["model"]["vocab_size"])
    assert result.plan is not None, (result.questions, [one.message for one in result.diagnostics])
    again, before = result.plan.spec, plan.spec
    assert again.zero_stage == before.zero_stage
    assert again.parallelism == before.parallelism
    ways = [architecture_of(one.model.hf_config, one.model.shape) for one in (again, before)]
    if ways[1].embedding_dropout != ways[1].hidden_dropout:
        ways[1] = dataclasses.replace(ways[1], embedding_dropout=ways[1].hidden_dropout)  # a named loss
    assert ways[0] == ways[1]
    shapes = [dataclasses.replace(one.model.shape, model_type="", sliding_window=None) for one in (again, before)]
    assert shapes[0] == shapes[1]
    if not [loss for loss in lost if not loss.what.startswith("dropout")]:
        assert again.training == before.training
        assert result.of(Outcome.LOST) == []
        assert arguments(result.plan) == arguments(plan)


def test_where_its_default_differs_from_ours_it_is_written_out() -> None:
    result = imported(SMALL)
    assert result.plan is not None
    optimizer = result.plan.spec.training.optimizer
    assert (optimizer.weight_decay, optimizer.betas, optimizer.eps) == (0.1, (0.9, 0.999), 1e-8)
    assert result.plan.spec.training.precision.value == "fp32"
    assert result.plan.spec.training.gradient_clipping == 1.0
    assert result.plan.spec.training.gradient_accumulation_steps == 1


def test_a_gated_mlp_is_a_third_of_what_is_written_rounded_up() -> None:
    """llama2/7B of its repository: 32768 stands for Llama's 11008."""
    gated = {"activation": "swiglu", "norm": "rmsnorm", "use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    gated["model_parallel_size"] = 1
    found = model(**gated, intermediate_size=32768, mlp_multiple_of=256, no_weight_tying=True)
    assert (found["model_type"], found["intermediate_size"]) == ("llama", 11008)
    assert model(**gated)["intermediate_size"] == 341  # 4 · 256 · 2/3 / 2
    assert model()["intermediate_size"] == 1024


def test_precision_is_read_from_either_place() -> None:
    for options, precision in (
        ({"precision": "bfloat16"}, "bf16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": False}}, "fp32"),
    ):
        result = imported({**SMALL, **options})
        assert result.plan is not None
        assert result.plan.spec.training.precision.value == precision


def test_an_optimizer_that_a_spec_has_not_is_asked_for() -> None:
    result = imported({**SMALL, "optimizer": {"type": "Lamb", "params": {"lr": 0.011}}})
    assert [".".join(one.path) for one in result.questions] == ["training.optimizer"]
    assert "Lamb" in result.questions[0].why


def test_the_vocabulary_is_asked_for() -> None:
    result = import_tree(SMALL, IMPORTER, MACHINES)
    assert [".".join(one.path) for one in result.questions] == ["model.vocab_size"]


def test_a_schedule_that_a_spec_cannot_say_is_named() -> None:
    result = imported({**SMALL, "lr_decay_style": "cosine", "warmup": 0.01, "min_lr": 6e-5})
    lost = {one.option: one.detail for one in result.of(Outcome.LOST)}
    assert "rises from the lowest rate (6e-05), that of gpt-neox from 0" in lost["min_lr"]
    whole = imported({**SMALL, "lr_decay_style": "cosine", "warmup": 0.01, "min_lr": 0.0})
    assert whole.spec["training"]["lr_scheduler"] == {"type": "cosine", "warmup_steps": 10, "min_lr": 0.0}


@pytest.mark.parametrize(
    "options",
    [
        {"attention_config": [[["mamba"], 4]]},
        {"attention_config": [[["gmlp"], "all"]]},
        {"attention_config": [[["local", "global"], "all"]]},
        {"moe_num_experts": 8},
        {"pos_emb": "alibi"},
        {"norm": "scalenorm"},
        {"gpt_j_residual": True, "gpt_j_tied": True},
        {"activation": "mish"},
        {"use_mup": True},
    ],
)
def test_models_that_no_spec_expresses_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=next(reversed(options))):
        imported({**SMALL, **options})


def test_keys_of_deepspeed_are_carried_as_such() -> None:
    zero = {"stage": 1, "reduce_bucket_size": 500000000}
    result = imported({**SMALL, "zero_optimization": zero, "wall-clock-breakdown": True, "data-path": "x"})
    assert result.spec["zero"] == {"stage": 1}
    assert result.spec["deepspeed"] == {
        "zero_optimization": {"reduce_bucket_size": 500000000},
        "wall_clock_breakdown": True,
    }
    outcomes = {one.option: one.outcome for one in result.accounts}
    assert outcomes["data_path"] is Outcome.NO_EFFECT
    assert outcomes["wall_clock_breakdown"] is Outcome.CARRIED
