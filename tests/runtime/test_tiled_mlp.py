"""Contract: with training.tiled_mlp a plan trains as one process, and no MLP is computed whole.

`.ci/pipeline_matrix.py --draws tiled_mlp` draws as many plans as one likes; docs/fit_larger.md says what they found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from adapter_runs import assert_same, train
from adapter_runs import train_plain as train_plain_adapted
from closeness import judge
from drawn_stages import TILE_TOKENS, compare, draw
from families import tiny_config
from family_runs import batch_of, config_plan, drawn_model, train_injected, train_plain
from ranks import RankError, run_ranks
from training_runs import compared, make_plan

from parcompile.plan import Plan
from parcompile.runtime.preflight import preflight

SP = {"tp": 2, "sequence_parallel": True}
FAMILIES = ("llama", "gpt2", "phi3", "gemma2", "qwen2_moe", "deepseek_v3", "bloom", "gpt_neox")
"""MLPs with and without a gate, fused, with biases, with a norm behind them, with a second input, beside experts."""


TILES = "parcompile.layout.shards.MLP_TILE_TOKENS"


def in_tiles(rank: int, plans: list[Plan]) -> list[dict[str, Any]]:
    with mock.patch(TILES, TILE_TOKENS):
        return train_injected(rank, plans)


@pytest.mark.ranks
@pytest.mark.parametrize("parallelism", [{}, {"tp": 2}, SP, {"cp": 2}, {"pp": 2}], ids=str)
def test_every_kind_of_mlp_trains_as_one_process(parallelism: dict[str, Any]) -> None:
    world = 1
    for size in parallelism.values():
        world *= size
    plans = [config_plan(name, tiny_config(name), world, parallelism, tiled_mlp=True) for name in FAMILIES]
    ranks = run_ranks(world, in_tiles, plans)
    for place, (name, plan) in enumerate(zip(FAMILIES, plans, strict=True)):
        found = [rank[place] for rank in ranks]
        assert "error" not in found[0], (name, found[0])
        alone = config_plan(name, tiny_config(name), 1, {})
        judge(compared(plan, found, lambda seed, alone=alone: train_plain(alone, seed=seed)))


@pytest.mark.ranks
@pytest.mark.parametrize("number", [1, 28, 34])
def test_drawn_stages_and_axes_train_as_one_process(number: int) -> None:
    plan, _ = draw(number, 4, switch="tiled_mlp")
    judge(compare(plan))


def widest(_rank: int, plan: Plan) -> list[int]:
    """Tokens that an activation of an MLP has at a time, in order, in a step."""
    from parcompile.runtime import join, split_batch
    from parcompile.runtime.inject import inject

    mesh = join(plan)
    model: Any = inject(drawn_model(plan), mesh)
    seen: list[int] = []
    activation = model.get_submodule("model.layers.0.mlp.act_fn")
    activation.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    batch = split_batch(batch_of(plan), mesh)
    with mock.patch(TILES, 8 / plan.spec.model.shape.hidden_size):
        if plan.spec.model.shape.head.labels:
            model.config.pad_token_id = -1
            model(input_ids=batch["input_ids"]).logits.sum().backward()
        else:
            model(**batch).loss.backward()
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("parallelism", [{}, SP], ids=str)
def test_what_lies_between_projections_has_the_tokens_of_a_tile(parallelism: dict[str, Any]) -> None:
    plan = config_plan("llama", tiny_config("llama"), parallelism.get("tp", 1), parallelism, tiled_mlp=True)
    # A tile has 8 tokens of two rows of 16; each is computed in forward and again in backward.
    assert run_ranks(plan.world_size, widest, plan) == [[4] * 8] * plan.world_size


def with_dropout(_rank: int, plan: Plan) -> None:
    from parcompile.runtime import join
    from parcompile.runtime.inject import inject

    inject(drawn_model(plan), join(plan))


@pytest.mark.ranks
def test_the_mlps_of_a_classifier_are_tiled() -> None:
    plan = config_plan("llama", {**tiny_config("llama"), "num_labels": 1}, 1, {}, tiled_mlp=True)
    assert run_ranks(1, widest, plan) == [[4] * 8]


@pytest.mark.ranks
def test_an_mlp_that_drops_out_is_refused() -> None:
    plan = config_plan("gpt2", tiny_config("gpt2", resid_pdrop=0.1), 1, {}, tiled_mlp=True)
    with pytest.raises(RankError, match=r"transformer\.h\.0\.mlp drops out at random"):
        run_ranks(1, with_dropout, plan)


@pytest.mark.parametrize(
    ("parallelism", "changes", "extra"),
    [
        (SP, {}, {}),
        (SP, {"activation_checkpointing": "none", "precision": "fp32"}, {}),
        ({"tp": 2, "cp": 2}, {}, {}),
        ({"tp": 2, "pp": 2}, {}, {}),
        (SP, {}, {"zero": {"stage": 3}}),
    ],
    ids=str,
)
def test_preflight_finds_the_messages_and_the_memory_of_the_plan(
    parallelism: dict[str, Any], changes: dict[str, Any], extra: dict[str, Any]
) -> None:
    size = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 448, "max_position_embeddings": 4096}
    training = {"sequence_length": 4096, "micro_batch_size": 1, "precision": "bf16", "tiled_mlp": True, **changes}
    training = {"activation_checkpointing": "full", **training, "gradient_accumulation_steps": 2}
    training["global_batch_size"] = 2 * (4 // 2 // parallelism.get("pp", 1) // parallelism.get("cp", 1))
    plan = make_plan(
        4, parallelism, model=tiny_config("llama", **size), whole_model=True, training=training, extra=extra
    )
    report = preflight(plan, [3])
    about_mlps = {"sent over tp", "activations of a micro-batch"}
    assert about_mlps <= {one.subject for one in report.findings}
    assert [one for one in report.differing if one.subject in about_mlps] == []


ALL: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def adapters_in_tiles(rank: int, plan: Plan, folder: str) -> list[dict[str, Any]]:
    with mock.patch(TILES, TILE_TOKENS):
        return train(rank, plan, ALL, folder, False, False)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_train_as_in_one_process(stage: int, tmp_path: Path) -> None:
    parallelism, training = {**SP, "cp": 2}, {"tiled_mlp": True, "activation_checkpointing": "full"}
    plan = make_plan(4, parallelism, training=training, extra={"zero": {"stage": stage}})
    assert_same(run_ranks(4, adapters_in_tiles, plan, str(tmp_path)), train_plain_adapted(plan, ALL), 2)
