"""Preflight agrees with plans that are right, counts what live ranks send, and names what is planted wrong."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import random
import re
import resource
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from expert_runs import Case, one_sided
from families import tiny_config
from ranks import run_ranks
from test_user_module import user_plan
from torch import nn
from training_runs import initial_model, make_plan, samples

from parcompile.cli import main
from parcompile.cli.preflight import command
from parcompile.cost import collectives as estimated
from parcompile.cost import footprint
from parcompile.cost.collectives import stage_exchanges
from parcompile.model.presets import find_preset, presets
from parcompile.pipeline import compile_file
from parcompile.plan import Plan, plan_tree
from parcompile.runtime.preflight import (
    MessageCounter,
    Report,
    Tally,
    chosen_ranks,
    compare_static,
    distinct_ranks,
    peak_bytes,
    preflight,
)
from parcompile.runtime.preflight.counting import Counts, by_group
from parcompile.runtime.preflight.findings import Verdict
from parcompile.runtime.preflight.stand_in import MetaTracker, stand_in
from parcompile.runtime.preflight.step import build_sharded, run_step
from parcompile.spec.values import workload_of
from parcompile.user_files import shipped

STAGES = {
    "pp2": (2, {"pp": 2}, {"micro_batch_size": 1}),
    "pp2 tp2 sp, tied": (4, {"pp": 2, "tp": 2, "sequence_parallel": True}, {"micro_batch_size": 2}),
    "pp2 cp2, two virtual stages, tied, recomputed": (
        4,
        {"pp": 2, "cp": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {"micro_batch_size": 1, "activation_checkpointing": "full"},
    ),
    "pp2 tp2 sp, the first stage recomputed": (
        4,
        {"pp": 2, "tp": 2, "sequence_parallel": True},
        {"micro_batch_size": 1, "activation_checkpointing": ["full", "none"]},
    ),
    "pp3 of uneven stages": (3, {"pp": 3, "num_layers_in_first_pipeline_stage": 1}, {"micro_batch_size": 1}),
    "pp2 dp2, bf16": (4, {"pp": 2, "dp": 2}, {"micro_batch_size": 1, "precision": "bf16"}),
}
"""Pipelines, of models with five layers where stages are uneven and four elsewhere."""

LAYOUTS = {
    "dp2": (2, {}, {}),
    "tp2": (2, {"tp": 2}, {}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}, {}),
    "cp2": (2, {"cp": 2}, {}),
    "tp2 cp2": (4, {"tp": 2, "cp": 2}, {"global_batch_size": 4, "micro_batch_size": 2}),
    "tp2 cp2 sp, recomputed": (
        4,
        {"tp": 2, "cp": 2, "sequence_parallel": True},
        {"activation_checkpointing": "full"},
    ),
    "tp4 on 2 kv heads": (4, {"tp": 4}, {"precision": "bf16"}),
    "dp2, bf16 summed in fp32": (
        2,
        {},
        {"precision": "bf16", "gradient_accumulation_dtype": "fp32", "micro_batch_size": 1},
    ),
    "dp2 with ZeRO-0, bf16 summed in fp32": (
        2,
        {},
        {"precision": "bf16", "gradient_accumulation_dtype": "fp32", "micro_batch_size": 1},
    ),
    "tp2 cp2 with ZeRO-0, bf16": (4, {"tp": 2, "cp": 2, "sequence_parallel": True}, {"precision": "bf16"}),
    "dp2 with ZeRO-2, two micro-batches": (2, {}, {"micro_batch_size": 1}),
    "dp3 with ZeRO-2, bf16 summed in fp32": (
        3,
        {},
        {
            "precision": "bf16",
            "gradient_accumulation_dtype": "fp32",
            "global_batch_size": 6,
            "micro_batch_size": 1,
        },
    ),
    "tp2 cp2 with ZeRO-2, recomputed": (4, {"tp": 2, "cp": 2}, {"activation_checkpointing": "full"}),
    **STAGES,
}


def plan_of(name: str) -> Plan:
    world, parallelism, training = LAYOUTS[name]
    model = {"num_hidden_layers": 5 if "uneven" in name else 4 if name in STAGES else 2}
    model["tie_word_embeddings"] = "tied" in name
    extra = {"zero": {"stage": 2 if "ZeRO-2" in name else 0 if "ZeRO-0" in name else 1}}
    return make_plan(world, dict(parallelism), model=model, training=dict(training), extra=extra)


def live_counts(rank: int, plan: Plan, built: Callable[[Plan], nn.Module] = initial_model) -> Counts:
    """What one step of the engine on live ranks sends, without its messages of a few bytes."""
    from parcompile.runtime import initialize

    engine, _, loader, _ = initialize(plan=plan, model=built(plan), training_data=samples(plan))
    batches = iter(loader)
    # The loss over all ranks is what `train_batch` returns; preflight counts the step without it.
    with MessageCounter(engine.mesh.groups, engine.mesh.lanes.values()) as counting, engine.loop.together():
        engine.loop.train(batches)
    return {key: one for key, one in counting.counts().items() if key[1] != "control" and one.wire_bytes}


def faults(report: Report) -> dict[str, str]:
    return {one.subject: one.detail for one in report.differing}


@pytest.mark.parametrize("name", LAYOUTS)
def test_preflight_counts_what_live_ranks_send_and_the_estimate_says_the_same(name: str) -> None:
    plan = plan_of(name)
    report = preflight(plan, range(plan.world_size))
    assert report.agrees, report.text()
    for rank, counts in enumerate(run_ranks(plan.world_size, live_counts, plan)):
        stand_in = {key: one for key, one in report.counts[rank].items() if one.wire_bytes}
        assert stand_in == counts
        pp_rank, work = plan.groups.grid.coordinates(rank)["pp"], workload_of(plan.spec)
        sent = estimated.collectives(work, plan.spec.stages[pp_rank]) | stage_exchanges(work, pp_rank)
        # gloo carries some sums and gathers in other kinds of messages, which send as many bytes.
        planned = by_group({key: Tally(one.messages, one.wire_bytes) for key, one in sent.items()})
        assert {name: (one.messages, pytest.approx(one.wire_bytes)) for name, one in planned.items()} == {
            name: (one.messages, one.wire_bytes) for name, one in by_group(counts).items()
        }


def test_a_sequence_that_tp_does_not_divide_is_sent_with_its_padding() -> None:
    odd, even = (
        make_plan(2, {"tp": 2, "sequence_parallel": True}, training={"sequence_length": length}) for length in (15, 16)
    )
    report = preflight(odd, [0])
    assert report.agrees, report.text()
    padded, whole = (estimated.collectives(workload_of(one.spec), one.spec.stages[0]) for one in (odd, even))
    assert padded["tp", "reduce-scatter"] == whole["tp", "reduce-scatter"]


@pytest.mark.parametrize("wide", [False, True])
def test_a_collective_of_direct_exchanges_between_cpus_is_one_message(wide: bool) -> None:
    """Slices of more than half a MiB travel from rank to rank, smaller ones in an all-to-all."""
    sizes = {"hidden_size": 1024, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    training = {"sequence_length": 1024 if wide else 64, "global_batch_size": 1, "micro_batch_size": 1}
    plan = make_plan(4, {"tp": 4, "sequence_parallel": True}, model=sizes, training=training)
    report = preflight(plan, [0])
    assert [one.subject for one in report.differing if one.subject not in ROUGHLY] == []
    sends = report.counts[0].get(("tp", "send"), Tally())
    assert (sends.messages > 1) is wide


def test_a_slice_off_by_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from parcompile.runtime.tensor_parallel import partial

    right = partial.take_ranges

    def shifted(tensor: Any, dim: int, ranges: Any, **options: Any) -> Any:
        if tensor.shape[dim] == 48 and ranges[0][0] > 0:  # the MLP's width, on all ranks but the first
            ranges = [(start - 1, stop - 1) for start, stop in ranges]
        return right(tensor, dim, ranges, **options)

    monkeypatch.setattr(partial, "take_ranges", shifted)
    found = faults(preflight(plan_of("tp2")))
    assert set(found) == {"parameter slices"}
    assert (
        "model.layers.0.mlp.gate_proj.weight holds 23..47 of dim 0, the plan says 24..48" in found["parameter slices"]
    )


def test_a_forgotten_kv_replica_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from parcompile.runtime.model.slices import Slices

    right = Slices.of
    monkeypatch.setattr(Slices, "of", lambda self, name: replace(right(self, name), replica_group=None))
    found = faults(preflight(plan_of("tp4 on 2 kv heads"), [0]))
    assert set(found) == {"sent over kv-replica"}
    assert "counted: nothing" in found["sent over kv-replica"]


def test_a_group_with_two_ranks_swapped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.distributed.new_group

    def swapped(ranks: list[int], **options: Any) -> Any:
        return right([0, 2] if ranks == [0, 1] else ranks, **options)

    monkeypatch.setattr(torch.distributed, "new_group", swapped)
    found = faults(preflight(plan_of("tp2 cp2"), [0]))
    assert "group tp is [0, 2], the plan says [0, 1]" in found["process groups"]


def test_a_wrong_vocabulary_padding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from parcompile.runtime.tensor_parallel import VocabParallelEmbedding

    right = VocabParallelEmbedding.from_embedding.__func__

    def wider(cls: Any, embedding: Any, *, padded_num_embeddings: int, **options: Any) -> Any:
        return right(cls, embedding, padded_num_embeddings=padded_num_embeddings + 16, **options)

    monkeypatch.setattr(VocabParallelEmbedding, "from_embedding", classmethod(wider))
    found = faults(preflight(plan_of("tp2"), [0]))
    assert "model.embed_tokens.weight is [40, 32], the plan says [32, 32]" in found["parameter shapes"]
    assert "parameter bytes" in found


def test_a_collective_on_the_wrong_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from parcompile.runtime import collectives

    right, mesh_groups = collectives.start_all_reduce, []

    def elsewhere(x: Any, group: Any) -> Any:
        return right(x, mesh_groups[-1])

    from parcompile.runtime import preflight as package

    build = package.build_sharded

    def remember(mesh: Any, *rest: Any) -> Any:
        mesh_groups.append(mesh.group("cp"))
        return build(mesh, *rest)

    monkeypatch.setattr(package, "build_sharded", remember)
    monkeypatch.setattr(collectives, "start_all_reduce", elsewhere)
    found = faults(preflight(plan_of("tp2 cp2"), [0]))
    assert {"sent over tp", "sent over cp"} <= set(found)
    assert "all-to-all" in found["sent over cp"]  # what gloo sums two ranks with


def test_an_estimate_of_memory_that_is_20_percent_low_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = footprint.stage_components

    def low(*arguments: Any, **options: Any) -> dict[str, float]:
        return {name: 0.8 * size for name, size in right(*arguments, **options).items()}

    monkeypatch.setattr(footprint, "stage_components", low)
    found = faults(preflight(plan_of("tp2"), [0]))
    assert set(found) == {"activations of a micro-batch", "peak of the step"}
    assert "10% are allowed" in found["activations of a micro-batch"]


def test_collections_of_a_step_leave_older_objects_alone_and_what_was_frozen_stays() -> None:
    plan = plan_of("tp2")
    with stand_in(plan, 0):
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    gc.freeze()
    try:
        preflight(plan, [0])
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_first_last_stages_and_corners_are_chosen() -> None:
    plan = make_plan(16, {"tp": 2, "cp": 2, "pp": 2}, training={"global_batch_size": 16})
    assert chosen_ranks(plan) == tuple(range(16))
    assert distinct_ranks(plan) == (0, 8, 15)


def test_of_stages_that_recompute_different_things_each_kind_runs() -> None:
    def stepping(recompute: object) -> tuple[int, ...]:
        training = {"micro_batch_size": 1, "activation_checkpointing": recompute}
        return distinct_ranks(make_plan(4, {"pp": 4}, model={"num_hidden_layers": 4}, training=training))

    assert stepping("full") == (0, 1, 3)
    assert stepping(["full", "full", "none", "none"]) == (0, 1, 2, 3)


def test_stages_of_a_pipeline_run_alone_and_their_messages_are_counted() -> None:
    report = preflight(plan_of("pp2"))
    assert report.agrees, report.text()
    assert "what comes in has shapes and no values" in report.text()
    # Four micro-batches, each [1, 16, 32] in fp32: the first stage sends hidden states, the last their gradients.
    assert [counts["pp", "send"] for counts in report.counts.values()] == [Tally(4, 4 * 16 * 32 * 4)] * 2


def test_a_message_between_stages_that_is_not_planned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from parcompile.runtime.transport import Lanes

    right = Lanes.send

    def twice(self: Lanes, target: int, tensors: Any, *, forward: bool) -> None:
        right(self, target, [*tensors, *tensors], forward=forward)

    monkeypatch.setattr(Lanes, "send", twice)
    assert set(faults(preflight(plan_of("pp2")))) == {"sent over pp"}


def test_the_command_prints_json_and_its_exit_code_says_whether_all_agrees(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan_tree(plan_of("tp2"))))
    result = CliRunner().invoke(command, [str(tmp_path), "--format", "json", "--ranks", "1"])
    tree = json.loads(result.stdout)
    assert (result.exit_code, tree["agrees"], tree["ranks"]) == (0, True, [1])
    right = footprint.stage_components
    monkeypatch.setattr(
        footprint, "stage_components", lambda *given: {name: size / 2 for name, size in right(*given).items()}
    )
    assert CliRunner().invoke(command, [str(tmp_path), "--ranks", "0"]).exit_code == 1


@pytest.mark.parametrize(
    ("ranks", "message"), [("2", "rank 2 is not in a world of 2"), ("one", "'one' is not a list of ranks")]
)
def test_ranks_that_do_not_exist_are_refused(tmp_path: Any, ranks: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan_tree(plan_of("tp2"))))
    result = CliRunner().invoke(command, [str(tmp_path), "--ranks", ranks])
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize(
    ("preset", "parallelism", "training"),
    [
        ("llama-3.2-1b", {"tp": 4}, {}),  # a tied head
        ("gemma-2-9b", {"tp": 2, "sequence_parallel": True}, {}),  # norms in fp32, capped scores
        ("mixtral-8x7b", {"tp": 2, "sequence_parallel": True}, {"activation_checkpointing": "full"}),
        ("pythia-6.9b", {"tp": 4}, {}),  # LayerNorm, biases, no gate
    ],
)
def test_models_of_real_width_agree_with_their_estimates(
    preset: str, parallelism: dict[str, Any], training: dict[str, Any]
) -> None:
    found = find_preset(preset)
    assert found is not None
    plan = make_plan(
        8,
        parallelism,
        model={**found.config, "num_hidden_layers": 3},
        training={
            "sequence_length": 1024,
            "global_batch_size": 16,
            "micro_batch_size": 1,
            "precision": "bf16",
            **training,
        },
        whole_model=True,
    )
    report = preflight(plan, [0])
    assert report.agrees, report.text()


MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_heads": 32,
    "state_size": 128,
    "n_groups": 8,
    "chunk_size": 256,
    "vocab_size": 16384,
}
LONGCAT: dict[str, Any] = {
    "model_type": "longcat_flash",
    "hidden_size": 1024,
    "ffn_hidden_size": 2048,
    "expert_ffn_hidden_size": 512,
    "num_layers": 2,
    "num_attention_heads": 16,
    "vocab_size": 16384,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "moe_topk": 4,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("config", "recompute"),
    [
        (MAMBA2, "full"),  # a scan that holds more than its layer keeps
        (MAMBA2, "none"),  # logits in fp32
        (LONGCAT, "full"),  # two layers that are recomputed as one
    ],
)
def test_a_recomputed_layer_and_the_head_agree_with_the_estimate(config: dict[str, Any], recompute: str) -> None:
    training = {
        "sequence_length": 1024,
        "global_batch_size": 2,
        "micro_batch_size": 1,
        "precision": "bf16",
        "activation_checkpointing": recompute,
    }
    report = preflight(make_plan(1, {}, model=config, training=training, whole_model=True), [0])
    assert report.agrees, report.text()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 3, "n_head": 12, "n_positions": 2048},
        {"model_type": "openai-gpt", "n_embd": 1024, "n_layer": 3, "n_head": 16, "n_positions": 1024, "afn": "gelu"},
        {
            "model_type": "opt",
            "hidden_size": 1024,
            "word_embed_proj_dim": 1024,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "max_position_embeddings": 2048,
            "dropout": 0.0,
        },
    ],
    ids=lambda config: config["model_type"],
)
def test_what_the_function_of_an_mlp_keeps_agrees_with_the_estimate(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    monkeypatch.setattr("parcompile.runtime.preflight.ACTIVATION_TOLERANCE", 0.05)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if "n_embd" in config else {}
    training = {"sequence_length": 1024, "global_batch_size": 2, "micro_batch_size": 1, "precision": "bf16"}
    model = {**config, **dropouts, "vocab_size": 4000}
    report = preflight(make_plan(1, {}, model=model, training=training, whole_model=True), [0])
    assert report.agrees, report.text()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_kimi_delta_attention_makes_in_backward_agrees_with_the_estimate(
    monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    monkeypatch.setattr("parcompile.runtime.preflight.ACTIVATION_TOLERANCE", 0.06)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4000, "moe_intermediate_size": 128}
    heads = {"linear_num_heads": 4, "linear_head_dim": 64, "max_position_embeddings": 1024}
    config = tiny_config("kimi_linear", **sizes, **heads)
    training = {"sequence_length": 1024, "global_batch_size": 2, "micro_batch_size": 1, "precision": "bf16"}
    training["activation_checkpointing"] = recompute
    report = preflight(make_plan(1, {}, model=config, training=training, whole_model=True), [0])
    assert report.agrees, report.text()


GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size": 16_000,
    "vocab_size_per_layer_input": 16_000,
    "sliding_window": 512,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_a_second_embedding_and_its_layers_keep_agrees_with_the_estimate(
    monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    monkeypatch.setattr("parcompile.runtime.preflight.ACTIVATION_TOLERANCE", 0.05)
    size = {"sequence_length": 2048, "global_batch_size": 2, "micro_batch_size": 1, "precision": "bf16"}
    training = {**size, "activation_checkpointing": recompute}
    report = preflight(make_plan(1, {}, model=GEMMA4, training=training, whole_model=True), [0])
    assert report.agrees, report.text()


@pytest.mark.parametrize("parallelism", [{}, {"dp": 2, "ep": 2}], ids=["one rank", "ep 2"])
def test_norms_without_weights_and_scores_that_scale_what_experts_take_agree_with_the_estimate(
    monkeypatch: pytest.MonkeyPatch, parallelism: dict[str, Any]
) -> None:
    monkeypatch.setattr("parcompile.runtime.preflight.ACTIVATION_TOLERANCE", 0.02)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "intermediate_size_mlp": 1024, "vocab_size": 4000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 4096}
    layers = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 1}
    config = {"model_type": "llama4_text", "num_local_experts": 4, "attention_chunk_size": 1024}
    training = {"sequence_length": 2048, "global_batch_size": 2, "micro_batch_size": 1, "precision": "bf16"}
    model = {**config, **sizes, **heads, **layers}
    plan = make_plan(parallelism.get("dp", 1), parallelism, model=model, training=training, whole_model=True)
    report = preflight(plan, [0])
    assert report.agrees, report.text()


@pytest.mark.parametrize(
    ("family", "parallelism", "recompute"),
    [
        ("hrm_text", {"tp": 2, "cp": 2}, "full"),  # runs that gradients do not pass, and a vector that is not trained
        ("minimax", {"tp": 2}, "full"),  # a norm over the heads of all ranks
        ("gpt_neox_japanese", {"pp": 2}, "none"),  # a bias in the last layer only
        ("modernbert-decoder", {"pp": 2}, "none"),  # a norm that the first layer lacks
        ("afmoe", {"pp": 2}, "none"),  # a bias of the choice of experts, which is no buffer and is not trained
        ("laguna", {"pp": 2}, "none"),
        ("bitnet", {"tp": 2}, "full"),  # norms in front of both output projections, over the features of all ranks
        ("ernie4_5_moe", {}, "none"),
        ("diffllama", {}, "none"),  # parameters that its class draws on the CPU
        ("olmo_hybrid", {}, "none"),  # parameters that its class writes in fp32
    ],
)
def test_what_few_families_have_is_counted_to_the_byte(
    family: str, parallelism: dict[str, Any], recompute: str
) -> None:
    """All that is compared to the byte: activations of so small a model are not."""
    config = tiny_config(family, num_attention_heads=8, hidden_size=64)
    training = {"sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 1, "precision": "bf16"}
    training["activation_checkpointing"] = recompute
    world = 2 * parallelism.get("cp", 1)
    plan = make_plan(world, parallelism, model=config, training=training, whole_model=True)
    differing = [one for one in preflight(plan, [0]).differing if one.subject not in ROUGHLY]
    assert not differing, differing


@pytest.mark.parametrize("more", [{"sequence_parallel": True}, {"dp": 2, "ep": 2}], ids=["sp", "ep"])
def test_a_router_beside_an_mlp_and_a_key_head_on_two_ranks_are_counted_to_the_byte(more: dict[str, Any]) -> None:
    config = tiny_config("gemma4_text, experts", num_attention_heads=8, hidden_size=64)
    training = {"micro_batch_size": 1, "activation_checkpointing": "full"}
    plan = make_plan(2 * more.get("dp", 1), {"tp": 2, **more}, model=config, training=training, whole_model=True)
    differing = [one for one in preflight(plan, [0]).differing if one.subject not in ROUGHLY]
    assert not differing, differing


def test_the_last_stage_lacks_an_embedding_that_the_plan_of_transformers_names() -> None:
    config = tiny_config("nemotron_h", num_attention_heads=8, hidden_size=64)
    plan = make_plan(4, {"tp": 2, "pp": 2}, model=config, training={"micro_batch_size": 1}, whole_model=True)
    differing = [one for one in preflight(plan, [3]).differing if one.subject not in ROUGHLY]
    assert not differing, differing


def test_what_experts_of_gpt_oss_keep_behind_their_clamps_agrees_with_the_estimate() -> None:
    config = {**presets()["gpt-oss-20b"].config, "num_hidden_layers": 2, "num_local_experts": 8}
    config["layer_types"] = ["sliding_attention", "full_attention"]
    training = {"sequence_length": 2048, "micro_batch_size": 1, "global_batch_size": 2, "precision": "bf16"}
    report = preflight(make_plan(2, {"tp": 2}, model=config, training=training, whole_model=True), [0])
    assert report.agrees, report.text()


ROUGHLY = ("activations of a micro-batch", "peak of the step")


def test_what_slices_of_experts_give_in_front_of_a_norm_is_counted_to_the_byte() -> None:
    config = tiny_config("muse_spark_text", num_attention_heads=8, hidden_size=64)
    training = {"micro_batch_size": 1, "activation_checkpointing": "full"}
    plan = make_plan(4, {"tp": 2, "dp": 2, "ep": 2}, model=config, training=training, whole_model=True)
    differing = [one for one in preflight(plan, [0]).differing if one.subject not in ROUGHLY]
    assert not differing, differing


def test_a_rank_of_16384_is_checked_in_little_memory() -> None:
    plan, _ = compile_file(Path(__file__).parents[1] / "golden" / "llama-3.1-405b-128k-16384-gpus.json")
    assert plan is not None
    start = time.process_time()
    report = preflight(plan, [1024])
    assert report.agrees, report.text()
    assert time.process_time() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 1024**2  # KiB


def test_a_module_of_ones_own_is_built_by_a_function(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(
        json.dumps(plan_tree(user_plan(4, {"tp": 2, "cp": 2, "sequence_parallel": True})))
    )
    module = Path(__file__).parent / "user_module.py"
    result = CliRunner().invoke(command, [str(tmp_path), "--ranks", "0", "--model", f"{module}:Decoder"])
    assert (result.exit_code, "what was compared agrees" in result.stdout) == (0, True), result.output
    without = CliRunner().invoke(command, [str(tmp_path), "--ranks", "0"])
    assert "say with --model FILE.py:FUNCTION who builds it" in without.stdout
    wrong = CliRunner().invoke(command, [str(tmp_path), "--model", f"{module}:WIDTH"])
    assert (wrong.exit_code, "nothing that can be called" in wrong.stderr) == (2, True)


def test_a_module_that_asks_for_values_fails_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan_tree(user_plan(2, {"tp": 2}))))
    (tmp_path / "asking.py").write_text(
        "from user_module import Decoder\n\n\nclass Asking(Decoder):\n"
        "    def forward(self, *args, **options):\n"
        "        logits = super().forward(*args, **options)\n"
        "        return logits[logits.abs() > 0].view_as(logits)\n"
    )
    result = CliRunner().invoke(command, [str(tmp_path), "--ranks", "0", "--model", f"{tmp_path}/asking.py:Asking"])
    assert result.exit_code == 1
    assert "asking.py:7" in result.stdout and "--live" in result.stdout, result.output


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "preflight.md").read_text(encoding="utf-8")
    (file, text), *_ = re.findall(r'```json title="([^"]+)"\n(.*?)```', page, re.DOTALL)
    (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^\$ parcompile (.*)$", page, re.MULTILINE)
    assert len(shown) == 3
    for line in shown:
        monkeypatch.setattr(sys, "argv", ["parcompile", *shlex.split(line)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code, line


def test_experts_run_in_fp32_too() -> None:
    """Torch's grouped product on meta takes bf16 alone."""
    model = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    report = preflight(make_plan(2, {"ep": 2}, model=model, training={"micro_batch_size": 1}), [0, 1])
    assert report.agrees, report.text()


