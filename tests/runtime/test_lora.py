"""Contract: LoRA adapters of peft train on an injected model as they do in one process.

Two AdamW steps in fp32 under the engine: losses, gradient norms and the gathered adapters within 1e-5 relative; the
second one also after a change of layout. What is exported computes what the run does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_runs import adapted, assert_exported, assert_same, peft, stored, train, train_plain
from ranks import run_ranks
from training_runs import make_plan

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

ALL: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("other", ["cp", "pp"])
def test_adapters_train_as_in_one_process(other: str, tmp_path: Path) -> None:
    """Also beside a weight that fuses queries, keys and values, some of whose rows both tp ranks hold."""
    model = {"model_type": "phi3", "num_key_value_heads": 1, "pad_token_id": None}
    plan = make_plan(4, {"tp": 2, other: 2, "sequence_parallel": True}, model=model)
    assert_same(run_ranks(4, train, plan, ALL, str(tmp_path), False, False), train_plain(plan, ALL), 2)


def test_adapters_on_a_model_that_was_loaded_in_slices_through_a_change_of_layout_to_the_export(tmp_path: Path) -> None:
    from parcompile.runtime import RunError
    from parcompile.runtime.checkpoint.converting import convert

    plan, folder = make_plan(2, {"tp": 2}), str(tmp_path)
    expected = train_plain(plan, ALL)
    stored(plan, ALL, tmp_path)
    assert_same(run_ranks(2, train, plan, ALL, folder, False, True), expected, 2)
    assert_same(run_ranks(2, train, make_plan(2, {"cp": 2}), ALL, folder, True, False), expected, 1)
    assert_same(run_ranks(2, train, make_plan(2, {"pp": 2}), ALL, folder, True, True), expected, 1)
    assert_same(run_ranks(2, train, plan, ALL, folder, True, True), expected, 1)

    staged = tmp_path / "of stages"
    stored(plan, ALL, staged)
    assert_same(run_ranks(2, train, make_plan(2, {"pp": 2}), ALL, str(staged), False, True), expected, 2)
    assert_same(run_ranks(2, train, plan, ALL, str(staged), True, False), expected, 1)

    with pytest.raises(RunError, match="has adapters, which are not converted"):
        convert(tmp_path / "end", plan, tmp_path / "converted")
    assert_exported(plan, tmp_path, staged, expected)


def refusals(rank: int, plan: Plan, folder: str) -> list[str]:
    from parcompile.runtime import RunError, adapter_state, initialize, join, load_pretrained

    drawn = load_pretrained(f"{folder}/base", plan, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    state = adapter_state(drawn, join(plan))
    assert all(bool(value.any()) == ("lora_A" in name) for name, value in state.items())
    found = []
    for targets, options in ((["lm_head"], {}), (["q_proj"], {"use_dora": True}), (["q_proj"], {"lora_bias": True})):
        try:
            initialize(plan=plan, model=adapted(plan, {**ALL, "target_modules": targets, **options}))
            found.append("")
        except RunError as error:
            found.append(str(error))
    return found


def test_what_is_not_injected_is_named(tmp_path: Path) -> None:
    plan = make_plan(2, {"tp": 2})
    stored(plan, ALL, tmp_path)
    head, dora, bias = run_ranks(2, refusals, plan, str(tmp_path))[0]
    assert head == "lm_head is the head: leave it out of target_modules"
    assert "model.layers.0.self_attn.q_proj uses a variant of LoRA" in dora
    assert "model.layers.0.self_attn.q_proj has lora_bias" in bias
