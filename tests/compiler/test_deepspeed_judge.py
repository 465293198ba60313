"""DeepSpeed itself judges the checker: its own parser, the one who fills "auto", and an engine on the CPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parcompile.backends.kinds import DEEPSPEED
from parcompile.cli.check import command as check_command
from parcompile.diagnostics import Severity
from parcompile.lint.deepspeed import UsageOptions
from parcompile.lint.deepspeed.constructors import on_host
from parcompile.lint.registry import FileRule, file_rules
from parcompile.pipeline import check_any

UPSTREAM = Path(__file__).resolve().parents[2] / ".ci" / "upstream"
RULES = [one for one in file_rules() if one.kind == DEEPSPEED and one.code[0] != "A"]
DRAWN = 150


def module(name: str) -> ModuleType:
    """A module of .ci/upstream."""
    spec = importlib.util.spec_from_file_location(name, UPSTREAM / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


MISTAKES = module("deepspeed_mistakes")


@pytest.fixture(scope="module")
def judge() -> Iterator[Any]:
    pytest.importorskip("deepspeed", minversion="0.19.8")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    with module("deepspeed_judge").Judge() as found:
        yield found


def filler(rule: FileRule) -> str:
    return rule.usage.used_with or ("transformers" if '"auto"' in json.dumps(rule.wrong) else "bare")


@pytest.mark.parametrize(
    "text",
    [
        '{"train_batch_size": 8\n "fp16": {"enabled": true}}',
        '{"fp16": {"enabled": true} "train_batch_size": 8}',
        '{"optimizer": {"type": "Adam" "params": {"lr": 0.1}}, "train_batch_size": 8}',
        '{"train_batch_size": 8 "fp16": {"enabled": true}}',
        '{"train_batch_size": 8, "tensorboard": {"output_path": /home/me/runs\n}}',
        '{"train_batch_size": 8, "tensorboard": {"output_path": /home/me/runs}}',
        '{"train_batch_size": 8, "tensorboard": {"job_name": one of many  \n, "enabled": true}}',
    ],
)
def test_what_hjson_can_do_without_is_a_warning(text: str, tmp_path: Path) -> None:
    hjson = pytest.importorskip("hjson")
    try:
        expected = "warning" if hjson.loads(text) else ""
    except ValueError:
        expected = "error"
    file = tmp_path / "ds_config.json"
    file.write_text(text, encoding="utf-8")
    for usage, severity in ((None, expected), (UsageOptions(used_with="transformers"), "error")):
        found = check_any(file, kind=DEEPSPEED, usage=usage).diagnostics
        assert [one.severity.value for one in found if one.code in ("J004", "J016")] == [severity]


def test_the_shipped_facts_are_those_of_the_installed_version(judge: Any) -> None:
    """keys.json is what DeepSpeed's classes and parser say, the schema is what keys.json says."""
    folder = UPSTREAM.parent / "generate" / "deepspeed"
    for script in ("keys.py", "schema.py"):
        run = subprocess.run([sys.executable, folder / script, "--check"], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_an_error_is_what_deepspeed_refuses(rule: FileRule, judge: Any) -> None:
    wrong, right = (judge.ask(tree, filler=filler(rule)) for tree in (rule.wrong, rule.right))
    assert (wrong.refused is not None) == (rule.severity is Severity.ERROR), wrong
    assert right.accepted, right


@pytest.mark.parametrize("mistake", list(MISTAKES.mistakes()), ids=lambda one: one.name)
def test_a_planted_mistake_is_found(mistake: Any, judge: Any, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(mistake.text, encoding="utf-8")
    checked = check_any(file, kind=DEEPSPEED, usage=UsageOptions(used_with=mistake.filler))
    assert MISTAKES.finds(mistake, checked.diagnostics), checked.diagnostics
    assert (judge.ask(mistake.text, filler=mistake.filler).refused is not None) == mistake.refused


def test_what_the_mistakes_are_planted_into_is_taken(judge: Any, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(MISTAKES.BASE), encoding="utf-8")
    assert check_any(file).diagnostics == ()
    assert judge.ask(MISTAKES.BASE).accepted


def test_drawn_values_are_refused_by_both_or_by_none(judge: Any) -> None:
    draws = module("deepspeed_draws")
    asked = [(text, judge.ask(text, engine=False).refused) for text in itertools.islice(draws.drawn(0), DRAWN)]
    assert [one for one in asked if not draws.is_agreed(*one)] == []


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(("old", "new"), [("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")])
def test_the_fix_of_an_old_offload_key_is_read_as_the_key_was(old: str, new: str, value: bool, tmp_path: Path) -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    written = {"stage": 3, old: value}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": written}))
    assert [one.code for one in check_any(file).diagnostics] == ["F010"]
    with pytest.raises(SystemExit, match="0"):
        check_command.main(["--fix", "--kind", DEEPSPEED, str(file)])
    fixed = json.loads(file.read_text())["zero_optimization"]
    assert old not in fixed
    before, after = zero(**written), zero(**fixed)
    assert (getattr(before, new) is not None) == value
    assert getattr(after, new) == getattr(before, new)
    assert on_host({"zero_optimization": written}) == (before.offload_optimizer is not None)