@pytest.mark.parametrize("zero", [1, 2])
def test_preflight_of_dealt_experts_counts_what_live_ranks_send(zero: int) -> None:
    """Live routers choose the experts of one rank only: what is sent to it comes back, so that each sends as much."""
    plan = Case("deepseek_v3", {"dp": 4, "ep": 2}, {"precision": "bf16"}, zero=zero).plan()
    report = preflight(plan, range(4))
    wrong = {subject: text for subject, text in faults(report).items() if subject not in OF_TINY_MODELS}
    assert not wrong
    planned = estimated.collectives(workload_of(plan.spec), plan.spec.stages[0])
    for rank, counts in enumerate(run_ranks(4, live_counts, plan, one_sided)):
        sent = by_group(counts)
        assert sent == by_group(report.counts[rank])
        assert set(sent) == {"ep", "dp-cp", "expert-dp"}
        rows = planned["ep", "all-to-all"]
        assert (sent["ep"].messages, sent["ep"].wire_bytes) == (rows.messages, pytest.approx(rows.wire_bytes))


def test_preflight_of_experts_that_tensor_parallelism_cuts_counts_what_live_ranks_send() -> None:
    """All rows come to the first rank of ep: those with its experts gather twice as many, and the others nothing."""
    plan = Case("deepseek_v3", {"tp": 2, "dp": 2, "ep": 2}).plan()
    report = preflight(plan, range(4))
    assert not {subject: text for subject, text in faults(report).items() if subject not in OF_TINY_MODELS}
    live = [by_group(counts) for counts in run_ranks(4, live_counts, plan, one_sided)]
    planned = [by_group(report.counts[rank]) for rank in range(4)]
    for sent, counted in zip(live, planned, strict=True):
        assert sent["ep"] == counted["ep"]
        assert counted["tp"] == planned[0]["tp"]
    # What is empty counts as control, where no rows come.
    assert max(sent["tp"].messages for sent in live) == planned[0]["tp"].messages
    assert sum(sent["tp"].wire_bytes for sent in live) == sum(counted["tp"].wire_bytes for counted in planned)


