"""gpt-neox configurations on their own: options by name, type and choice, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from parcompile.backends.gpt_neox.options import options
from parcompile.backends.kinds import GPT_NEOX
from parcompile.pipeline import Checked, check_any
from parcompile.rules.file_registry import FileRule, file_rules

RULES = [rule for rule in file_rules() if rule.kind == GPT_NEOX]
SMALL = {"pipe-parallel-size": 1, "model-parallel-size": 2, "num-layers": 12, "hidden-size": 768}


def checked(tree: Any, folder: Path) -> Checked:
    (folder / "neox.yml").write_text(yaml.safe_dump(dict(tree)), encoding="utf-8")
    return check_any(folder / "neox.yml")


def codes(one: Checked) -> set[str]:
    return {found.code for found in one.diagnostics}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_wrong_example_breaks_the_rule_and_right_one_nothing(rule: FileRule, tmp_path: Path) -> None:
    wrong = checked(rule.wrong, tmp_path)
    assert (wrong.kind, codes(wrong)) == (GPT_NEOX, {rule.code})
    assert all(one.position is not None for one in wrong.diagnostics)
    assert codes(checked(rule.right, tmp_path)) == set()
    hyphens = {key.replace("_", "-"): value for key, value in rule.wrong.items()}
    assert codes(checked(hyphens, tmp_path)) == {rule.code}


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({"num-attention-head": 12}, "K001", "did you mean num_attention_heads?"),
        ({"norm": "rmsnrom"}, "K004", "did you mean rmsnorm?"),
        ({"seq-length": "2048"}, "K003", "seq_length takes a whole number, not '2048'"),
        ({"no-weight-tying": "yes"}, "K003", "no_weight_tying takes true or false, not 'yes'"),
        ({"mlp-type": "llama"}, "K001", "gpt-neox has mlp_type up to 9ee4a8f6"),
        ({"hybrid_engine": {"enabled": True}}, "K001", "write it under deepspeed_extra_args"),
        ({"zero_optimization": {"stage": 7}}, "K004", "7"),
        ({"train_micro_batch_size_per_gpu": "four"}, "K003", "four"),
    ],
)
def test_what_gpt_neox_does_not_take_is_named(given: Any, code: str, said: str, tmp_path: Path) -> None:
    (found,) = checked({**SMALL, **given}, tmp_path).diagnostics
    assert found.code == code
    assert said in f"{found.message} {found.help}"
    assert found.position is not None


def test_the_newest_version_has_318_options() -> None:
    assert sum(facts[-1].until == 6 for facts in options().values()) == 318


@pytest.mark.parametrize("spelled", ["FP16", "fp16"])
def test_choices_are_compared_without_case_as_gpt_neox_does(spelled: str, tmp_path: Path) -> None:
    assert codes(checked({**SMALL, "precision": spelled}, tmp_path)) == set()
