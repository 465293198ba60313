"""Megatron-LM arguments on their own: scripts and YAML files, recognised by their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from parcompile.backends.kinds import MEGATRON, UNKNOWN
from parcompile.backends.megatron import write as megatron
from parcompile.pipeline import Checked, check_any, compile_file
from parcompile.rules.file_registry import FileRule, file_rules

SCRIPT = """\
#!/bin/bash
TP=2
export PP=16
# --tensor-model-parallel-size 8
ARGS=(
  --tensor-model-parallel-size ${TP}
  --pipeline-model-parallel-size "$PP" --num-layers 128
  --num-attention-heads=25
  --seq-length 4096 \\
  --fp16
)
torchrun --nproc_per_node $GPUS pretrain_gpt.py ${ARGS[@]}
"""
RULES = [rule for rule in file_rules() if rule.kind == MEGATRON]


def checked(text: str, file: Path) -> Checked:
    file.write_text(text, encoding="utf-8")
    return check_any(file)


def shell(arguments: Any) -> str:
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in arguments.items()
    ]
    return "torchrun pretrain_gpt.py \\\n  " + " \\\n  ".join(flags) + "\n"


def codes(one: Checked) -> set[str]:
    return {found.code for found in one.diagnostics}


def test_a_script_is_read_with_its_variables(tmp_path: Path) -> None:
    done = checked(SCRIPT, tmp_path / "train.sh")
    assert done.kind == MEGATRON
    assert done.document is not None
    assert done.document.tree == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 16,
        "num_layers": 128,
        "num_attention_heads": 25,
        "seq_length": 4096,
        "fp16": True,
        "nproc_per_node": "$GPUS",
    }


def test_a_finding_stands_at_the_value_of_its_flag(tmp_path: Path) -> None:
    (found,) = checked(SCRIPT, tmp_path / "train.sh").diagnostics
    assert (found.code, found.position.line, found.position.column) == ("F103", 6, 32)
    (other,) = found.related
    assert (other.position.line, other.position.column) == (8, 25)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_wrong_example_breaks_the_rule_and_right_one_nothing(rule: FileRule, tmp_path: Path) -> None:
    for name, text in (("args.sh", shell), ("args.yaml", yaml.safe_dump)):
        wrong = checked(text(dict(rule.wrong)), tmp_path / name)
        assert wrong.kind == MEGATRON
        assert codes(wrong) == {rule.code}
        assert all(one.position is not None for one in wrong.diagnostics)
        assert codes(checked(text(dict(rule.right)), tmp_path / name)) == set()


def test_flags_may_stand_in_a_section_with_their_dashes(tmp_path: Path) -> None:
    flags = {f"--{name.replace('_', '-')}": value for name, value in RULES[2].wrong.items()}
    done = checked(yaml.safe_dump({"ENV_VARS": {"A": 1}, "MODEL_ARGS": flags}), tmp_path / "model_config.yaml")
    assert (done.kind, codes(done)) == (MEGATRON, {RULES[2].code})


@pytest.mark.parametrize("text", ["echo hello\n", "python train.py --lr 3\n", "model:\n  num_layers: 3\n"])
def test_other_files_are_no_arguments(text: str, tmp_path: Path) -> None:
    assert checked(text, tmp_path / "file.yaml").kind == UNKNOWN


@pytest.mark.parametrize("name", ["W001-tp-2-of-8", "C001-zigzag-8184", "P004-fp32-sums"])
def test_emitted_arguments_pass(name: str, tmp_path: Path) -> None:
    plan, _ = compile_file(Path(__file__).parents[1] / "specs" / "positive" / f"{name}.json")
    assert plan is not None
    text = " \\\n".join(megatron.as_list(megatron.arguments(plan)))
    done = checked(f"python pretrain_gpt.py {text}\n", tmp_path / "train.sh")
    assert done.kind == MEGATRON
    assert [(one.code, one.message) for one in done.diagnostics] == []