OF_TINY_MODELS = {"activations of a micro-batch", "peak of the step"}
"""What estimates leave out is not small beside layers of 32 features."""


def test_memory_of_dealt_experts_agrees_with_its_estimate() -> None:
    preset = find_preset("mixtral-8x7b")
    assert preset is not None
    plan = make_plan(
        8,
        {"tp": 2, "ep": 4, "sequence_parallel": True},
        model={**preset.config, "num_hidden_layers": 2},
        training={"sequence_length": 1024, "global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16"},
        whole_model=True,
    )
    report = preflight(plan, [0, 7])
    assert report.agrees, report.text()


@pytest.mark.parametrize(
    ("family", "parallelism"),
    [
        ("deepseek_v3", {"tp": 2, "pp": 2, "ep": 2}),  # a shared expert behind the others
        ("qwen3_next", {"ep": 2}),  # before them
    ],
)
def test_nothing_of_a_layer_that_is_recomputed_stays_for_the_next_micro_batch(
    family: str, parallelism: dict[str, Any]
) -> None:
    """Recomputation stops within the experts; a shared expert that was computed ahead kept its whole layer alive."""
    config = tiny_config(family, hidden_size=64)
    training = {"sequence_length": 2048, "global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16"}
    training["activation_checkpointing"] = "full"
    plan = make_plan(8, parallelism, model=config, training=training, whole_model=True)
    with stand_in(plan, 0) as mesh, MetaTracker(mesh) as tracker:
        model, _ = build_sharded(mesh, tracker)
        step = run_step(model, mesh, tracker)
    static = step.static.weights + step.static.master + step.static.moments + step.static.gradients + step.static.bucket
    layer = 2048 * 64 * 2
    assert step.taken.held - static < layer  # positions, and tables of attention


