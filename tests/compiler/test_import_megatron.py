"""Megatron-LM arguments as specs: what is exported comes back, and Megatron-LM's own defaults are kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from decoder_cases import FAMILIES, compiled, specs
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import parcompile
from parcompile.backends.architecture import architecture_of
from parcompile.backends.artefacts import effective_order
from parcompile.backends.megatron.arguments import Word, parsed
from parcompile.backends.megatron.read import IMPORTER
from parcompile.backends.megatron.write import arguments, as_list, losses
from parcompile.backends.reading import Outcome, RefusedError
from parcompile.importing import Imported, import_tree

MACHINES: dict[tuple[str, ...], Any] = {("cluster", "nodes"): 2, ("cluster", "gpus_per_node"): 8}


def imported(words: list[str], **answers: Any) -> Imported:
    """The import of a command line's words; `training_lr=1` answers for training.lr."""
    found = parsed([Word(word, word, (), None) for word in words], "NVIDIA/Megatron-LM")
    assert not found.problems
    more = {tuple(name.split("_", 1)): value for name, value in answers.items()}
    return import_tree(found.values, IMPORTER, {**MACHINES, **more})


def test_yarn_without_a_factor_is_a_loss_and_no_traceback(tmp_path: Path) -> None:
    """transformers takes null, for the ratio of the positions; Megatron-LM has no word for it."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": 16}
    config = {"model_type": "llama", **sizes, "vocab_size": 128, "max_position_embeddings": 64, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    training = {"sequence_length": 64, "global_batch_size": 1, "micro_batch_size": 1}
    cluster = {"nodes": 1, "gpus_per_node": 1}
    model = {"hf_config": str(tmp_path / "config.json")}
    plan = parcompile.compile({"version": 1, "model": model, "cluster": cluster, "training": training})
    assert [one.what for one in losses(plan) if one.fatal] == ["rope_scaling without a factor"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_exported_comes_back(family: str, data: st.DataObject) -> None:
    """Models of every family, experts, latent attention, stages, context parallelism, precision, schedules."""
    tree = data.draw(specs((family,), of_routers=True))
    plan = compiled(tree)
    assume(plan is not None)
    assert plan is not None
    assume(not any(loss.fatal for loss in losses(plan)))
    result = imported(as_list(arguments(plan)))
    assert result.plan is not None, (result.questions, [one.message for one in result.diagnostics])
    again, before = result.plan.spec, plan.spec
    assert result.of(Outcome.LOST) == []
    assert again.zero_stage == before.zero_stage
    orders = [effective_order(one.parallelism) for one in (again, before)]
    assert orders[0] == orders[1]  # an axis of one rank stands nowhere
    assert dataclasses.replace(again.parallelism, order=before.parallelism.order) == before.parallelism
    # Megatron-LM decays no vectors, whatever the plan does, which is a named loss.
    left_out = "vectors" if before.training.optimizer.weight_decay else None
    optimizer = dataclasses.replace(before.training.optimizer, no_weight_decay=left_out)
    assert again.training == dataclasses.replace(before.training, optimizer=optimizer)
    ways = [architecture_of(one.model.hf_config, one.model.shape) for one in (again, before)]
    if ways[1].embedding_dropout != ways[1].hidden_dropout:
        ways[1] = dataclasses.replace(ways[1], embedding_dropout=ways[1].hidden_dropout)  # a named loss
    assert ways[0] == ways[1]
    shapes = [
        dataclasses.replace(
            shape, model_type="", attention=dataclasses.replace(shape.attention, sliding_window=None), stated=()
        )
        for shape in (again.model.shape, before.model.shape)
    ]
    if before.model.shape.moe and before.model.shape.moe.first_moe_layer == 0:
        shapes = [dataclasses.replace(one, intermediate_size=0) for one in shapes]  # no layer has it
    assert shapes[0] == shapes[1]
    assert arguments(result.plan) == arguments(plan)


def carried(words: str, **answers: Any) -> Imported:
    return imported(words.split(), **answers)


MODEL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --max-position-embeddings 512 "
    "--vocab-size 1000 --seq-length 512 --micro-batch-size 1 --global-batch-size 16"
)
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"


def test_where_megatrons_default_differs_from_ours_it_is_written_out() -> None:
    result = carried(f"{MODEL} {LLAMA} --lr 1e-4")
    assert result.plan is not None
    optimizer, model = result.plan.spec.training.optimizer, result.spec["model"]
    assert (optimizer.weight_decay, optimizer.betas, optimizer.eps) == (0.01, (0.9, 0.999), 1e-8)
    assert (model["model_type"], model["rms_norm_eps"]) == ("llama", 1e-5)
    assert model["attention_dropout"] == 0.1
    assert result.plan.spec.training.precision.value == "fp32"


@pytest.mark.parametrize(("decay", "left_out"), [("0.01", "vectors"), ("0.1", "vectors"), ("0.0", None)])
def test_what_megatron_does_not_decay_is_carried(decay: str, left_out: str | None) -> None:
    result = carried(f"{MODEL} {LLAMA} --lr 1e-4 --weight-decay {decay}")
    assert result.plan is not None
    assert result.plan.spec.training.optimizer.no_weight_decay == left_out
    assert not [one for one in losses(result.plan) if "norms" in one.what]


def test_what_megatron_leaves_to_its_tokenizer_is_asked_for() -> None:
    result = carried(MODEL.replace("--vocab-size 1000", "") + f" {LLAMA} --lr 1e-4")
    assert [".".join(one.path) for one in result.questions] == ["model.vocab_size"]


def test_every_option_is_accounted_for() -> None:
    result = carried(
        f"{MODEL} {LLAMA} --lr 1e-4 --save-interval 10 --rampup-batch-size 8 8 100 --attention-backend flash"
    )
    outcomes = {one.option: one.outcome for one in result.accounts}
    assert outcomes["hidden_size"] is Outcome.CARRIED
    assert outcomes["save_interval"] is Outcome.NO_EFFECT
    assert outcomes["rampup_batch_size"] is outcomes["attention_backend"] is Outcome.CARRIED
    assert result.spec["backends"] == {"megatron": {"attention_backend": "flash"}}


@pytest.mark.parametrize(
    "option", ["--hybrid-override-pattern M*M*", "--bert-no-binary-head", "--decoder-seq-length 128", "--patch-dim 16"]
)
def test_models_that_no_spec_expresses_are_refused(option: str) -> None:
    with pytest.raises(RefusedError, match=option.split()[0]):
        carried(f"{MODEL} {LLAMA} {option}")


EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-router-load-balancing-type none"


@pytest.mark.parametrize(
    ("more", "modules", "word", "lost"),
    [
        ("", "core_attn mlp layernorm", "mlp+norms", 'the plan writes ["layernorm", "mlp"]'),
        ("", "mlp layernorm", "mlp+norms", ""),
        ("", "layernorm", "norms", ""),
        ("", "mlp mla_up_proj", "mlp", "does not recompute mla_up_proj alone"),
        ("", "moe_act", "selective", "does not recompute moe_act alone"),
        (EXPERTS, "moe", "mlp", ""),
        (EXPERTS, "mlp layernorm", "norms", "does not recompute mlp alone"),
    ],
)
def test_modules_that_are_recomputed_are_parts_where_these_are_the_same(
    more: str, modules: str, word: str, lost: str
) -> None:
    words = f"{MODEL} {LLAMA} {more} --attention-dropout 0 --hidden-dropout 0 --lr 1e-4"
    result = carried(f"{words} --recompute-granularity selective --recompute-modules {modules}")
    assert result.spec["training"]["activation_checkpointing"] == word
    (account,) = (one for one in result.accounts if one.option == "recompute_modules")
    assert account.outcome is (Outcome.LOST if lost else Outcome.CARRIED)
    assert lost in account.detail
    assert result.plan is not None and not account.changes
    if not lost:
        assert sorted(arguments(result.plan)["recompute_modules"]) == sorted(modules.split())


@pytest.mark.parametrize(
    ("words", "capacity", "lost"),
    [
        ("--moe-expert-capacity-factor 1.25", 1.25, []),
        ("--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity", 1.25, []),
        ("--moe-expert-capacity-factor -1 --moe-token-drop-policy position", None, []),
        ("--moe-expert-capacity-factor 2 --moe-token-drop-policy position", 2.0, ["moe_token_drop_policy"]),
    ],
)
def test_a_capacity_of_experts_is_carried_with_the_policy_that_a_plan_has(
    words: str, capacity: float | None, lost: list[str]
) -> None:
    result = carried(f"{MODEL} {LLAMA} {EXPERTS} --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 {words}")
    assert result.plan is not None, result.questions
    router = result.plan.spec.training.router
    assert (None if router is None else router.expert_capacity) == capacity
    assert [one.option for one in result.of(Outcome.LOST) if one.option.startswith("moe_")] == lost
    if capacity is not None:
        assert {"moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"} <= arguments(result.plan).keys()
        assert [one.what for one in losses(result.plan)].count(f"expert_capacity {capacity}") == 2


@pytest.mark.parametrize(("modules", "word"), [(["mlp", "moe"], "mlp"), (["moe"], "selective"), (["mlp"], "selective")])
def test_dense_mlps_and_experts_are_recomputed_together(modules: list[str], word: str) -> None:
    tree = {
        "version": 1,
        "model": {"preset": "deepseek-v3"},
        "cluster": {"nodes": 64, "gpus_per_node": 8, "accelerator": "h200"},
        "parallelism": {"tp": 8, "ep": 8},
        "training": {"sequence_length": 512, "global_batch_size": 64, "activation_checkpointing": "mlp"},
    }
    plan = compiled(tree)
    assert plan is not None
    found = arguments(plan)
    assert found["recompute_modules"] == ["mlp", "moe"]
    result = imported(as_list({**found, "recompute_modules": modules}))
    assert result.spec["training"]["activation_checkpointing"] == word


def test_core_attention_is_what_selective_recomputes() -> None:
    result = carried(f"{MODEL} {LLAMA} --lr 1e-4 --recompute-granularity selective --recompute-modules core_attn")
    assert result.spec["training"]["activation_checkpointing"] == "selective"
    assert {one.option: one.outcome for one in result.accounts}["recompute_modules"] is Outcome.NO_EFFECT


def test_attention_that_is_recomputed_whole_is_a_loss() -> None:
    tree = {
        "version": 1,
        "model": {"preset": "llama-3-8b"},
        "cluster": {"gpus_per_node": 8, "accelerator": "h200"},
        "parallelism": {"tp": 8},
        "training": {"sequence_length": 512, "global_batch_size": 8, "activation_checkpointing": "attention+mlp"},
    }
    plan = compiled(tree)
    assert plan is not None
    assert arguments(plan)["recompute_modules"] == ["core_attn", "mlp"]
    (loss,) = (one for one in losses(plan) if "activation_checkpointing" in one.what)
    assert not loss.fatal and "with its projections" in loss.why


def test_experts_come_back_as_experts() -> None:
    result = carried(
        f"{MODEL} {LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --attention-dropout 0 "
        "--hidden-dropout 0 --moe-router-load-balancing-type none --lr 1e-4 --sequence-parallel"
    )
    assert result.plan is not None, [one.message for one in result.diagnostics]
    moe = result.plan.spec.model.shape.moe
    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_token, moe.intermediate_size) == (8, 2, 512)


def test_a_model_that_is_named_may_be_one_that_megatron_has_no_options_for() -> None:
    """Llama 3.2 scales its positions by 32, `--use-rope-scaling` by 8."""
    words = ["--micro-batch-size", "1", "--lr", "1e-4", "--seq-length", "2048", "--bf16"]
    tree = parsed([Word(word, word, (), None) for word in words], "NVIDIA/Megatron-LM").values
    found = import_tree(tree, IMPORTER, {**MACHINES, ("model",): {"preset": "llama-3.2-1b"}})
    assert found.plan is not None
    assert {one.option for one in found.of(Outcome.CARRIED)} >= {"micro_batch_size", "lr", "seq_length", "bf16"}
