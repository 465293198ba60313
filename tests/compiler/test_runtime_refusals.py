"""What the runtime refuses after a launch for the spec alone, the compiler refuses before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from layout_cases import MIXTRAL

from parcompile.backends.kinds import BUILT_IN, LAUNCHERS
from parcompile.cli import cli
from parcompile.rules import OTHER_TOOL, Rule, all_rules, example_spec, rule_targets
from parcompile.rules import check as check_rules
from parcompile.spec.resolve import Resolution

PHI3 = {
    "model_type": "phi3",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 3584,
    "vocab_size": 32000,
    "pad_token_id": None,
    "max_position_embeddings": 8192,
}


def check(folder: Path, sections: dict[str, Any], *options: str) -> tuple[int, str]:
    (folder / "config.json").write_text(json.dumps(PHI3), encoding="utf-8")
    (folder / "spec.json").write_text(json.dumps(example_spec(sections)), encoding="utf-8")
    checked = CliRunner().invoke(cli, ["check", str(folder / "spec.json"), *options])
    plan = folder / "plan"
    compiled = CliRunner().invoke(cli, ["compile", str(folder / "spec.json"), "-o", str(plan), *options])
    assert (compiled.exit_code == 0) == (checked.exit_code == 0) == plan.exists()
    return checked.exit_code, checked.output


@pytest.mark.parametrize(("tp", "stage", "refused"), [(2, 0, True), (2, 1, False), (2, 2, False)])
def test_whole_experts_need_zero(tp: int, stage: int, refused: bool, tmp_path: Path) -> None:
    sections = {
        "model": {**MIXTRAL, "hidden_size": 256, "intermediate_size": 512},
        "parallelism": {"tp": tp, "ep": 4, "expert_tp": 1},
        "zero": {"stage": stage},
    }
    code, said = check(tmp_path, sections)
    assert (code == 1) == refused == ("error[X006]" in said), said


def test_a_plan_for_megatron_is_written_with_a_warning(tmp_path: Path) -> None:
    sections = {
        "model": {**MIXTRAL, "hidden_size": 256, "intermediate_size": 512},
        "parallelism": {"tp": 2, "ep": 4, "expert_tp": 1, "sequence_parallel": True},
        "zero": {"stage": 0},
    }
    code, said = check(tmp_path, sections, "-t", "megatron")
    assert code == 0
    assert "warning[X006]" in said


@pytest.mark.parametrize("rule", [one for one in all_rules() if one.code.startswith("X")], ids=lambda one: one.code)
def test_a_plan_that_nobody_runs_is_refused(rule: Rule) -> None:
    """Each rule's example: an error for launchers of the runtime, a warning where another tool runs the plan."""
    resolution = Resolution(example_spec(rule.wrong))
    for target in BUILT_IN:
        (found,) = [
            one for one in check_rules(resolution, rule_targets([target], estimate=False)) if one.code == rule.code
        ]
        runs = target not in LAUNCHERS if rule.run_by == (OTHER_TOOL,) else target in rule.run_by
        assert found.is_error != runs, target
        assert found.help is not None
        assert ("with --target" in found.help) == (bool(rule.run_by) and not runs)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("sums", ["bf16", "fp32"])
def test_rows_on_several_ranks_are_no_obstacle_to_sums_of_any_type(
    tp: int, stage: int, sums: str, tmp_path: Path
) -> None:
    """phi3 fuses queries with 2 kv heads: on 4 ranks two of them hold each."""
    sections = {
        "model": {"hf_config": "config.json"},
        "parallelism": {"tp": tp},
        "training": {"precision": "bf16", "gradient_accumulation_dtype": sums},
        "zero": {"stage": stage},
    }
    code, said = check(tmp_path, sections)
    assert code == 0, said