def script(name: str) -> Any:
    """A script of `.ci` as a module."""
    file = Path(__file__).parents[2] / ".ci" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    found = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "qwen3_next", "jamba"])
def test_the_launches_that_the_estimate_counts_are_those_of_a_step(family: str) -> None:
    counting = script("generate/launches")
    stored = shipped("parcompile.cost", "launches.json")
    assert counting.table([family]) == {name: stored[name] for name in (family, "others")}, (
        "python .ci/generate/launches.py"
    )


@pytest.mark.parametrize(
    ("layers", "parallelism", "training", "rank"),
    [
        (3, {"dp": 8}, {"precision": "fp32", "global_batch_size": 16}, 0),  # whole sums
        (3, {"dp": 8}, {"precision": "fp32", "global_batch_size": 16}, 7),
        (8, {"cp": 4}, {"precision": "fp32", "global_batch_size": 8, "sequence_length": 512}, 0),  # twice
        (3, {"dp": 8}, {"precision": "fp32", "global_batch_size": 8}, 3),  # once, and none before the first reduction
        (3, {"tp": 4, "cp": 2}, {"precision": "bf16", "global_batch_size": 2}, 0),  # a bucket that comes with backward
    ],
)
def test_what_zero_stage_2_holds_at_its_peak_agrees_with_the_estimate(
    layers: int, parallelism: dict[str, Any], training: dict[str, Any], rank: int
) -> None:
    found = find_preset("llama-3.2-1b")
    assert found is not None
    model = {**found.config, "num_hidden_layers": layers, "tie_word_embeddings": False}
    training = {"sequence_length": 2048, "micro_batch_size": 1, **training}
    plan = make_plan(8, parallelism, model=model, training=training, whole_model=True, extra={"zero": {"stage": 2}})
    with stand_in(plan, rank) as mesh:
        tracker = MetaTracker(mesh)
        with tracker:
            step = run_step(build_sharded(mesh, tracker)[0], mesh, tracker)
        estimated, counted = peak_bytes(mesh, step)
        assert all(one.verdict is Verdict.AGREES for one in compare_static(mesh, step))
    assert estimated == pytest.approx(counted, rel=0.01)


