"""Contract: parts of layers that are computed again on their own train as one process, and keep what the plan says.

`.ci/pipeline_matrix.py --draws parts` draws as many plans as one likes; docs/fit_larger.md says what they found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_runs import assert_same, train
from adapter_runs import train_plain as train_plain_adapted
from closeness import judge
from drawn_stages import compare, draw
from families import tiny_config
from family_runs import batch_of, config_plan, drawn_model
from ranks import run_ranks
from test_dropout import assert_equal_runs
from test_kept_activations import DEEPSEEK, GEMMA, NEAR, QWEN, activations
from training_runs import make_plan, train_with_engine

from parcompile.model.layer_parts import WORDS, parts_of
from parcompile.plan import Plan
from parcompile.runtime.preflight import preflight

SP = {"tp": 2, "sequence_parallel": True}
PARTS = tuple(word for word in WORDS if parts_of(word))
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "ranks"), [(8, 4), (11, 4), (0, 2), (60, 2)])
def test_drawn_plans_train_as_one_process(number: int, ranks: int) -> None:
    """One whose class looks up functions beside it, dealt experts, two words for two stages, ZeRO stage 3."""
    plan, _ = draw(number, ranks, in_parts=True)
    judge(compare(plan))


SEEN = {"attention": "self_attn.o_proj", "mlp": "mlp.act_fn", "norms": "post_attention_layernorm"}


def calls(_rank: int, plan: Plan) -> dict[str, int]:
    """How often a module of each part of a layer is called in a step."""
    from parcompile.runtime import join
    from parcompile.runtime.inject import inject
    from parcompile.runtime.inject.regions import recompute_as_planned

    mesh = join(plan)
    model: Any = inject(drawn_model(plan), mesh)
    recompute_as_planned(model, plan, mesh.rank)
    seen = dict.fromkeys(SEEN, 0)

    def count(part: str) -> Any:
        def hook(*_: Any) -> None:
            seen[part] += 1

        return hook

    for part, name in SEEN.items():
        model.get_submodule(f"model.layers.0.{name}").register_forward_pre_hook(count(part))
    batch = batch_of(plan)
    model(**batch).loss.backward()
    model.eval()(**batch).loss.backward()
    return seen


@pytest.mark.ranks
@pytest.mark.parametrize("word", ["none", *PARTS, "full"])
def test_the_named_parts_run_again_in_backward_and_no_others(word: str) -> None:
    plan = config_plan("llama", tiny_config("llama"), 1, {}, activation_checkpointing=word)
    again = SEEN if word == "full" else parts_of(word)
    # In forward, of evaluation too, and in backward.
    assert run_ranks(1, calls, plan) == [{part: 3 if part in again else 2 for part in SEEN}]


@pytest.mark.parametrize(
    ("config", "axes", "precision"),
    [
        (LLAMA, {}, "fp32"),
        (LLAMA, SP, "bf16"),
        (GEMMA, {}, "bf16"),
        (DEEPSEEK, {}, "bf16"),
        (QWEN, {}, "bf16"),
    ],
    ids=["llama", "llama, sp", "gemma2", "deepseek_v3", "qwen3_moe"],
)
def test_what_layers_keep_is_counted_and_less(config: dict[str, Any], axes: dict[str, Any], precision: str) -> None:
    world, counted = axes.get("tp", 1), dict[str, int]()
    for word in ("none", "norms", "attention", "mlp", "attention+mlp+norms"):
        training = {"sequence_length": 2048, "global_batch_size": 4, "micro_batch_size": 1, "precision": precision}
        training["activation_checkpointing"] = word
        cluster = {"gpus_per_node": world, "accelerator": "h200"}
        plan = make_plan(world, axes, model=config, training=training, whole_model=True, extra={"cluster": cluster})
        estimated, counted[word] = activations(plan)
        assert estimated == pytest.approx(counted[word], rel=NEAR), word
    assert counted["attention+mlp+norms"] < counted["mlp"] < counted["none"]
    assert max(counted["norms"], counted["attention"]) < counted["none"]


@pytest.mark.parametrize(
    ("family", "world", "axes"),
    [
        ("llama", 4, {**SP, "cp": 2}),
        ("llama", 4, {"tp": 2, "cp": 2, "cp_implementation": "ulysses"}),
        ("olmo2", 2, {"tp": 2}),
        ("gemma2", 2, SP),
        ("mixtral", 4, {**SP, "ep": 2}),
        ("axk1", 4, {"tp": 2, "ep": 2}),
    ],
)
def test_messages_are_those_of_the_plan(family: str, world: int, axes: dict[str, Any]) -> None:
    for word, tiled in (("attention", False), ("mlp", False), ("attention+mlp+norms", False), ("mlp", True)):
        if tiled and family in ("mixtral", "axk1"):
            continue
        training = {"sequence_length": 512, "micro_batch_size": 1, "activation_checkpointing": word, "tiled_mlp": tiled}
        plan = make_plan(world, axes, model=tiny_config(family), training=training, whole_model=True)
        found = [one for one in preflight(plan, [world - 1]).findings if one.subject.startswith("sent over")]
        assert any(one.subject == "sent over tp" for one in found)
        assert [one for one in found if one.planned != one.found and one.subject != "sent over dp-cp"] == [], word


@pytest.mark.ranks
def test_what_parts_draw_at_random_they_draw_again() -> None:
    model = tiny_config("starcoder2", residual_dropout=0.2, embedding_dropout=0.2, attention_dropout=0.2)
    expected: dict[str, Any] = {}
    for world, axes, word in (
        (1, {}, "none"),
        (1, {}, "attention+mlp+norms"),
        (4, {**SP, "cp": 2}, "attention+mlp"),
        (2, {"pp": 2}, ["mlp+norms", "attention"]),
    ):
        training = {"micro_batch_size": 1, "activation_checkpointing": word}
        plan = make_plan(world, axes, model=model, whole_model=True, training=training)  # type: ignore[arg-type]
        ranks = run_ranks(world, train_with_engine, plan, False, 2)
        expected = expected or ranks[0]
        assert_equal_runs(plan, ranks, expected)


ALL: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_train_as_in_one_process(stage: int, tmp_path: Path) -> None:
    training = {"activation_checkpointing": "attention+mlp+norms"}
    plan = make_plan(4, {**SP, "cp": 2}, training=training, extra={"zero": {"stage": stage}})
    ranks = run_ranks(4, train, plan, ALL, str(tmp_path), False, False)
    assert_same(ranks, train_plain_adapted(plan, ALL), 2)
