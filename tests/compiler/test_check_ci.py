"""What others' CI takes from this repository: the pre-commit hook and the composite action run as they are written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "tests" / "specs"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    """With a `parcompile` on the path, as after an installation."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("file", "taken"),
    [
        ("specs/llama.json", True),
        ("runs/spec/llama.yaml", True),
        ("llama.spec.json", True),
        ("ds_config.json", True),
        ("configs/ds_config_zero3.json", True),
        ("configs/deepspeed_bf16.json", True),
        ("package.json", False),
        ("tests/inspector.json", False),
    ],
)
def test_the_hook_takes_specs_and_deepspeed_configs(file: str, taken: bool) -> None:
    (hook,) = load(ROOT / ".pre-commit-hooks.yaml")
    assert bool(re.search(hook["files"], file)) is taken


def test_the_hook_runs_on_files_and_fails_on_mistakes() -> None:
    (hook,) = load(ROOT / ".pre-commit-hooks.yaml")
    for folder, code in (("positive", 0), ("negative", 1)):
        files = [str(file) for file in sorted((SPECS / folder).glob("W001*.json")) if "expected" not in file.name]
        command = [*hook["entry"].split(), *files]
        assert subprocess.run(command, env=environment(), capture_output=True, check=False).returncode == code


def action_step() -> str:
    (step,) = [
        one for one in load(ROOT / ".github/actions/check/action.yml")["runs"]["steps"] if one["name"] == "Check"
    ]
    return str(step["run"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="the action is a bash script")
@pytest.mark.parametrize(("folder", "code"), [("positive", 0), ("negative", 1)])
def test_the_action_checks_patterns_and_writes_sarif(folder: str, code: int, tmp_path: Path) -> None:
    for file in sorted((SPECS / folder).glob("C001*.json")):
        if "expected" not in file.name:
            (tmp_path / "specs" / "deep").mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / "specs" / "deep" / file.name)
    settings = {"SPECS": "specs/**/*.json", "IGNORE": "B005", "WARNINGS_AS_ERRORS": "false", "SARIF": "out.sarif"}
    done = subprocess.run(
        ["bash", "-e", "-c", action_step()],
        cwd=tmp_path,
        env={**environment(), **settings},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert ("::error" in done.stdout) is bool(code)
    assert '"2.1.0"' in (tmp_path / "out.sarif").read_text(encoding="utf-8")
