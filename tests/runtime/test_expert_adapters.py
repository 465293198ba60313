"""Contract: LoRA on experts trains on ranks as peft does in one process, and is saved, resumed and exported whole.

Two AdamW steps in fp32 with clipping: losses, gradient norms and every adapter agree within 1e-5 relative.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_runs import adapted, assert_exported, assert_same, stored, train, train_plain
from expert_runs import Case
from ranks import run_ranks

from parcompile.plan import Plan

pytestmark = pytest.mark.ranks

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_ALL = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj"], "target_parameters": STACKS}
"""Of experts and of attention."""


def test_adapters_of_experts_train_in_one_layout_go_on_in_another_and_are_exported(tmp_path: Path) -> None:
    """Each expert cut over tp beside ep; then whole experts, on a model that is loaded slice by slice."""
    layout, folder = {"tp": 2, "dp": 2, "ep": 2}, str(tmp_path)
    plan = Case("mixtral", {**layout, "sequence_parallel": True}).plan()
    expected = train_plain(plan, OF_ALL)
    stored(plan, OF_ALL, tmp_path)
    assert_same(run_ranks(4, train, plan, OF_ALL, folder, False, False), expected, 2)
    dealt = Case("mixtral", {"dp": 2, "ep": 2}).plan()
    assert_same(run_ranks(2, train, dealt, OF_ALL, folder, True, True), expected, 1)
    assert_exported(plan, tmp_path, tmp_path, expected)


@pytest.mark.parametrize("training", [{}, {"router": {"expert_capacity": 4.0}}], ids=["", "room for all choices"])
def test_adapters_of_whole_experts_beside_tp_train_as_in_one_process(tmp_path: Path, training: dict[str, Any]) -> None:
    plan = Case("deepseek_v3", {"tp": 2, "dp": 1, "cp": 1, "ep": 2, "expert_tp": 1}, training).plan()
    assert_same(run_ranks(2, train, plan, OF_ALL, str(tmp_path), False, False), train_plain(plan, OF_ALL), 2)


def refusals(rank: int, plan: Plan, stacks: list[str]) -> str:
    from parcompile.runtime import RunError, initialize

    try:
        initialize(plan=plan, model=adapted(plan, {**OF_ALL, "target_parameters": stacks}))
    except RunError as error:
        return str(error)
    return ""


def test_adapters_of_what_is_no_stack_of_experts_are_refused_by_name() -> None:
    router = run_ranks(1, refusals, Case("mixtral", {}).plan(), ["mlp.gate.weight"])[0]
    assert router == (
        "model.layers.0.mlp.gate has LoRA on weight: of target_parameters only stacks of experts are injected"
    )
    transposed = run_ranks(1, refusals, Case("gpt_oss", {}).plan(), STACKS)[0]
    assert "stores down_proj as [experts, in, out]: LoRA on such experts is not injected" in transposed