IN_BF16 = {"precision": "bf16", "gradient_accumulation_dtype": "bf16"}
AGAIN = {"activation_checkpointing": "full"}
WAITING = {"precision": "fp32", "sequence_length": 2048, "micro_batch_size": 2, "global_batch_size": 32}
FEW, MANY = 32000, 128256
SPLIT, SUMS = {"sequence_parallel": True}, {"gradient_accumulation_dtype": "bf16"}
MEDIUM, LONG = {"sequence_length": 4096}, {"sequence_length": 8192}
ROWS = {"micro_batch_size": 2, "global_batch_size": 4}


@pytest.mark.parametrize(
    ("model", "parallelism", "stage", "training", "rank"),
    [
        # Of a bucket, what goes to the ranks of experts is joined apart from the rest; fp32 sums beside it.
        ("qwen3_moe", {"tp": 2, "cp": 4, "ep": 4, "sequence_parallel": True}, 1, {**IN_BF16, **AGAIN}, 0),
        ("mixtral", {"cp": 2, "ep": 2}, 1, {"precision": "bf16", **AGAIN}, 0),
        # Of more than a bucket, whole parameters.
        ("qwen2", {"cp": 4, "pp": 2}, 1, {**IN_BF16, "sequence_length": 4096}, 4),
        # Experts take most on their way forward, when there is no bucket yet.
        ("qwen3_moe", {"tp": 4, "dp": 4, "ep": 4, "sequence_parallel": True}, 2, {"precision": "fp32"}, 0),
        # An embedding goes backward while another micro-batch is waiting.
        ("llama", {"cp": 4, "pp": 2, "dp": 4}, 0, WAITING, 0),
        # Norms that take the mean away keep their input in fp32 twice.
        ("cohere", {"tp": 4, "sequence_parallel": True}, 1, {"precision": "bf16"}, 0),
        # DeepSpeed's norm takes a copy in fp64 of the embedding's gradient.
        ("llama", {"pp": 2}, 1, {"precision": "bf16", "sequence_length": 1024}, 0),
        # Stages without a head have no norm behind their layers.
        ("llama", {"tp": 4, "pp": 2}, 0, {**ROWS, "precision": "bf16"}, 0),
        ("gpt_neox", {"tp": 2, "pp": 2}, 0, {**ROWS, "precision": "fp32"}, 0),
        # Gradients are gathered in as many pieces as there are rows.
        ("llama", {"tp": 4, "sequence_parallel": True, "pp": 2}, 0, {**ROWS, "precision": "fp32"}, 0),
        # A head that no bucket takes stays when it is reduced.
        ("gpt_neox", {}, 2, {**AGAIN, "precision": "bf16", "sequence_length": 1024}, 0),
        ("mixtral", {"tp": 2, "pp": 2}, 0, {**ROWS, "precision": "bf16"}, 0),
    ],
)
def test_the_peak_of_a_step_agrees_with_the_estimate(
    model: str, parallelism: dict[str, Any], stage: int, training: dict[str, Any], rank: int
) -> None:
    drawing = script("preflight_peaks")
    world = math.prod(size for axis, size in parallelism.items() if axis in ("tp", "cp", "pp", "dp"))
    training = {"sequence_length": 8192, "micro_batch_size": 1, "global_batch_size": 4, **training}
    extra = {"zero": {"stage": stage}, "cluster": {"gpus_per_node": world, "accelerator": "h200"}}
    config = drawing.MODELS.get(model, {**drawing.LLAMA, "model_type": model})
    plan = make_plan(world, parallelism, model=config, training=training, whole_model=True, extra=extra)
    estimated, counted, _ = drawing.measured(plan, rank)
    assert estimated == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "words", "parallelism", "stage", "training"),
    [
        # Masks and tables of positions that a class registers.
        ("gpt_neo", FEW, {}, 0, {"precision": "fp32"}),
        ("xglm", FEW, {}, 0, {"precision": "fp32"}),
        # Norms behind the embedding.
        ("muse_glimmer_text", FEW, {}, 0, {**ROWS, "precision": "bf16"}),
        ("bloom", FEW, {}, 0, {**ROWS, "precision": "bf16"}),
        # What norms that take the mean away keep behind the last layer.
        ("cohere", MANY, {"tp": 4}, 1, {**ROWS, "precision": "fp32"}),
        # Tables of rotary positions.
        ("llama", MANY, {"tp": 4, "pp": 2}, 0, {**ROWS, **AGAIN, "precision": "fp32"}),
        # Heads in pairs attend twice.
        ("diffllama", FEW, {"cp": 4}, 2, {**ROWS, **AGAIN, "precision": "bf16", "global_batch_size": 2}),
        # What goes backward beside the gradient of an embedding, and beside sums that are there.
        ("falcon", MANY, {"pp": 2, "dp": 4}, 1, {**ROWS, "precision": "bf16", "global_batch_size": 16}),
        ("phi3", FEW, {"tp": 2}, 2, {**AGAIN, "precision": "bf16", "sequence_length": 8192}),
        # Gradients of a large embedding, which are the last, and no layer behind them.
        ("phimoe", MANY, {"tp": 2, "dp": 4}, 1, {**AGAIN, "precision": "fp32", "sequence_length": 4096}),
        # A scan that goes backward when the layer's experts have let go of all.
        ("jamba", FEW, {"tp": 4}, 0, {**AGAIN, "precision": "fp32", "sequence_length": 512}),
        # Gradients of weighted rows.
        ("minimax_m2", MANY, {"pp": 2, "dp": 2, "ep": 2}, 0, {**ROWS, **AGAIN, "precision": "bf16"}),
        # Residual streams: when a layer has added to them, and in the mixture behind the last layer.
        ("deepseek_v4", FEW, {}, 0, {**AGAIN, "precision": "bf16", "sequence_length": 4096}),
        ("deepseek_v4", FEW, {}, 0, {"precision": "bf16", "sequence_length": 4096}),
        ("hy_v4", FEW, {}, 0, {**AGAIN, "precision": "bf16", "sequence_length": 4096}),
        ("hy_v4", MANY, {"cp": 2}, 0, {**AGAIN, "precision": "bf16", "sequence_length": 4096}),
        ("qwen4_exp_text", FEW, {}, 0, {**AGAIN, "precision": "bf16", "sequence_length": 4096}),
        # What hides keys is made again with its layer, and not there while the loss goes backward.
        ("glm_moe_dsa", MANY, {}, 0, {**AGAIN, "precision": "bf16", "sequence_length": 4096}),
        ("deepseek_v32", MANY, {"cp": 2}, 0, {**AGAIN, "precision": "bf16", "sequence_length": 4096}),
        # Attention goes backward over ranks beside what a parallel MLP leaves.
        ("gptj", FEW, {"cp": 2}, 0, {"precision": "fp32", "sequence_length": 4096}),
        # Passes over ranks, one and several, beside a parallel MLP with a norm of its own; the gradient that came.
        ("gpt_neox", 1024, {"cp": 2}, 0, {**AGAIN, "precision": "bf16", **LONG}),
        ("gpt_neox", 1024, {"cp": 4}, 0, {**ROWS, **AGAIN, "precision": "bf16", **LONG}),
        ("gpt_neox", FEW, {"cp": 2, "pp": 2}, 0, {**ROWS, **AGAIN, "precision": "bf16", **LONG}),
        # Keys and gradients of all ranks, which an all-gather lets go of as it goes on.
        ("gpt_neox", 1024, {"cp": 4, "cp_implementation": "all_gather"}, 0, {**AGAIN, "precision": "bf16", **LONG}),
        # Values that are narrower than keys.
        ("deepseek_v2", FEW, {"cp": 2, "pp": 2}, 0, {**ROWS, "precision": "bf16", "sequence_length": 4096}),
        # Layers without experts go backward beside the sums of those with them.
        ("deepseek_v2", FEW, {"tp": 2, "dp": 2}, 2, {**AGAIN, "precision": "fp32", **LONG}),
        # Streams that are made of one, and one that is made of them.
        ("gemma3n_text", MANY, {"cp": 2}, 0, {"precision": "bf16", "sequence_length": 4096}),
        # The gradient of a tied head waits while those of layers are reduced.
        ("gpt2", FEW, {"tp": 2, "cp": 4, **SPLIT}, 1, {**AGAIN, **SUMS, "precision": "bf16", **MEDIUM}),
        # Between the first and the last micro-batch none were reduced when the embedding's comes.
        (
            "starcoder2",
            FEW,
            {"tp": 2, "cp": 4, **SPLIT},
            1,
            {**AGAIN, **SUMS, "precision": "bf16", "sequence_length": 4096},
        ),
    ],
)
def test_the_peak_of_each_type_agrees_with_the_estimate(
    kind: str, words: int, parallelism: dict[str, Any], stage: int, training: dict[str, Any]
) -> None:
    drawing = script("preflight_peaks")
    world = math.prod(size for axis, size in parallelism.items() if axis in ("tp", "cp", "pp", "dp"))
    training = {"sequence_length": 2048, "micro_batch_size": 1, "global_batch_size": 4, **training}
    extra = {"zero": {"stage": stage}, "cluster": {"gpus_per_node": world, "accelerator": "h200"}}
    config = drawing._of_type(kind, random.Random(5)) | {"vocab_size": words}
    plan = make_plan(world, parallelism, model=config, training=training, whole_model=True, extra=extra)
    for rank in drawing._one_of_each_stage(plan):
        estimated, counted, _ = drawing.measured(plan, rank)
        assert estimated == pytest.approx(counted, rel=0.005)


def test_between_the_first_and_the_last_micro_batch_all_gradients_are_there() -> None:
    """At ZeRO stage 1: behind the first they come to be, and those of the last are let go of as they are reduced."""
    drawing, peaks = script("preflight_peaks"), []
    layout = {"tp": 4, "cp": 2, "dp": 4, "ep": 2, "sequence_parallel": True}
    extra = {"zero": {"stage": 1}, "cluster": {"gpus_per_node": 32, "accelerator": "h200"}}
    for micro_batches in (2, 3, 5):
        batch = {"sequence_length": 4096, "micro_batch_size": 1, "global_batch_size": 4 * micro_batches}
        training = {**AGAIN, **batch, "precision": "bf16"}
        config = drawing._of_type("minimax", random.Random(5)) | {"vocab_size": FEW}
        plan = make_plan(32, layout, model=config, training=training, whole_model=True, extra=extra)
        peaks.append(drawing.measured(plan, drawing._one_of_each_stage(plan)[0])[:2])
    (_, two), (estimated, three), (_, five) = peaks
    assert three == five > 1.03 * two
    assert estimated == pytest.approx(three, rel=0.01)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_the_last_micro_batch_is_compared_with_the_last(micro_batches: int) -> None:
    """Its head's gradients lie in the bucket at ZeRO stage 1, while those of one before it are held."""
    config = {**script("preflight_peaks").LLAMA, "hidden_size": 4096, "num_hidden_layers": 3, "vocab_size": 8000}
    batch = {"sequence_length": 1024, "micro_batch_size": 1, "global_batch_size": 2 * micro_batches}
    extra = {"zero": {"stage": 1}, "cluster": {"gpus_per_node": 2, "accelerator": "h100-sxm"}}
    training = {**batch, "precision": "bf16"}
    plan = make_plan(2, {"dp": 2}, model=config, training=training, whole_model=True, extra=extra)
    report = preflight(plan, [0])
    assert report.agrees, report.text()


@pytest.mark.parametrize("group", [10**9, 4 * 10**6])
def test_stage_3_steps_one_group_after_the_other(group: int) -> None:
    """What the optimizer takes for gradients in fp32 is of one group, when gathered weights are gone."""
    drawing = script("preflight_peaks")
    keys = {"sub_group_size": group, "reduce_bucket_size": 17 * 10**6, "stage3_max_live_parameters": 1000}
    extra = {
        "zero": {"stage": 3},
        "cluster": {"gpus_per_node": 2, "accelerator": "h200"},
        "deepspeed": {"zero_optimization": {**keys, "stage3_prefetch_bucket_size": 1000}},
    }
    training = {"sequence_length": 256, "micro_batch_size": 1, "global_batch_size": 4, "precision": "bf16"}
    config = {**drawing.LLAMA, "vocab_size": 8000, "num_hidden_layers": 12}
    plan = make_plan(2, {"dp": 2}, model=config, training=training, whole_model=True, extra=extra)
    estimated, counted, _ = drawing.measured(plan, 0)
    assert estimated == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_messages_of_zero_stage_3_agree_with_the_estimate(tied: bool, recompute: str) -> None:
    found = find_preset("llama-3.2-1b")
    assert found is not None
    model = {**found.config, "num_hidden_layers": 6, "tie_word_embeddings": tied}
    training = {"sequence_length": 256, "micro_batch_size": 1, "precision": "bf16", "global_batch_size": 16}
    training["activation_checkpointing"] = recompute
    plan = make_plan(8, {"dp": 8}, model=model, training=training, whole_model=True, extra={"zero": {"stage": 3}})
    report = preflight(plan, ranks=[0])
    sent = next(one for one in report.findings if one.subject == "sent over dp-cp")
    assert sent.verdict is Verdict.AGREES, report.text()
    # Bytes are compared; a number of messages stands only where they are counted.
    assert sent.planned.endswith("iB in buckets"), sent
    assert re.fullmatch(r"[\d.]+ .iB in [\d,]+ message\(s\)", sent.found), sent  # of all together: "×" reads as of each


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build(: x", "SyntaxError"),
        ("\nraise SystemExit(3)", "SystemExit: 3 (line 2)"),
        ("import math\nmath.nothing()", "AttributeError: module 'math' has no attribute 'nothing' (line 2)"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero (line 1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan_tree(user_plan(2, {"tp": 2}))))
    (tmp_path / "broken.py").write_text(text)
    result = CliRunner().invoke(command, [str(tmp_path), "--model", f"{tmp_path / 'broken.py'}:build"])
    assert (result.exit_code, said in result.stderr) == (2, True), result.output
    unnamed = CliRunner().invoke(command, [str(tmp_path), "--model", "broken.py"])
    assert "broken.py names no function: write FILE.py:FUNCTION" in unnamed.stderr
